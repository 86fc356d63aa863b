"""Bring a peer to the others' state, at its start or after they continued without it. Read `join` first.

    request a source ──> its own state will do ────────────────────┬──> replay the rounds closed since ──> train
      ^                  another peer's state: check, take over ───┘         │
      └──────────────── the rounds are not kept any more <───────────────────┘

All ranks of a peer ask in step and take over the same state. The rendezvous decides which one
(diloco/rendezvous/starting_state.py), and which training peer serves it (PeerLink, in the background).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError, ChecksumError, DeadlineError
from diloco.fragments import Schedule
from diloco.outer_step import OuterSteps
from diloco.ranks import POLL_S, Ranks
from diloco.state import Replica, unpack_state
from diloco.transport.messages import Gone, StartingState, StateHeader
from diloco.transport.peer_link import PeerLink, RoundResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Healer:
    config: DilocoConfig
    link: PeerLink
    ranks: Ranks
    replica: Replica
    steps: OuterSteps
    on_catch_up: Callable[[int], None]
    """Gets the number of inner steps, beyond this peer's own, of the rounds that it caught up with."""
    on_state_replaced: Callable[[], None]
    """Called when another peer's state replaced all parameters: averages over their past mean nothing any more."""

    def join(self) -> None:
        """Catch up with the others, from this peer's own state or from another peer's. A collective.

        Raises DeadlineError after diloco.heal_timeout_s.
        """
        replica, model = self.replica, self.replica.global_model
        self.link.set_position(model.outer_step, model.hash, training=False)
        before, deadline = model.hash, time.monotonic() + self.config.heal_timeout_s
        must_rejoin: Gone | None = Gone(reason="not joined yet")
        while must_rejoin is not None:
            newest = self._choose_state(deadline)
            if replica.pending is not None:  # its result is taken when it is due, as if this peer had never stopped
                break
            must_rejoin = self.replay(newest)
        if model.hash != before:
            replica.restart_interval()
        elif replica.pending is not None:
            self.link.offer(replica.pending.header, replica.pending.body)
        self.link.set_position(model.outer_step, model.hash, training=True)
        peer, run = self.config.peer_id, self.config.run
        logger.info("peer %s takes part in run %s from outer step %d on", peer, run, model.outer_step)

    def replay(self, newest: int, exposed_s: float = 0.0) -> Gone | None:
        """Apply the closed rounds up to `newest` and those that close meanwhile; Gone when they are not kept.

        `exposed_s`: how long training waited. A collective.
        """
        model = self.replica.global_model
        began = model.outer_step
        while isinstance(result := self.steps.next(newest, self.config.round_timeout_s), RoundResult):
            self.steps.take(result, exposed_s)
            newest = result.outcome.newest
        steps_taken = (model.outer_step - began) * Schedule.of(self.config).interval
        steps_elsewhere = steps_taken - self.replica.inner
        if model.outer_step > began and steps_elsewhere > 0:
            self.on_catch_up(steps_elsewhere)
        return result

    def _choose_state(self, deadline: float) -> int:
        """Take over the state that the rendezvous names, unless this peer's own will do; return the last closed round.

        The ranks ask in step, and all take over or none. A collective. Raises DeadlineError.
        """
        model = self.replica.global_model
        self.link.request_source(model.outer_step, model.hash)
        while True:
            found = self.link.join_source(POLL_S)
            ready, in_time = self.ranks.smallest([found is not None, time.monotonic() < deadline])
            if ready and found is not None and self._agreed(*found):
                return found[0].newest
            if not in_time:
                raise DeadlineError(
                    f"no state to join with within diloco.heal_timeout_s = {self.config.heal_timeout_s:g} s: the "
                    f"rendezvous waits for {self.link.waiting_for}. Raise it if that only needs longer"
                )

    def _agreed(self, start: StartingState, body: bytearray) -> bool:
        """Start from there if all ranks can, or request another state. A collective."""
        model, header = self.replica.global_model, start.header
        serial = header.serial if header is not None else 0
        tensors, problem = None, ""
        same = self.ranks.equal([serial, start.newest])
        if same and header is not None:
            try:
                tensors, _ = unpack_state(body)
                model.verify(tensors, header.outer_step, header.base_hash)
            except (CheckpointError, ChecksumError) as error:
                problem = f"the state that peer {header.peer} serves is refused: {error}"
                logger.warning("%s", problem)
        if not self.ranks.all(same and not problem):
            self.link.request_source(model.outer_step, model.hash, refused=serial if problem else 0, reason=problem)
            return False
        self.link.release_source()
        if header is not None and tensors is not None:
            self._take_over(header, tensors)
        return True

    def _take_over(self, header: StateHeader, tensors: dict[str, Tensor]) -> None:
        tokens_given_up = self.replica.take_over(tensors, header.outer_step)
        self.on_state_replaced()
        logger.info(
            "took over the state of peer %s at outer step %d; own work on %.0f tokens is given up", header.peer,
            header.outer_step, tokens_given_up,
        )  # fmt: skip
