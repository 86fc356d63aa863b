"""Which deltas of a round count. A pure function of what every peer received, so all peers reject the same ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from composer_prime.config.diloco import GuardConfig

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
