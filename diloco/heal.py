"""How a peer comes to stand where the others stand, at its start or when they went on without it. Read `join` first.

    request a source ──> its own state will do ────────────────────┬──> replay the rounds closed since ──> train
      ^                  another peer's state: check, take over ───┘         │
      └──────────────── the rounds are not kept any more <───────────────────┘

All ranks of a peer ask in step and take over the same state. The rendezvous decides which one
(diloco/rendezvous/joining.py), and which training peer serves it (StateServer).
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
from diloco.global_model import GlobalModel
from diloco.outer_step import OuterSteps, RoundResults
from diloco.ranks import POLL_S, Ranks
from diloco.state import Replica, pack_state, unpack_state
from diloco.transport.link import PeerLink
from diloco.transport.messages import Header
from diloco.transport.session import MustRejoin, RoundResult

logger = logging.getLogger(__name__)


class StateServer:
    """Serves the global state of a training peer to those that join."""

    def __init__(self, link: PeerLink, model: GlobalModel, peer: str) -> None:
        """`peer`: the name of this one."""
        self._link = link
        self._model = model
        self._peer = peer
        self._damaged_hash = ""
        """Hash of the global model that was last found damaged."""

    def serve(self, serial: int) -> None:
        """Copy the global state and upload the copy in the background. A damaged state is not served.

        `serial`: of the request, `PeerLink.state_request` on all ranks.
        """
        model = self._model
        if model.hash == self._damaged_hash or not model.intact:  # joining peers ask again and again: read it once
            self._damaged_hash = model.hash
            problem = f"its global model was damaged in memory since outer step {model.outer_step}"
            logger.error("the state of peer %s is not served: %s", self._peer, problem)
            self._link.refuse_state(serial, problem)
            return
        body = pack_state(model.tensors(), {})
        header = self._link.header("state", body, model.outer_step, model.hash, serial=serial)
        logger.info("serving the global state of outer step %d (%.1f MB)", header.outer_step, len(body) / 1e6)
        self._link.serve_state(header, body)


@dataclass(frozen=True, slots=True)
class PeerState:
    """Another peer's state, unpacked and checked."""

    header: Header
    tensors: dict[str, Tensor]
    digests: list[str]


class Healer:
    def __init__(
        self,
        config: DilocoConfig,
        link: PeerLink,
        replica: Replica,
        results: RoundResults,
        steps: OuterSteps,
        ranks: Ranks,
        *,
        on_catch_up: Callable[[int], None] = lambda steps: None,
        on_state_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_catch_up` gets the inner steps beyond this peer's own that are behind the rounds it caught up with.

        `on_state_replaced` is called when all parameters were replaced by another peer's state: averages over their
        past mean nothing any more.
        """
        self._config = config
        self._interval = Schedule.of(config).interval
        self._link = link
        self._replica = replica
        self._results = results
        self._steps = steps
        self._ranks = ranks
        self._on_catch_up = on_catch_up
        self._on_state_replaced = on_state_replaced

    def join(self) -> None:
        """Stand where the others stand: with this peer's own state, or with another peer's. A collective.

        Raises DeadlineError after diloco.heal_timeout_s.
        """
        replica, model = self._replica, self._replica.global_model
        self._link.set_position(model.outer_step, model.hash, training=False)
        before, deadline = model.hash, time.monotonic() + self._config.heal_timeout_s
        must_rejoin: MustRejoin | None = MustRejoin("not joined yet")
        while must_rejoin is not None:
            newest, state = self._find_source(deadline)
            if state is not None:
                self._take_over(state)
                state = None  # as large as the model: do not keep it during the replay
            if replica.pending is not None:  # its result is taken when it is due, as if this peer had never stopped
                break
            must_rejoin = self.replay(newest)
        if model.hash != before:
            replica.restart_interval()
        elif replica.pending is not None:
            self._link.offer(replica.pending.header, replica.pending.body)
        self._link.set_position(model.outer_step, model.hash, training=True)
        peer, run = self._config.peer_id, self._config.run
        logger.info("peer %s takes part in run %s from outer step %d on", peer, run, model.outer_step)

    def replay(self, newest: int, exposed_s: float = 0.0) -> MustRejoin | None:
        """Apply the closed rounds up to `newest` and those that close meanwhile; MustRejoin when they are not kept.

        `exposed_s`: how long training waited. A collective.
        """
        model = self._replica.global_model
        began = model.outer_step
        while isinstance(result := self._results.next(newest, self._config.round_timeout_s), RoundResult):
            self._steps.take(result, exposed_s)
            newest = result.outcome.newest
        steps_elsewhere = (model.outer_step - began) * self._interval - self._replica.inner
        if model.outer_step > began and steps_elsewhere > 0:
            self._on_catch_up(steps_elsewhere)
        return result

    def _find_source(self, deadline: float) -> tuple[int, PeerState | None]:
        """Return the last closed round, and a state that all ranks can take over; None where their own will do.

        The result is alike on all ranks, which ask in step. A collective. Raises DeadlineError.
        """
        model = self._replica.global_model
        self._link.request_source(model.outer_step, model.hash)
        while True:
            source = self._link.join_source(POLL_S)
            ready, in_time = self._ranks.smallest([source is not None, time.monotonic() < deadline])
            if ready and source is not None:
                if self._ranks.equal([source.serial, source.newest]):
                    state = self._unpack(source.header, source.body) if source.header is not None else None
                    if self._ranks.all(source.header is None or state is not None):
                        self._link.release_source()
                        return source.newest, state
                self._link.request_source(model.outer_step, model.hash)
            if not in_time:
                raise DeadlineError(
                    f"no state to join with within diloco.heal_timeout_s = {self._config.heal_timeout_s:g} s: the "
                    f"rendezvous waits for {self._link.waiting_for}. Raise it if that only needs longer"
                )

    def _unpack(self, header: Header, body: bytearray) -> PeerState | None:
        """Return None for a state that this rank cannot take over: the rendezvous then asks another source."""
        try:
            tensors, _ = unpack_state(body)
            digests = self._replica.global_model.verify(tensors, header.outer_step, header.base_hash)
            return PeerState(header, tensors, digests)
        except (CheckpointError, ChecksumError) as error:
            problem = f"the state that peer {header.peer} serves is refused: {error}"
            logger.warning("%s", problem)
            self._link.refuse_state(header.serial, problem)
            return None

    def _take_over(self, state: PeerState) -> None:
        header = state.header
        tokens_given_up = self._replica.take_over(state.tensors, header.outer_step, state.digests)
        self._on_state_replaced()
        logger.info(
            "took over the state of peer %s at outer step %d; own work on %.0f tokens is given up", header.peer,
            self._replica.global_model.outer_step, tokens_given_up,
        )  # fmt: skip
