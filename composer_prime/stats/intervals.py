"""Estimates over tasks: pass@k, and scores with confidence intervals, of one model or of the difference of two.

Rollouts of one task are not independent. So a task's mean is one figure, and tasks are the random sample. A few tasks
with equal means tell little: their interval has a width too (`bounded_interval`). Evaluation and reports share this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from composer_prime.errors import ConfigError

PASSED = 1.0
"""The reward from which a rollout passes, and the mean reward from which a task is solved."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate without bias the chance that at least one of k draws passes.

    1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1), with `samples` n rollouts of one task, `passed` c of them passed.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"pass@{k} of {passed} passes in {samples} samples: k needs 1 <= k <= samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


_BOUNDS = ((1 - 0.95) / 2, (1 + 0.95) / 2)
"""Quantiles of an interval of level 95 %."""
_STUDENT = {2: 4.3027, 3: 3.1825, 4: 2.7765, 5: 2.5706, 6: 2.4470, 7: 2.3647, 9: 2.2622, 14: 2.1448, 29: 2.0453}
"""97.5 % quantiles of Student's t distribution by degrees of freedom. Those between take the one below: it is wider."""
_ROUNDING = 1e-9
"""Figures that differ by less are equal but for rounding."""


def bounded_interval(values: Sequence[float], *, least: float, most: float) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of `values` between `least` and `most`, one value per randomly drawn task.

    This is the Bayesian bootstrap (Rubin 1981) with half an extra observation at each bound. For values only at the
    bounds, such as passes and failures, it is the Jeffreys interval of a proportion (Brown, Cai and DasGupta 2001),
    which about keeps its level down to few tasks and to means of 0 and 1. Resampling the values alone does not: for
    tasks with equal values it gives an interval without width. The mean is always inside.

    None for fewer than two values. The same values give the same interval. Raises ValueError for values
    outside the bounds.
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
    # Sums are rounded: the mean of values at a bound may come out beyond it.
    return max(min(float(low), mean), least), min(max(float(high), mean), most)


def scale_of(values: Iterable[float]) -> tuple[float, float]:
    """Return the bounds of scores: 0 and 1, as for pass rates and most rewards, or the values beyond them."""
    with_bounds = [0.0, 1.0, *values]
    return min(with_bounds), max(with_bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over tasks or over seeds, with its 95 % interval."""

    mean: float
    low: float | None
    """None with one task or seed, or when all seeds have the same figure: there is no spread."""
    high: float | None
    count: int
    """Tasks or seeds that the figures come from."""

    def text(self, *, sign: bool = False) -> str:
        """Return `0.312 [0.250, 0.375]`; with `sign`, positive numbers have a plus."""
        spec = "+.3f" if sign else ".3f"
        if self.low is None or self.high is None:
            return format(self.mean, spec)
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def mean_interval(scores: Mapping[str, Sequence[float]]) -> Interval:
    """Return the mean over tasks of each task's mean score. `scores`: the scores of each task's rollouts, by task.

    Raises ConfigError when `scores` is empty.
    """
    if not scores:
        raise ConfigError("there are no scored rollouts to take a mean of")
    means = [fmean(values) for values in scores.values()]
    return _interval(means, *scale_of(means))


def difference_interval(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Interval:
    """Return the paired difference second - first over shared tasks. Raises ConfigError when they share none."""
    shared = [task for task in first if task in second]
    if not shared:
        raise ConfigError("the two evaluations share no task, so they cannot be compared task by task")
    before, after = [fmean(first[task]) for task in shared], [fmean(second[task]) for task in shared]
    least, most = scale_of([*before, *after])
    return _interval([new - old for old, new in zip(before, after, strict=True)], least - most, most - least)


def _interval(figures: list[float], least: float, most: float) -> Interval:
    low, high = bounded_interval(figures, least=least, most=most) or (None, None)
    return Interval(mean=fmean(figures), low=low, high=high, count=len(figures))


def seeds_interval(figures: Sequence[float]) -> Interval:
    """Return the mean and Student t interval of one figure per seed, of one seed or more.

    There are no bounds below three seeds: those of two lie far outside the values that a figure can have. Nor are there
    for equal figures, whose spread, 0, would give an interval without width.
    """
    mean, count = fmean(figures), len(figures)
    if count < 3 or max(figures) - min(figures) < _ROUNDING:
        return Interval(mean=mean, low=None, high=None, count=count)
    quantile = min(value for freedom, value in _STUDENT.items() if freedom < count)
    half = quantile * stdev(figures) / count**0.5
    return Interval(mean=mean, low=mean - half, high=mean + half, count=count)
