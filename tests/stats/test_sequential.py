"""Bets that may be looked at at any time: exact over all sequences of a fair coin."""

from itertools import product
from statistics import fmean

import numpy as np
import pytest

from composer_prime.stats.sequential import Wager


def capitals(figures, **about):
    wager = Wager(**about)
    for figure in figures:
        wager.add(figure)
        yield wager.capital


# With a mean at the null the capital is a martingale that begins at 1; with one below it falls.
@pytest.mark.parametrize(("null", "expected"), [(0.0, 1.0), (0.2, 0.5)])
def test_the_capital_is_fair(null, expected):
    ends = [list(capitals(coins, null=null))[-1] for coins in product((-1.0, 1.0), repeat=8)]
    assert fmean(ends) == pytest.approx(expected, rel=1e-9) if not null else fmean(ends) < 1


# So it reaches 20 in at most one of 20 sequences, at whatever time one looks.
def test_luck_is_rare_at_any_time():
    reached = [max(capitals(coins)) >= 20 for coins in product((-1.0, 1.0), repeat=14)]
    assert 0 < fmean(reached) <= 0.05


# With restarts the capital after n fair figures is at most n in the mean, so 1 / a comes after 1 / a figures or more.
def test_restarts_cost_no_more_than_their_number():
    runs = np.array([list(capitals(coins, restarts=True)) for coins in product((-1.0, 1.0), repeat=10)])
    assert (runs.mean(0) <= np.arange(1, 11) + 1e-9).all()


# A loss of luck before a change delays it without restarts, and not with them.
def test_restarts_see_a_change_soon():
    figures = [-1.0] * 30 + [1.0] * 8
    assert list(capitals(figures, restarts=True))[-1] > 20 > list(capitals(figures))[-1]


def test_a_figure_out_of_bounds_is_refused():
    with pytest.raises(ValueError):
        Wager().add(1.5)
