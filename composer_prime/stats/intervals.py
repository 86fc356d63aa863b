"""Scores of evaluations with their confidence intervals: of one model, and of the difference between two.

Rollouts of one task are not independent, so a task's mean is one figure and tasks are what is drawn at random. Tasks
that are all alike say little when they are few: intervals have width then too (estimates.bounded_interval).

Estimates over tasks: pass@k and confidence intervals. Torch-free; evaluation and reports share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from composer_prime.errors import ConfigError


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of k draws passes, without bias: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1).

    `samples` n rollouts of one task, `passed` c of them passed. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"pass@{k} of {passed} passes in {samples} samples: k needs 1 <= k <= samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def bootstrap_interval(
    values: Sequence[float],
    *,
    clusters: Sequence[str] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean of `values` that have no upper bound: costs, seconds, counts a trace.

    Values of one cluster, named in `clusters` ([values]), are alike, as the steps of a trace are: whole clusters are
    drawn (Davison and Hinkley 1997, 3.8). None for fewer than two values, or clusters. Reproducible: the same values
    and seed give the same interval.
    """
    sums = np.asarray(values, dtype=np.float64)
    counts = np.ones(len(sums))
    if clusters is not None:
        _, places = np.unique(np.asarray(clusters), return_inverse=True)
        sums, counts = np.bincount(places, weights=sums), np.bincount(places).astype(np.float64)
    if len(sums) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(sums), size=(resamples, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bounded_interval(
    values: Sequence[float], *, least: float, most: float, level: float = 0.95, draws: int = 4000, seed: int = 0
) -> tuple[float, float] | None:
    """Interval of the mean of `values` that lie between `least` and `most`: one a task, as tasks are drawn at random.

    The Bayesian bootstrap (Rubin 1981) with half an observation more at each bound. Of values at the bounds alone, as
    passes and failures are, that is the Jeffreys interval of a proportion (Brown, Cai and DasGupta 2001), which keeps
    about its level down to few tasks and to means of 0 and 1. Resampling the values alone does not: of tasks that are
    all alike it gives an interval without width. The mean is always inside.

    None for fewer than two values. Reproducible: the same values and seed give the same interval. Raises ValueError
    for values outside the bounds.
    """
    if len(values) < 2:
        return None
    data = np.asarray(values, dtype=np.float64)
    if data.min() < least or data.max() > most:
        raise ValueError(f"values from {data.min():g} to {data.max():g} are not between {least:g} and {most:g}")
    points, counts = np.unique(np.concatenate([data, [least, most]]), return_counts=True)
    counts = counts - 0.5 * ((points == least) | (points == most))
    weights = np.random.default_rng(seed).standard_gamma(counts, size=(draws, len(points)))
    low, high = np.quantile(weights @ points / weights.sum(axis=1), [(1 - level) / 2, (1 + level) / 2])
    mean = float(data.mean())
    # Sums are rounded: of values at a bound the mean may come out beyond it.
    return max(min(float(low), mean), least), min(max(float(high), mean), most)


def scale_of(values: Iterable[float]) -> tuple[float, float]:
    """Least and most that scores can be: 0 to 1, as pass rates and most rewards are, or what was seen beyond that."""
    seen = [0.0, 1.0, *values]
    return min(seen), max(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over tasks, or over seeds, and where it may lie (95 %)."""

    mean: float
    low: float | None
    """None where one task or seed is all there is, or all seeds have the same figure: no spread to judge by."""
    high: float | None
    count: int
    """Tasks (or seeds) that the figures come from."""

    def text(self, *, sign: bool = False) -> str:
        """`0.312 [0.250, 0.375]`; with `sign`, differences keep their plus."""
        shape = "+.3f" if sign else ".3f"
        if self.low is None or self.high is None:
            return format(self.mean, shape)
        return f"{format(self.mean, shape)} [{format(self.low, shape)}, {format(self.high, shape)}]"


def mean_interval(scores: Mapping[str, Sequence[float]]) -> Interval:
    """The mean over tasks of each task's mean score. `scores`: the scores of each task's rollouts, by task.

    Raises ConfigError when it is empty.
    """
    if not scores:
        raise ConfigError("there are no scored rollouts to take a mean of")
    means = [fmean(values) for values in scores.values()]
    return _interval(means, *scale_of(means))


def difference_interval(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Interval:
    """Paired difference second - first over the tasks that both hold.

    Raises ConfigError when they share no task.
    """
    shared = [task for task in first if task in second]
    if not shared:
        raise ConfigError("the two evaluations share no task, so they cannot be compared task by task")
    before, after = [fmean(first[task]) for task in shared], [fmean(second[task]) for task in shared]
    least, most = scale_of([*before, *after])
    return _interval([new - old for old, new in zip(before, after, strict=True)], least - most, most - least)


def _interval(figures: list[float], least: float, most: float) -> Interval:
    low, high = bounded_interval(figures, least=least, most=most) or (None, None)
    return Interval(mean=fmean(figures), low=low, high=high, count=len(figures))
