"""Bets on a mean that may be looked at after each observation."""

from __future__ import annotations

import numpy as np

_STAKES = np.array([0.05, 0.1, 0.2, 0.4, 0.8])


class Wager:
    """The capital of bets that figures between -1 and 1 have a mean above `null`.

        K_n = mean over stakes s of  prod_i (1 + s (x_i - null)),   K_0 = 1

    While each figure's mean, given those before it, is at most `null`, K ever reaches 1 / a with a chance of at most a,
    however often one looks (Waudby-Smith and Ramdas, arXiv 2010.09686).

    `restarts`: no stake falls below 1, so that old luck does not delay a change. Without a change K then reaches 1 / a
    after 1 / a figures in the mean, or later (Shin, Ramdas and Rinaldo, arXiv 2203.03532).
    """

    def __init__(self, null: float = 0.0, *, restarts: bool = False) -> None:
        self._null = null
        self._restarts = restarts
        self._logs = np.zeros(len(_STAKES))

    @property
    def capital(self) -> float:
        return float(np.exp(self._logs).mean())

    def add(self, figure: float) -> None:
        """Take in a figure. Raises ValueError for one outside -1 to 1."""
        if not -1.0 <= figure <= 1.0:
            raise ValueError(f"a bet needs a figure between -1 and 1, not {figure:g}")
        if self._restarts:
            self._logs = np.maximum(self._logs, 0.0)
        self._logs = self._logs + np.log1p(_STAKES * (figure - self._null))
