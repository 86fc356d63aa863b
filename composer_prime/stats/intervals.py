"""Estimates over tasks: pass@k, and scores with confidence intervals, of one model or of the difference of two.

Rollouts of one task are not independent. So a task's mean is one figure, and tasks are the random sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from composer_prime.errors import ConfigError

PASSED = 1.0
"""The reward of a pass, and the mean reward of a solved task."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate without bias the chance that at least one of k draws passes.

    1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1), with c passes in n rollouts of one task. Raises ValueError
    unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"pass@{k} of {passed} passes in {samples} samples: k needs 1 <= k <= samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


_BOUNDS = ((1 - 0.95) / 2, (1 + 0.95) / 2)
"""Quantiles of a 95 % interval."""
_STUDENT = {
    2: 4.3027,
    3: 3.1825,
    4: 2.7765,
    5: 2.5706,
    6: 2.4470,
    7: 2.3647,
    9: 2.2622,
    14: 2.1448,
    29: 2.0453,
}
"""97.5 % quantiles of Student's t by degrees of freedom. Those between take the wider one below."""
_ROUNDING = 1e-9
"""Figures within it are equal."""


def bounded_interval(values: Sequence[float], *, least: float, most: float) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of `values`, one per randomly drawn task; None for fewer than two.

    This is the Bayesian bootstrap (Rubin 1981) with half an extra observation at each bound. For values at the bounds
    it is the Jeffreys interval of a proportion (Brown, Cai and DasGupta 2001), which about keeps its level for few
    tasks and means of 0 and 1. Resampling alone does not: equal values would give an interval without width.

    The same values give the same interval. Raises ValueError for values outside the bounds.
    """
    if len(values) < 2:
        return None
    data = np.asarray(values, dtype=np.float64)
    if data.min() < least or data.max() > most:
        raise ValueError(f"values from {data.min():g} to {data.max():g} are not between {least:g} and {most:g}")
    points, counts = np.unique(np.concatenate([data, [least, most]]), return_counts=True)
    counts = counts - 0.5 * ((points == least) | (points == most))
    weights = np.random.default_rng(0).standard_gamma(counts, size=(4000, len(points)))
    low, high = np.quantile(weights @ points / weights.sum(axis=1), _BOUNDS)
    mean = float(data.mean())
    # The rounded mean of values at a bound may lie beyond it.
    return max(min(float(low), mean), least), min(max(float(high), mean), most)


def scale_of(values: Iterable[float]) -> tuple[float, float]:
    """Return the bounds of scores: 0 and 1, or the values beyond them."""
    with_bounds = [0.0, 1.0, *values]
    return min(with_bounds), max(with_bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over tasks or over seeds, with its 95 % interval."""

    mean: float
    low: float | None
    """None for one task or seed, or seeds without a spread."""
    high: float | None
    count: int
    """Tasks or seeds."""

    def text(self, *, sign: bool = False) -> str:
        """Return `0.312 [0.250, 0.375]`, with `sign` `+0.312 ...`."""
        spec = "+.3f" if sign else ".3f"
        if self.low is None or self.high is None:
            return format(self.mean, spec)
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def mean_interval(scores: Mapping[str, Sequence[float]]) -> Interval:
    """Return the mean over tasks of each task's mean score. Raises ConfigError without scores."""
    if not scores:
        raise ConfigError("there are no scored rollouts to take a mean of")
    means = [fmean(values) for values in scores.values()]
    return _interval(means, *scale_of(means))


def difference_interval(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Interval:
    """Return the paired difference second - first over shared tasks. Raises ConfigError without any."""
    shared = [task for task in first if task in second]
    if not shared:
        raise ConfigError("the two evaluations share no task, so they cannot be compared")
    before, after = [fmean(first[task]) for task in shared], [fmean(second[task]) for task in shared]
    least, most = scale_of([*before, *after])
    changes = [new - old for old, new in zip(before, after, strict=True)]
    return _interval(changes, least - most, most - least)


def _interval(figures: list[float], least: float, most: float) -> Interval:
    low, high = bounded_interval(figures, least=least, most=most) or (None, None)
    return Interval(mean=fmean(figures), low=low, high=high, count=len(figures))


def seeds_interval(figures: Sequence[float]) -> Interval:
    """Return the mean and Student t interval of one figure per seed.

    There are no bounds below three seeds (they would lie far outside the figure's values), nor for equal figures.
    """
    mean, count = fmean(figures), len(figures)
    if count < 3 or max(figures) - min(figures) < _ROUNDING:
        return Interval(mean=mean, low=None, high=None, count=count)
    quantile = min(value for freedom, value in _STUDENT.items() if freedom < count)
    half = quantile * stdev(figures) / count**0.5
    return Interval(mean=mean, low=mean - half, high=mean + half, count=count)
