"""Intervals that stay valid when looked at early.

    confidence_sequence   bounded values that arrive one after another, such as paired differences of held-out tasks.
                          Its bounds hold at all times at once, so one may stop at any time.
    seeds_interval        few values, one per seed, looked at after each seed: Student's t with the level divided by
                          the number of planned looks.

The confidence sequence is the hedged capital process of Waudby-Smith and Ramdas (arXiv 2010.09686, section 4.4). For
every candidate mean m a gambler bets on each value before it is known. If m is the true mean the capital is a
nonnegative martingale from 1, which reaches 1 / alpha with probability at most alpha (Ville). The interval holds every
m whose gambler never came that far.

Departures: (1) bets are tuned to a planned number of values, `horizon`, as in their fixed-time interval. Any bet that
is made before its value keeps the guarantee. (2) Candidate means are on a grid; the interval is widened to the next
point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

from composer_prime.errors import ConfigError
from composer_prime.host import install_command
from composer_prime.stats.intervals import Interval

_GRID = 1000
"""Candidate means between the bounds."""
_LARGEST_BET = 0.5
"""c of the paper: the share of its capital that a gambler may lose at once."""
_ROUNDING = 1e-9
"""Differences of rewards up to this size come from rounding."""


def capital(values: np.ndarray, means: np.ndarray, *, alpha: float, horizon: int) -> np.ndarray:
    """Return the hedged capital against each of `means` after each value, [values, means].

    `values` and `means` are in 0..1. `horizon`: the number of values that the bets are tuned to.
    """
    count = np.arange(1, len(values) + 1)
    estimates = (0.5 + np.cumsum(values)) / (count + 1)
    variances = (0.25 + np.cumsum((values - estimates) ** 2)) / (count + 1)
    known = np.concatenate([[0.25], variances[:-1]])  # before each value
    bets = np.sqrt(2 * math.log(2 / alpha) / (known * horizon))[:, None]
    with np.errstate(divide="ignore"):
        up = np.minimum(bets, _LARGEST_BET / means)
        down = np.minimum(bets, _LARGEST_BET / (1 - means))
    surprises = values[:, None] - means
    gains = np.cumsum(np.log1p(up * surprises), axis=0), np.cumsum(np.log1p(-down * surprises), axis=0)
    return np.exp(np.minimum(np.maximum(*gains), 700.0)) / 2


def confidence_sequence(
    values: Sequence[float], *, least: float, most: float, alpha: float, horizon: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper bounds of the mean after each value.

    With probability 1 - alpha they hold the mean after every value, also of an endless sequence. `horizon`: the planned
    number of values; None takes those there are. Raises ValueError for values outside `least` and `most`.
    """
    data = np.asarray(values, dtype=np.float64)
    if len(data) and (data.min() < least or data.max() > most):
        raise ValueError(f"values from {data.min():g} to {data.max():g} are not between {least:g} and {most:g}")
    grid = np.linspace(0.0, 1.0, _GRID + 1)
    wealth = capital((data - least) / (most - least), grid, alpha=alpha, horizon=horizon or max(len(data), 1))
    highest = np.maximum.accumulate(wealth, axis=0)
    kept = highest < 1 / alpha
    # Where no candidate is left, which happens with probability alpha at most, the least doubted one stands.
    kept[np.arange(len(data)), highest.argmin(axis=1)] = True
    low = np.maximum(grid[kept.argmax(axis=1)] - 1 / _GRID, 0.0)
    high = np.minimum(grid[_GRID - kept[:, ::-1].argmax(axis=1)] + 1 / _GRID, 1.0)
    return least + (most - least) * low, least + (most - least) * high


def tasks_interval(differences: Sequence[float], *, span: float, alpha: float, horizon: int) -> Interval:
    """Return the mean of paired differences, one per held-out task in an order set beforehand, and its bounds.

    `span`: the largest difference there can be. Raises ValueError for one that is larger by more than rounding.
    """
    clipped = [min(max(each, -span), span) if abs(each) <= span + _ROUNDING else each for each in differences]
    low, high = confidence_sequence(clipped, least=-span, most=span, alpha=alpha, horizon=horizon)
    return Interval(mean=fmean(clipped), low=float(low[-1]), high=float(high[-1]), count=len(clipped))


def spread(differences: Sequence[float]) -> float:
    """Return the standard deviation of two or more values; 0 where only rounding tells them apart."""
    return stdev(differences) if max(differences) - min(differences) > _ROUNDING else 0.0


def seeds_interval(differences: Sequence[float], *, alpha: float, planned: int) -> Interval:
    """Return the mean over seeds with Student's t interval, valid at each of the looks after 2 .. `planned` seeds.

    Each look has the level alpha / (planned - 1), so that all of them together miss with probability alpha at most.
    No bounds for one seed, nor where all are alike.
    """
    mean, count = fmean(differences), len(differences)
    if count < 2 or not spread(differences):
        return Interval(mean=mean, low=None, high=None, count=count)
    half = t_quantile(1 - alpha / (planned - 1) / 2, count - 1) * stdev(differences) / math.sqrt(count)
    return Interval(mean=mean, low=mean - half, high=mean + half, count=count)


def t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution. Raises ConfigError without scipy."""
    try:
        from scipy.special import stdtrit  # A slow import; only needed for an interval.
    except ImportError:
        raise ConfigError(f"intervals over seeds need scipy: run {install_command('ladder')}") from None
    return float(stdtrit(freedom, share))
