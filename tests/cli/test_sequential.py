"""Intervals that are looked at early: the betting formula, their coverage, and what peeking does to plain intervals."""

from __future__ import annotations

from math import log, sqrt
from statistics import stdev

import numpy as np
import pytest
from scipy.stats import t as student

from composer_prime.cli.ladder.sequential import (
    capital,
    confidence_sequence,
    seeds_interval,
    spread,
    tasks_interval,
)


def capital_by_hand(values: list[float], mean: float, alpha: float, horizon: int) -> float:
    """Multiply the two gamblers' gains one value at a time, as arXiv 2010.09686 writes them."""
    rising = falling = 1.0
    for at, value in enumerate(values):
        before = values[:at]
        estimates = [(0.5 + sum(before[: index + 1])) / (index + 2) for index in range(at)]
        squares = sum((each - estimate) ** 2 for each, estimate in zip(before, estimates, strict=True))
        variance = (0.25 + squares) / (at + 1)
        bet = sqrt(2 * log(2 / alpha) / (variance * horizon))
        rising *= 1 + min(bet, 0.5 / mean) * (value - mean)
        falling *= 1 - min(bet, 0.5 / (1 - mean)) * (value - mean)
    return max(rising, falling) / 2


# The vectorized capital is the paper's product, for means inside the range.
def test_capital_is_the_papers_product() -> None:
    values = [0.5, 1.0, 0.0, 0.75, 0.75, 1.0, 0.5]
    for mean in (0.2, 0.5, 0.9):
        ours = capital(np.array(values), np.array([mean]), alpha=0.05, horizon=7)[:, 0]
        for count in range(1, 8):
            assert ours[count - 1] == pytest.approx(capital_by_hand(values[:count], mean, 0.05, 7))


# 600 ladders without a difference, each looked at after every task from the 20th on: the confidence sequence is wrong
# at any look in at most 5 %, a plain 95 % interval in many times that.
def test_confidence_sequence_holds_at_every_look_and_a_plain_interval_does_not() -> None:
    draws, tasks, repeats = np.random.default_rng(7), 200, 600
    for rate in (0.5, 0.1):
        wrong = plain_wrong = 0
        for _ in range(repeats):
            differences = (draws.random(tasks) < rate).astype(float) - (draws.random(tasks) < rate)
            wealth = capital((differences + 1) / 2, np.array([0.5]), alpha=0.05, horizon=tasks)
            wrong += wealth.max() >= 1 / 0.05
            count = np.arange(1, tasks + 1)
            means = np.cumsum(differences) / count
            errors = np.sqrt(np.maximum(np.cumsum(differences**2) / count - means**2, 1e-12) / count)
            plain_wrong += (np.abs(means) > 1.96 * errors)[19:].any()
        assert wrong / repeats <= 0.05
        assert plain_wrong / repeats > 0.2


# The bounds are those means whose gambler never won 1 / alpha. So they only narrow, hold the values' mean, and end at
# the range; a real difference is left out at some time.
def test_bounds_narrow_around_the_mean() -> None:
    draws = np.random.default_rng(1)
    values = (draws.random(300) < 0.7).astype(float) - (draws.random(300) < 0.4)
    low, high = confidence_sequence(values.tolist(), least=-1.0, most=1.0, alpha=0.05)
    assert (np.diff(low) >= 0).all() and (np.diff(high) <= 0).all()
    assert -1 <= low[0] <= high[0] <= 1 and 0 < low[-1] < values.mean() < high[-1] < 0.6
    shown = tasks_interval(values.tolist(), span=1.0, alpha=0.05, horizon=300)
    assert (shown.low, shown.high, shown.count) == (low[-1], high[-1], 300)
    with pytest.raises(ValueError, match="from 0 to 2 are not between -1 and 1"):
        confidence_sequence([0.0, 2.0], least=-1.0, most=1.0, alpha=0.05)


# Two of three planned seeds: the first of two looks, so half of alpha. One seed, or equal ones, give no bounds.
def test_interval_over_seeds_divides_its_level_by_the_looks() -> None:
    interval = seeds_interval([0.1, 0.3], alpha=0.05, planned=3)
    half = student.ppf(1 - 0.0125, 1) * stdev([0.1, 0.3]) / sqrt(2)
    assert interval.low is not None and interval.low == pytest.approx(0.2 - half)
    assert seeds_interval([0.1], alpha=0.05, planned=3).low is None
    assert seeds_interval([0.1, 0.1], alpha=0.05, planned=3).low is None
    assert seeds_interval([0.3, 0.1 + 0.2], alpha=0.05, planned=3).low is None  # equal but for rounding
    assert spread([0.3, 0.1 + 0.2]) == 0 and spread([0.1, 0.3]) == stdev([0.1, 0.3])


# A mean of largest differences may be rounded beyond the span; one that is larger is refused.
def test_rounded_differences_are_within_the_span() -> None:
    rounded = float(np.nextafter(0.8, 1))
    assert tasks_interval([rounded, -rounded], span=0.8, alpha=0.05, horizon=2).mean == 0
    with pytest.raises(ValueError, match=r"from 0.81 to 0.81 are not between -0.8 and 0.8"):
        tasks_interval([0.81], span=0.8, alpha=0.05, horizon=1)


# 400 ladders of five seeds without a difference, looked at after each seed from the second on.
def test_interval_over_seeds_holds_at_all_of_its_looks() -> None:
    draws = np.random.default_rng(3).normal(0, 0.03, size=(400, 5))
    wrong = plain_wrong = 0
    for seeds in draws.tolist():
        looks = [seeds_interval(seeds[:count], alpha=0.05, planned=5) for count in range(2, 6)]
        plain = [seeds_interval(seeds[:count], alpha=0.05, planned=2) for count in range(2, 6)]
        wrong += any((look.low or 0) > 0 or (look.high or 0) < 0 for look in looks)
        plain_wrong += any((look.low or 0) > 0 or (look.high or 0) < 0 for look in plain)
    assert wrong <= 20 < 30 < plain_wrong
