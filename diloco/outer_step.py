"""How a round ends on one rank: its result, alike on all ranks; the deltas that count; the outer step.

    OuterSteps.wait ──> accept: decode, check, reject ──> take: GlobalModel.advance, local <- global

Order of waiting: each rank hears a result over a link of its own, and all must take the same turn. A rank that knows
how a round ended waits until the others know the same, which needs all of them to take part.

All peers apply the same deltas in the same order, also peers that have no part in the round. Which deltas count is a
pure function of what every peer received, so all peers reject the same ones.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high, median_low

import torch
from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import DeadlineError, RunMismatchError
from diloco.codec import codec_of, shared_bytes
from diloco.fragments import Schedule
from diloco.outer_optimizer import largest_of
from diloco.ranks import POLL_S, Ranks
from diloco.state import DeltaStatus, PendingDelta, Replica, delta_status
from diloco.transport.messages import DeltaHeader, Gone, RoundOutcome
from diloco.transport.peer_link import PeerLink, RoundResult

logger = logging.getLogger(__name__)

MAX_NORM_RATIO = 10.0
"""A delta is rejected whose norm exceeds this many times the usual one: the median of the fragment's last 16 deltas, or
of the round if that is larger."""
MAX_WEIGHT_RATIO = 8.0
"""A delta's weight counts at most this many times the median weight of the round. Of two, the smaller is the median."""
_MAX_DISPUTES = 3
"""How often in a row the ranks may get different outcomes. A rendezvous that was restarted causes one."""


# -- the deltas that count ---------------------------------------------------------------------------------------

LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""1.8e19. The squares of larger values are infinite in float32: no model with them can be trained."""
MAX_WEIGHT = 1e15
"""In tokens; far above what any round trains on, far below where a sum of weights would overflow."""
_LANES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedDeltas:
    n: int
    """Elements of the fragment on this rank."""
    counted: list[tuple[DeltaHeader, memoryview]]
    """What was accepted, encoded, in order of the peers' names."""
    weights: list[float]
    """Of those, each at most MAX_WEIGHT_RATIO times their low median."""
    largest: float
    """Largest absolute value of those on this rank."""
    norms: dict[str, float]
    """L2 norm over all ranks, by peer."""
    remembered: list[float]
    """Norms that later rounds are compared with: of every finite delta, none above what would have been accepted."""
    rejections: dict[str, str]
    """Why a peer's delta does not count."""

    def deltas(self) -> Iterator[Tensor]:
        """Decode float32 [n] one by one: several whole deltas at once would be the peak of a cluster's host memory."""
        return (codec_of(header.codec).decode(shared_bytes(body), self.n) for header, body in self.counted)


def accept(
    headers: Sequence[DeltaHeader],
    bodies: Sequence[memoryview],
    *,
    fragment: int,
    n: int,
    ranks: Ranks,
    history: Sequence[float] = (),
) -> AcceptedDeltas:
    """Check this rank's part of a round's deltas. A peer that fails on one rank fails on all. A collective.

    `history`: norms that this fragment's deltas had before.
    """
    own: list[float] = []
    largest: dict[str, float] = {}
    undecodable: dict[str, str] = {}
    for header, body in zip(headers, bodies, strict=True):
        try:
            delta_n = _decode(header, body, fragment, n)
            own.append(squared_norm(delta_n))
            largest[header.peer] = largest_of(delta_n)
            del delta_n  # before the next one is decoded
        except ValueError as error:
            own.append(math.nan)
            undecodable[header.peer] = str(error)
    squared = {header.peer: total for header, total in zip(headers, ranks.total(own), strict=True)}
    elsewhere = [peer for peer, mine in zip(squared, own, strict=True) if math.isnan(squared[peer]) and mine >= 0]
    another_rank = "another rank of this cluster cannot use its part: see that rank's log"
    rejections = rejected(squared, history) | dict.fromkeys(elsewhere, another_rank) | undecodable
    counted = [(header, body) for header, body in zip(headers, bodies, strict=True) if header.peer not in rejections]
    norms = {peer: math.sqrt(value) for peer, value in squared.items()}
    usual = _usual_norm(norms.values(), history, MAX_NORM_RATIO)
    bound = min(LARGEST_NORM, MAX_NORM_RATIO * usual if usual else LARGEST_NORM)
    return AcceptedDeltas(
        n=n,
        counted=counted,
        weights=_capped([header.weight for header, _ in counted], MAX_WEIGHT_RATIO),
        largest=max((largest[header.peer] for header, _ in counted), default=0.0),
        norms=norms,
        remembered=[min(norm, bound) for norm in norms.values() if math.isfinite(norm)],
        rejections=rejections,
    )


def rejected(squared_norms: Mapping[str, float], history: Sequence[float] = ()) -> dict[str, str]:
    """Return why each rejected peer's delta does not count; `squared_norms` are of whole deltas, over all ranks."""
    norms = {peer: math.sqrt(value) for peer, value in squared_norms.items() if math.isfinite(value)}
    reasons = {peer: "it holds NaN or infinity" for peer in squared_norms if peer not in norms}
    usual = _usual_norm(norms.values(), history, MAX_NORM_RATIO)
    for peer, norm in norms.items():
        if norm > LARGEST_NORM:
            reasons[peer] = f"its norm {norm:.4g} is above {LARGEST_NORM:.4g}: no model can be trained with such values"
        elif usual and norm > MAX_NORM_RATIO * usual:
            reasons[peer] = (
                f"its norm {norm:.4g} is above {MAX_NORM_RATIO:g} times the usual "
                f"{usual:.4g} of this round and those before"
            )
    return reasons


