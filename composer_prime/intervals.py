"""Scores of evaluations with their confidence intervals: of one model, and of the difference between two.

Rollouts of one task are not independent, so a task's mean is one figure and tasks are what is drawn at random. Tasks
that are all alike say little when they are few: intervals have width then too (estimates.bounded_interval).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from composer_prime.errors import ConfigError
from composer_prime.estimates import bounded_interval, scale_of


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
