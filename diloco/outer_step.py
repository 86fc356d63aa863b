"""One outer step on one rank: a closed round's deltas that pass the guards, averaged; outer step; local <- global.

All peers apply the same deltas in the same order, also those that have no part in the round.

What a completed outer step says of itself, its round and its peers, by the names in docs/multi-cluster.md.

From a closed round to the deltas that count: decode, look, reject. The same on every peer.

Which deltas of a round count. A pure function of what every peer received, so all peers reject the same ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from composer_prime.config.diloco import DilocoConfig, GuardConfig
from diloco.codec import codec_from_spec
from diloco.codec.base import shared
from diloco.global_model import GlobalModel
from diloco.ranks import Ranks
from diloco.replica import DeltaStatus, Pending, Replica, Totals, fate_of
from diloco.schedule import Schedule
from diloco.transport.exchange import RoundResult
from diloco.transport.header import Header
from diloco.transport.link import PeerLink
from diloco.transport.messages import RoundOutcome

logger = logging.getLogger(__name__)


MEDIAN_FROM = 3
"""Peers from which on the median says who is out of line; of two, either may be."""


LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""1.8e19. The squares of larger values are infinite in float32: no model with them can be trained."""
_LANES = 1 << 14


def squared_norm(delta_n: Tensor) -> float:
    """Sum of squares in float64; NaN or infinity when an element is.

    It has the same bits on any machine: squares of float32 are exact, element i is added in lane i mod 16384, in order,
    and the lanes are summed with one rounding. The order in which torch's own sum adds depends on the processor.
    """
    lanes = torch.zeros(_LANES, dtype=torch.float64)
    for part in delta_n.split(_LANES):
        lanes[: len(part)] += part.to(torch.float64).square_()
    return math.fsum(lanes.tolist())


def rejected(squared_norms: Mapping[str, float], config: GuardConfig) -> dict[str, str]:
    """Why each rejected peer's delta does not count, by peer; `squared_norms` are of whole deltas, all ranks."""
    norms = {peer: math.sqrt(value) for peer, value in squared_norms.items() if math.isfinite(value)}
    reasons = {peer: "it holds NaN or infinity" for peer in squared_norms if peer not in norms}
    middle = median(norms.values()) if len(norms) >= MEDIAN_FROM else None
    for peer, norm in norms.items():
        if norm > LARGEST_NORM:
            reasons[peer] = f"its norm {norm:.4g} is above {LARGEST_NORM:.4g}: no model can be trained with such values"
        elif config.max_norm is not None and norm > config.max_norm:
            reasons[peer] = f"its norm {norm:.4g} is above diloco.guard.max_norm = {config.max_norm:g}"
        elif middle and norm > config.max_norm_ratio * middle:
            reasons[peer] = (
                f"its norm {norm:.4g} is above {config.max_norm_ratio:g} times the round's median {middle:.4g}"
            )
    return reasons


MAX_WEIGHT = 1e15
"""Tokens; far above what any round trains on, far below where a sum of weights would overflow."""

_ELSEWHERE = "another rank of this cluster cannot use its part: that rank's log says why"


@dataclass(frozen=True, slots=True)
class Accepted:
    deltas: list[Tensor]
    """float32 [numel], in order of the peers' names."""
    weights: list[float]
    norms: dict[str, float]
    """L2 norm over all ranks, by peer."""
    reasons: dict[str, str]
    """Why a peer's delta does not count."""

    def without_all(self, reason: str) -> Accepted:
        """The same round with no delta that counts."""
        return replace(self, deltas=[], weights=[], reasons=dict.fromkeys(self.norms, reason) | self.reasons)


def accept(
    headers: Sequence[Header], bodies: Sequence[memoryview], *, fragment: int, n: int, guard: GuardConfig, ranks: Ranks
) -> Accepted:
    """Decode this rank's part of a round's deltas; a peer that fails on one rank fails on all. A collective."""
    deltas: dict[str, Tensor] = {}
    wrong: dict[str, str] = {}
    for header, body in zip(headers, bodies, strict=True):
        try:
            deltas[header.peer] = _decoded(header, body, fragment, n)
        except ValueError as error:
            wrong[header.peer] = str(error)
    own = [squared_norm(deltas[header.peer]) if header.peer in deltas else math.nan for header in headers]
    squared = {header.peer: total for header, total in zip(headers, ranks.total(own), strict=True)}
    elsewhere = [peer for peer, sent in zip(squared, own, strict=True) if math.isnan(squared[peer]) and sent >= 0]
    reasons = rejected(squared, guard) | dict.fromkeys(elsewhere, _ELSEWHERE) | wrong
    kept = [header for header in headers if header.peer not in reasons]
    return Accepted(
        deltas=[deltas[header.peer] for header in kept],
        weights=[header.weight for header in kept],
        norms={peer: math.sqrt(value) for peer, value in squared.items()},
        reasons=reasons,
    )


