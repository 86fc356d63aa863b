"""How a peer comes to stand where the others stand, at its start or when they went on without it. Read `join` first.

    seek ──> found: its own state will do ───────────────┬──> replay the rounds closed since ──> train
      ^      found: another peer's; check, take over it ─┘         │
      └──────────────── they are not kept any more <───────────────┘

All its ranks ask in step and take over the same. With what a peer joins the rendezvous decides (joining.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError, ChecksumError, DeadlineError
from diloco.outcomes import RoundResults
from diloco.outer_step import OuterSteps
from diloco.ranks import SLICE_S, Ranks
from diloco.replica import Replica
from diloco.schedule import Schedule
from diloco.state_file import unpacked
from diloco.transport.exchange import MustRejoin, RoundResult
from diloco.transport.header import Header
from diloco.transport.link import PeerLink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerState:
    """Another peer's, unpacked and checked."""

    header: Header
    tensors: dict[str, Tensor]
    digests: list[str]


class Healer:
    def __init__(
        self,
        config: DilocoConfig,
        link: PeerLink,
        replica: Replica,
        outcomes: RoundResults,
        steps: OuterSteps,
        ranks: Ranks,
    ) -> None:
        self._config, self._interval = config, Schedule.of(config).interval
        self._link, self._replica, self._outcomes, self._steps, self._ranks = link, replica, outcomes, steps, ranks
        self.replayed: Callable[[int], None] = lambda steps: None
        """Told how many inner steps more than this peer's own are behind the rounds that it has just caught up with."""
        self.replaced: Callable[[], None] = lambda: None
        """Told that all parameters come from another peer's state now: averages over their past mean nothing."""

    def join(self) -> None:
        """Stand where the others stand: with what this peer has, or with the state of one of them. A collective.

        Raises DeadlineError after diloco.heal_timeout_s.
        """
        replica, model = self._replica, self._replica.global_model
        self._link.position(model.outer_step, model.hash, training=False)
        before, deadline = model.hash, time.monotonic() + self._config.heal_timeout_s
        left: MustRejoin | None = MustRejoin("not joined yet")
        while left is not None:
            newest, state = self._find(deadline)
            if state is not None:
                self._take_over(state)
                state = None  # as large as the model: not to be kept for as long as the replay takes
            if replica.pending is not None:  # its outcome is taken when it is due, as if this peer had not been away
                break
            left = self.replay(newest)
        if model.hash != before:
            replica.restart_interval()
        elif replica.pending is not None:
            self._link.offer(replica.pending.header, replica.pending.body)
        self._link.position(model.outer_step, model.hash, training=True)
        peer, run = self._config.peer_id, self._config.run
        logger.info("peer %s takes part in run %s from outer step %d on", peer, run, model.outer_step)

    def replay(self, newest: int, exposed_s: float = 0.0) -> MustRejoin | None:
        """Apply the closed rounds up to `newest` and those that close meanwhile; Left when they are not kept.

        `exposed_s`: what training waited. A collective.
        """
        model = self._replica.global_model
        began = model.outer_step
        while isinstance(arrived := self._outcomes.next(newest, self._config.round_timeout_s), RoundResult):
            self._steps.take(arrived, exposed_s)
            newest = arrived.outcome.newest
        elsewhere = (model.outer_step - began) * self._interval - self._replica.inner
        if model.outer_step > began and elsewhere > 0:
            self.replayed(elsewhere)
        return arrived

    def _find(self, deadline: float) -> tuple[int, PeerState | None]:
        """The last closed round, and a state that all ranks can take over, None where their own will do.

        Alike on all ranks, which ask in step. A collective. Raises DeadlineError.
        """
        model = self._replica.global_model
        self._link.seek(model.outer_step, model.hash)
        while True:
            found = self._link.found(SLICE_S)
            ready, in_time = self._ranks.smallest([found is not None, time.monotonic() < deadline])
            if ready and found is not None:
                if self._ranks.alike([found.serial, found.newest]):
                    state = self._opened(found.header, found.body) if found.header is not None else None
                    if self._ranks.all(found.header is None or state is not None):
                        self._link.sought()
                        return found.newest, state
                self._link.seek(model.outer_step, model.hash)
            if not in_time:
                raise DeadlineError(
                    f"no state to join with within diloco.heal_timeout_s = {self._config.heal_timeout_s:g} s: the "
                    f"rendezvous waits for {self._link.waiting_for}. Raise it if that only needs longer"
                )

    def _opened(self, header: Header, body: bytearray) -> PeerState | None:
        """None for a state that this rank cannot take over: another source is asked for it."""
        try:
            tensors, _ = unpacked(body)
            return PeerState(
                header, tensors, self._replica.global_model.checked(tensors, header.outer_step, header.base_hash)
            )
        except (CheckpointError, ChecksumError) as error:
            problem = f"the state that peer {header.peer} serves is refused: {error}"
            logger.warning("%s", problem)
            self._link.refuse_state(header.serial, problem)
            return None

    def _take_over(self, state: PeerState) -> None:
        header = state.header
        given_up = self._replica.take_over(state.tensors, header.outer_step, state.digests)
        self.replaced()
        logger.info(
            "took over the state of peer %s at outer step %d; own work on %.0f tokens is given up", header.peer,
            self._replica.global_model.outer_step, given_up,
        )  # fmt: skip