def _usual_norm(norms: Iterable[float], history: Sequence[float], ratio: float) -> float | None:
    """Return the norm that deltas may exceed by `ratio`; None when nothing is known.

    It is the median of `history` or, where that is larger, the low median of this round, from two norms on: what the
    peers of a round have in common (a new learning rate, a phase without any reward that ends) passes, whatever was
    before. Without a history it is the round's median. A norm of 0 shows nothing.

    Peers train with their own sync_every and rate, so half of them may have norms that are larger for good. Of an even
    number of norms the higher middle one counts, but at most as `ratio` times the lower. With `history` as in
    AcceptedDeltas.remembered, half of the peers are accepted with norms up to ratio^2 times the others', after eight
    rounds at most where they were smaller before. Beyond that they never are while the others take part.
    """
    of_round, before = [[norm for norm in each if 0 < norm < math.inf] for each in (norms, history)]
    if not before:
        return _median(of_round, ratio) if of_round else None
    return max(_median(before, ratio), median_low(of_round) if len(of_round) > 1 else 0.0)


def _median(norms: Sequence[float], ratio: float) -> float:
    return min(median_high(norms), ratio * median_low(norms))


def _capped(weights: Sequence[float], ratio: float) -> list[float]:
    """Return the weights, each at most `ratio` times the low median of those above 0.

    Of two peers that is the smaller: one that claims 4e14 tokens must not own the model, and nobody else can say that
    it is wrong. So an honest peer that trains more than `ratio` times as much as the other counts `ratio` times.
    """
    positive = [weight for weight in weights if weight > 0]
    return [min(weight, ratio * median_low(positive)) for weight in weights] if positive else list(weights)


def squared_norm(delta_n: Tensor) -> float:
    """Return the sum of squares in float64; NaN or infinity when an element is.

    It has the same bits on any machine: squares of float32 are exact, element i is added in lane i mod 16384, in order,
    and the lanes are summed with one rounding. The order in which torch's own sum adds depends on the processor.
    """
    lanes = torch.zeros(_LANES, dtype=torch.float64)
    for part in delta_n.split(_LANES):
        lanes[: len(part)] += part.to(torch.float64).square_()
    return math.fsum(lanes.tolist())


def _decode(header: DeltaHeader, body: memoryview, fragment: int, n: int) -> Tensor:
    """Raises ValueError for a body that does not match its header, or one of another fragment."""
    if header.fragment != fragment:
        raise ValueError(f"it is of fragment {header.fragment}, this round is of fragment {fragment}")
    if not 0 <= header.weight <= MAX_WEIGHT:
        raise ValueError(f"its weight is {header.weight:g}, expected 0 to {MAX_WEIGHT:g}")
    return codec_of(header.codec).decode(shared_bytes(body), n)


# -- the outer step ----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class OuterSteps:
    """Waits for the results of rounds, alike on all ranks of a peer, and takes them into the model."""

    config: DilocoConfig
    link: PeerLink
    ranks: Ranks
    replica: Replica
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last outer step, by the names in docs/how-to/several-clusters.md."""
    _disputes: int = 0
    """How often in a row the ranks got different outcomes."""
    _in_step_at: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float, should_stop: Callable[[], bool] = lambda: False) -> RoundResult | Gone | None:
        """Return the result of the current round; Gone when one of the ranks must rejoin.

        None without a result after `timeout_s` or once `should_stop`. A collective.

        Raises RunMismatchError when the ranks get different outcomes again and again.
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
            if self._same_on_all_ranks(result):
                return result
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

    def _same_on_all_ranks(self, result: RoundResult) -> bool:
        digest = int(result.outcome.digest[:15] or "0", 16)  # 60 bits
        ((lowest, highest),) = self.ranks.bounds([digest])
        self._disputes = 0 if lowest == highest else self._disputes + 1
        if self._disputes == _MAX_DISPUTES:
            raise RunMismatchError(
                f"the ranks of peer {self.config.peer_id} got different outcomes of outer step "
                f"{self.replica.global_model.outer_step} {_MAX_DISPUTES} times in a row ({lowest:015x} and "
                f"{highest:015x}), so their parts of the model would not fit together. Is {self.config.rendezvous} the "
                "address of more than one rendezvous? Keep one of them, and continue with --resume"
            )
        return not self._disputes

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
        replica.progress.install(fragment, status, pending and pending.coverage, before_n)
        self.link.set_position(model.outer_step, model.hash)
        self._note_metrics(result.outcome, accepted, exposed_s)

    def _accepted(self, fragment: int, result: RoundResult) -> AcceptedDeltas:
        """Return the deltas that count. A collective."""
        model = self.replica.global_model
        accepted = accept(
            result.outcome.headers, result.bodies, fragment=fragment, n=self.replica.fragments[fragment].numel,
            ranks=self.ranks, history=model.norms[fragment].tolist(),
        )  # fmt: skip
        if not self.ranks.all(model.can_advance(fragment, accepted.largest)):
            reason = "the outer step along the round's mean would leave the range of float32"
            rejections = dict.fromkeys(accepted.norms, reason) | accepted.rejections
            accepted = replace(accepted, counted=[], weights=[], rejections=rejections)
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
                    self.replica.global_model.outer_step - 1, self.config.peer_id, pending.coverage.work.tokens,
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
