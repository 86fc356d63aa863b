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
from diloco.ranks import Ranks
from diloco.wire import Header

MAX_WEIGHT = 1e15
"""Tokens; far above what any round trains on, far below where a sum of weights would overflow."""


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
    deltas = {
        header.peer: _decoded(header, body, fragment, n) for header, body in zip(headers, bodies, strict=True)
    }
    own = [math.nan if delta is None else squared_norm(delta) for delta in deltas.values()]
    squared = dict(zip(deltas, ranks.total(own), strict=True))
    reasons = rejected(squared, guard)
    kept = [header for header in headers if header.peer not in reasons]
    return Accepted(
        deltas=[delta for header in kept if (delta := deltas[header.peer]) is not None],
        weights=[header.weight for header in kept],
        norms={peer: math.sqrt(value) for peer, value in squared.items()},
        reasons=reasons,
    )


def _decoded(header: Header, body: memoryview, fragment: int, n: int) -> Tensor | None:
    """None for a body that is not what its header says, or one of another fragment."""
    if header.fragment != fragment or not 0 <= header.weight <= MAX_WEIGHT:
        return None
    try:
        codec = codec_from_spec(header.codec)
        return codec.decode(shared(body), n)
    except ValueError:
        return None
