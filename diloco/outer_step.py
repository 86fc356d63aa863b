"""How a round ends on one rank, and how a peer gets to where the others are.

    wait ──> accept: decode, check, reject ──> take: GlobalModel.advance, local <- global

    join: request a source ──> its own state will do ────────────────────┬──> replay the rounds closed since ──> train
            ^                  another peer's state: check, take over ───┘         │
            └──────────────── the rounds are not kept any more <───────────────────┘

Order of waiting: each rank hears a result over a link of its own, and all must take the same turn. A rank that knows
how a round ended waits until the others know the same, which needs all of them to take part. All ranks of a peer ask
for a state in step and take over the same one. The rendezvous decides which (diloco/rendezvous/starting_state.py), and
which training peer serves it (Exchange, in the background).

All peers apply the same deltas in the same order, also peers that have no part in the round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError, ChecksumError, DeadlineError
from diloco.fragments import POLL_S, Ranks, Schedule
from diloco.global_model import MAX_WEIGHT_RATIO, AcceptedDeltas, accept
from diloco.state import DeltaStatus, PendingDelta, Replica, delta_status, unpack_state
from diloco.transport.messages import Gone, RoundOutcome, StartingState, StateHeader
from diloco.transport.peer_link import PeerLink, RoundResult

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class OuterSteps:
    """Joins the others, waits for the results of rounds alike on all ranks, and takes them into the model."""

    config: DilocoConfig
    link: PeerLink
    ranks: Ranks
    replica: Replica
    on_catch_up: Callable[[int], None]
    """Gets the number of inner steps, beyond this peer's own, of the rounds that it caught up with."""
    on_state_replaced: Callable[[], None]
    """Called when another peer's state replaced all parameters: averages over their past mean nothing any more."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last outer step, by the names in docs/how-to/several-clusters.md."""
    _in_step_at: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float, should_stop: Callable[[], bool] = lambda: False) -> RoundResult | Gone | None:
        """Return the result of the current round; Gone when one of the ranks must rejoin.

        None without a result after `timeout_s` or once `should_stop`. A collective.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            result = self.link.wait(min(POLL_S, timeout_s))
            rating = {RoundResult: 2, Gone: 1}.get(type(result), 0)
            lowest, in_time = self.ranks.smallest([rating, time.monotonic() < deadline and not should_stop()])
            if (agreed := self._agreed(result, lowest)) is not None or not in_time:
                return agreed

    def _agreed(self, result: RoundResult | Gone | None, lowest: int) -> RoundResult | Gone | None:
        """Return what all ranks take, None where they have to ask again. `lowest`: of the ranks' ratings."""
        if lowest == 1:
            return result if isinstance(result, Gone) else Gone(reason="another rank was left behind")
        if isinstance(result, RoundResult) and lowest == 2:
            if self.ranks.equal([int(result.outcome.digest[:15] or "0", 16)]):  # 60 bits
                return result
            logger.warning(
                "the ranks of this cluster got different outcomes of outer step %d and ask again. If this repeats: is "
                "%s the address of more than one rendezvous?", result.outcome.outer_step, self.config.rendezvous,
            )  # fmt: skip
            time.sleep(POLL_S)  # a rendezvous may be replacing another
            self.link.retry_round()
        elif isinstance(result, RoundResult) and self.link.rendezvous_restarted:
            self.link.retry_round()  # the other ranks get nothing unless this one takes part
        return None

    def next(self, newest: int, timeout_s: float) -> RoundResult | Gone | None:
        """Return the next closed round of those up to `newest`; None when there is none. A collective."""
        model = self.replica.global_model
        if self.ranks.smallest([newest])[0] < model.outer_step:
            return None
        self.link.fetch(model.outer_step, model.hash)
        return self.wait(timeout_s)

    def mark_in_step(self) -> None:
        """Note that this peer has caught up with the others: from now on it counts the silence."""
        self._in_step_at = time.monotonic()

    def silent_s(self) -> float:
        """Return the seconds since `mark_in_step`. A collective.

        Raises DeadlineError after diloco.offline_timeout_s.
        """
        silent_s = time.monotonic() - self._in_step_at
        if self.ranks.any(silent_s > self.config.offline_timeout_s):
            raise DeadlineError(
                f"no outcome of outer step {self.replica.global_model.outer_step} for {silent_s:.0f} s "
                f"(diloco.offline_timeout_s = {self.config.offline_timeout_s:g}): the rendezvous at "
                f"{self.config.rendezvous} last reported that it waits for {self.link.waiting_for}. Is it reachable, "
                "and are enough peers alive? Go on with --resume"
            )
        return silent_s

    # -- the outer step ------------------------------------------------------------------------------------------

    def take(self, result: RoundResult, exposed_s: float) -> None:
        """Advance the global model by this round, and give the parameters their values. A collective.

        The delta on offer ends here, counted or not. `exposed_s`: how long training waited for the result.
        """
        model, replica = self.replica.global_model, self.replica
        fragment = Schedule.of(self.config).fragment(model.outer_step)
        accepted = self._accepted(fragment, result)
        pending, replica.pending = replica.pending, None
        offered = pending and pending.header
        status = delta_status(self.config.peer_id, offered, result.outcome.headers, accepted.rejections)
        before_n = model.masters[fragment].clone() if status is DeltaStatus.MISSED else None
        model.advance(fragment, accepted.deltas(), accepted.weights, accepted.remembered)
        self._settle_residual(fragment, status, pending)
        replica.progress.install(fragment, status, pending, before_n)
        self.link.set_position(model.outer_step, model.hash)
        self._note_metrics(result.outcome, accepted, exposed_s)

    def _accepted(self, fragment: int, result: RoundResult) -> AcceptedDeltas:
        """Return the deltas that count. A collective."""
        model = self.replica.global_model
        accepted = accept(
            result.outcome.headers, result.bodies, fragment=fragment, n=self.replica.fragments[fragment].numel,
            ranks=self.ranks, history=model.norms[fragment].tolist(),
        )  # fmt: skip
        for peer, reason in accepted.rejections.items():
            logger.warning("outer step %d: the delta of peer %s is rejected: %s", model.outer_step, peer, reason)
        for (header, _), weight in zip(accepted.counted, accepted.weights, strict=True):
            if weight < header.weight:
                logger.warning(
                    "outer step %d: the delta of peer %s claims the weight %g and counts %g, %g times the round's "
                    "median", model.outer_step, header.peer, header.weight, weight,
                    MAX_WEIGHT_RATIO,
                )  # fmt: skip
        return accepted

    def _settle_residual(self, fragment: int, status: DeltaStatus, pending: PendingDelta | None) -> None:
        if status is DeltaStatus.COUNTED and pending is not None:
            self.replica.feedback.settle(fragment, pending.residual_n)
        elif status is DeltaStatus.PREDECESSOR:
            self.replica.feedback.reset(fragment)
            if pending is not None:
                logger.warning(
                    "outer step %d used a delta of another process of peer %s: this process's, of %.0f tokens, is lost",
                    self.replica.global_model.outer_step - 1, self.config.peer_id, pending.work.tokens,
                )  # fmt: skip

    def _note_metrics(self, outcome: RoundOutcome, accepted: AcceptedDeltas, exposed_s: float) -> None:
        totals, (bytes_sent, bytes_received) = self.replica.progress.totals, self.link.traffic
        self.metrics = {
            "diloco/outer_step": self.replica.global_model.outer_step,
            "diloco/sweep": self.replica.global_model.sweep,
            "diloco/sync_s": exposed_s,
            "diloco/bytes_sent": bytes_sent,
            "diloco/bytes_received": bytes_received,
            "diloco/participants": len(outcome.headers),
            "diloco/rejected": len(accepted.rejections),
            "diloco/missed_rounds": totals.missed,
            "diloco/carried_tokens": totals.carried,
            "diloco/overwritten_tokens": totals.overwritten,
        }
        for header in outcome.headers:
            self.metrics[f"diloco/{header.peer}/norm"] = accepted.norms[header.peer]
            self.metrics[f"diloco/{header.peer}/weight"] = header.weight
            self.metrics[f"diloco/{header.peer}/inner_steps"] = header.inner_steps

    # -- joining ---------------------------------------------------------------------------------------------------

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
        while isinstance(result := self.next(newest, self.config.round_timeout_s), RoundResult):
            self.take(result, exposed_s)
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
            if ready and found is not None and self._start_from(*found):
                return found[0].newest
            if not in_time:
                raise DeadlineError(
                    f"no state to join with within diloco.heal_timeout_s = {self.config.heal_timeout_s:g} s: the "
                    f"rendezvous waits for {self.link.waiting_for}. Raise it if that only needs longer"
                )

    def _start_from(self, start: StartingState, body: bytearray) -> bool:
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
