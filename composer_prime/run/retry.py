"""How long to pause before another try, for everything that retries."""

from __future__ import annotations

_MAX_DOUBLINGS = 60
"""Keeps the power within floating-point range; every caller's longest pause is reached far earlier."""


def backoff_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds after failure number `failures`, counted from 0.

    The pause doubles with each failure and never exceeds `longest_s`: what broke gets time to recover.
    """
    return min(first_s * 2 ** min(failures, _MAX_DOUBLINGS), longest_s)
