"""Estimates over tasks: pass@k and confidence intervals. Torch-free; evaluation and reports share them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of k draws passes, without bias: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1).

    `samples` n rollouts of one task, `passed` c of them passed. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"pass@{k} of {passed} passes in {samples} samples: k needs 1 <= k <= samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean of `values` (one a task: tasks are what is drawn at random).

    None for fewer than two values. Reproducible: the same values and seed give the same interval.
    """
    if len(values) < 2:
        return None
    data = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(data), size=(resamples, len(data)))
    low, high = np.quantile(data[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
