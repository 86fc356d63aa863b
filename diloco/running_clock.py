"""A clock for who judges others by their silence: what passes while it could not have heard them does not count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class RunningClock:
    """Seconds in which this process ran: of a time in which it stood still (SIGSTOP, a frozen machine) few count."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`longest_s`: at most so much passes from one look to the next, so whoever has it must look more often."""
        self._longest_s, self._clock = longest_s, clock
        self._now, self._looked = 0.0, clock()

    def __call__(self) -> float:
        passed, self._looked = (looked := self._clock()) - self._looked, looked
        if passed > self._longest_s:
            logger.warning("this process stood still for %.1f s: nobody counts as silent for that", passed)
        self._now += min(passed, self._longest_s)
        return self._now
