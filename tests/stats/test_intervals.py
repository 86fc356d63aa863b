"""Confidence intervals of evaluations: honest for few tasks and at the ends of the scale."""

from __future__ import annotations

from math import comb
from statistics import stdev

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import beta, t

from composer_prime.stats.intervals import (
    bounded_interval,
    difference_interval,
    mean_interval,
    scale_of,
    seeds_interval,
)


def passes(passed: int, tasks: int) -> list[float]:
    return [1.0] * passed + [0.0] * (tasks - passed)


def test_passes_and_failures_have_the_jeffreys_interval():
    # Half a pass and half a failure more: Beta(k + 1/2, n - k + 1/2), up to the noise of its draws.
    for passed, tasks in ((0, 16), (3, 16), (64, 128), (16, 16)):
        interval = bounded_interval(passes(passed, tasks), least=0.0, most=1.0)
        assert interval is not None
        low, high = beta.ppf([0.025, 0.975], passed + 0.5, tasks - passed + 0.5)
        assert interval == pytest.approx((low if passed else 0.0, high if passed < tasks else 1.0), abs=0.02)


def test_intervals_hold_their_level_at_sixteen_tasks():
    # Chance that the interval of 16 tasks holds the true pass rate, over all outcomes.
    tasks, rates = 16, [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98]

    def coverage(intervals: list[tuple[float, float] | None], rate: float) -> float:
        chances = [comb(tasks, k) * rate**k * (1 - rate) ** (tasks - k) for k in range(tasks + 1)]
        return sum(
            chance
            for chance, interval in zip(chances, intervals, strict=True)
            if interval is not None and interval[0] <= rate <= interval[1]
        )

    ours = [bounded_interval(passes(k, tasks), least=0.0, most=1.0) for k in range(tasks + 1)]
    assert min(coverage(ours, rate) for rate in rates) > 0.88
    assert sum(coverage(ours, rate) for rate in rates) / len(rates) > 0.94


@given(st.lists(st.floats(-2, 3), min_size=2, max_size=40))
@example([1.38414043679045] * 3)
def test_the_mean_is_inside_and_the_interval_has_width(values):
    # Also of values that are all alike, and of scores beyond 0 to 1; the same values give the same interval.
    least, most = scale_of(values)
    interval = bounded_interval(values, least=least, most=most)
    assert interval is not None
    assert interval[0] <= sum(values) / len(values) + 1e-9 and interval[1] >= sum(values) / len(values) - 1e-9
    assert interval[1] > interval[0] and least <= interval[0] and interval[1] <= most
    assert bounded_interval(values, least=least, most=most) == interval


def test_more_tasks_narrow_the_interval():
    # About 1/sqrt(n) wide; nothing for a single task, and values outside the bounds are refused.
    (low, high), narrow = (bounded_interval(passes(n // 2, n), least=0.0, most=1.0) for n in (16, 256))
    assert 2.5 < (high - low) / (narrow[1] - narrow[0]) < 6
    assert bounded_interval([1.0], least=0.0, most=1.0) is None
    with pytest.raises(ValueError, match="from 0 to 2 are not between 0 and 1"):
        bounded_interval([0.0, 2.0], least=0.0, most=1.0)


def test_no_change_on_sixteen_tasks_is_not_certain():
    # Sixteen tasks that all kept their score: the mean change may well be some percent either way.
    scores = {f"t{task}": [float(task % 2)] for task in range(16)}
    change = difference_interval(scores, scores)
    assert change.mean == 0 and change.low is not None and change.high is not None
    assert -0.25 < change.low < -0.03 and 0.03 < change.high < 0.25
    assert mean_interval({name: [1.0] for name in scores}).text().startswith("1.000 [0.8")


# Student's interval of 1, 2, 3 is 2 -+ 4.3027 / sqrt(3). Seeds that are all alike, or two, have none.
def test_seeds_interval():
    interval = seeds_interval([1.0, 2.0, 3.0])
    assert interval.low == pytest.approx(2 - 4.30265 / 3**0.5, abs=1e-4)
    for seeds in range(3, 40):
        figures = [float(number) for number in range(seeds)]
        interval = seeds_interval(figures)
        half = t.ppf(0.975, seeds - 1) * stdev(figures) / seeds**0.5
        assert interval.low is not None and half * 0.9999 < interval.mean - interval.low < half * 1.06
    for figures in ([1.0], [0.0, 0.0, 0.0], [1.0, 2.0]):
        assert seeds_interval(figures).low is None
