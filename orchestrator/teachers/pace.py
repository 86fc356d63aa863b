"""Spaces calls so that an endpoint's rate limit is kept."""

from __future__ import annotations

import time

_MINUTE_S = 60.0


class Pace:
    """At most `per_minute` calls a minute, evenly; 0 does not space them."""

    def __init__(self, per_minute: float) -> None:
        self._interval_s = _MINUTE_S / per_minute if per_minute else 0.0
        self._next = 0.0

    def turn_s(self) -> float:
        """Seconds until the caller's turn; turns are given in the order of asking."""
        now = time.monotonic()
        turn = max(self._next, now)
        self._next = turn + self._interval_s
        return turn - now