def _decoded(header: Header, body: memoryview, fragment: int, n: int) -> Tensor:
    """Raises ValueError for a body that is not what its header says, or one of another fragment."""
    if header.fragment != fragment:
        raise ValueError(f"it is of fragment {header.fragment}, this round is of fragment {fragment}")
    if not 0 <= header.weight <= MAX_WEIGHT:
        raise ValueError(f"its weight is {header.weight:g}, expected 0 to {MAX_WEIGHT:g}")
    return codec_from_spec(header.codec).decode(shared(body), n)


def figures(
    outcome: RoundOutcome, accepted: Accepted, *, model: GlobalModel, totals: Totals, exposed_s: float,
    traffic: tuple[int, int],
) -> dict[str, float]:  # fmt: skip
    """`totals`: of this peer's own work; `exposed_s`: what training waited; `traffic`: bytes sent and received."""
    found: dict[str, float] = {
        "diloco/outer_step": model.outer_step,
        "diloco/sweep": model.sweep,
        "diloco/sync_s": exposed_s,
        "diloco/bytes_sent": traffic[0],
        "diloco/bytes_received": traffic[1],
        "diloco/participants": len(outcome.headers),
        "diloco/rejected": len(accepted.reasons),
        "diloco/quorum": outcome.quorum_id,
        "diloco/missed_rounds": totals.missed,
        "diloco/carried_tokens": totals.carried,
        "diloco/overwritten_tokens": totals.overwritten,
    }
    for header in outcome.headers:
        found[f"diloco/{header.peer}/norm"] = accepted.norms[header.peer]
        found[f"diloco/{header.peer}/weight"] = header.weight
        found[f"diloco/{header.peer}/inner_steps"] = header.inner_steps
    return found


class OuterSteps:
    def __init__(self, config: DilocoConfig, link: PeerLink, replica: Replica, ranks: Ranks) -> None:
        self._config, self._link, self._replica, self._ranks = config, link, replica, ranks
        self._schedule = Schedule.of(config)
        self.metrics: dict[str, float] = {}
        """Figures of the last one."""

    def take(self, arrived: RoundResult, exposed_s: float) -> None:
        """Advance the global model by this round, and give the parameters their values. A collective.

        Whatever delta was on offer is so no more. `exposed_s`: what training waited for the outcome.
        """
        model, replica = self._replica.global_model, self._replica
        fragment = self._schedule.fragment(model.outer_step)
        accepted = self._accepted(fragment, arrived)
        pending, replica.pending = replica.pending, None
        fate = fate_of(self._config.peer_id, pending and pending.header, arrived.outcome.headers, accepted.reasons)
        before_n = model.masters[fragment].clone() if fate is DeltaStatus.MISSED else None
        model.advance(fragment, accepted.deltas, accepted.weights)
        self._settle_error(fragment, fate, pending)
        replica.work.install(fragment, fate, pending and pending.offer, before_n)
        self._link.position(model.outer_step, model.hash)
        self.metrics = figures(
            arrived.outcome, accepted, model=model, totals=replica.work.totals, exposed_s=exposed_s,
            traffic=self._link.traffic,
        )  # fmt: skip

    def _accepted(self, fragment: int, arrived: RoundResult) -> Accepted:
        """The deltas that count. A collective."""
        model = self._replica.global_model
        accepted = accept(
            arrived.outcome.headers, arrived.bodies, fragment=fragment, n=self._replica.fragments[fragment].numel,
            guard=self._config.guard, ranks=self._ranks,
        )  # fmt: skip
        if not self._ranks.all(model.can_advance(fragment, accepted.deltas)):
            accepted = accepted.without_all("the outer step along the round's mean would leave the range of float32")
        for peer, reason in accepted.reasons.items():
            logger.warning("outer step %d: the delta of peer %s is rejected: %s", model.outer_step, peer, reason)
        return accepted

    def _settle_error(self, fragment: int, fate: DeltaStatus, pending: Pending | None) -> None:
        """What compression still owes, now that the round's outcome is in the global model."""
        if fate is DeltaStatus.COUNTED and pending is not None:
            self._replica.feedback.settle(fragment, pending.residual_n)
        elif fate is DeltaStatus.EARLIER:
            self._replica.feedback.reset(fragment)
            if pending is not None:
                logger.warning(
                    "outer step %d holds a delta of another process of peer %s: this one's, of %.0f tokens, is lost",
                    self._replica.global_model.outer_step - 1, self._config.peer_id, pending.offer.work.tokens,
                )  # fmt: skip
