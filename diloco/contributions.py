"""From a closed round to the deltas that count: decode, look, reject. The same on every peer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from composer_prime.config.diloco import GuardConfig
from diloco.codec import codec_from_spec
from diloco.codec.base import shared
from diloco.guard import rejected, squared_norm
from diloco.header import Header
from diloco.ranks import Ranks

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
