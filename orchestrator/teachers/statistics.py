"""Agreement and permutation tests of the density gate. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fleiss_kappa(counts: Sequence[Sequence[int]]) -> float | None:
    """Agreement beyond chance (Fleiss 1971), with any number of votes a subject.

    `counts` [subjects, categories]: votes for each category. Subjects with one vote say nothing about agreement and
    are left out. None where nothing is left, or all votes fall into one category (chance alone agrees fully).
    """
    table = np.asarray([row for row in counts if sum(row) >= 2], dtype=np.float64)
    if not len(table):
        return None
    votes = table.sum(axis=1)
    observed = float((((table**2).sum(axis=1) - votes) / (votes * (votes - 1))).mean())
    shares = table.sum(axis=0) / table.sum()
    expected = float((shares**2).sum())
    return None if expected == 1 else (observed - expected) / (1 - expected)


def sign_flip_p(values: Sequence[float], *, resamples: int = 9_999, seed: int = 0) -> float:
    """Two-sided p of "the sign of each value is a coin flip", by the mean: labels that say nothing could be flipped.

    (1 + resamples at least as extreme) / (1 + resamples), so never 0.
    """
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    seen = abs(data.mean())
    extreme = 0
    for start in range(0, resamples, 1_000):
        signs = rng.choice((-1.0, 1.0), size=(min(1_000, resamples - start), len(data)))
        extreme += int((np.abs((signs * data).mean(axis=1)) >= seen - 1e-12).sum())
    return (1 + extreme) / (1 + resamples)


def difference_p(first: Sequence[float], second: Sequence[float], *, resamples: int = 9_999, seed: int = 0) -> float:
    """Two-sided p of "both samples are from one distribution", by the difference of means, under permutation."""
    pooled = np.concatenate([np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)])
    cut, rng = len(first), np.random.default_rng(seed)
    seen = abs(pooled[:cut].mean() - pooled[cut:].mean())
    extreme = 0
    for _ in range(resamples):
        drawn = rng.permutation(pooled)
        extreme += int(abs(drawn[:cut].mean() - drawn[cut:].mean()) >= seen - 1e-12)
    return (1 + extreme) / (1 + resamples)
