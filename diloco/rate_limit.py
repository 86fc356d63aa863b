"""A token bucket: at most so many bytes a second over any long time, a burst at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class TokenBucket:
    def __init__(
        self, bytes_per_s: float | None, burst_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """None has no limit."""
        self._rate, self._burst, self._clock = bytes_per_s, float(burst_bytes), clock
        self._tokens, self._filled = self._burst, clock()

    def delay_s(self, size: int) -> float:
        """Take `size` bytes; how long to wait before sending them. The bucket may go into debt, so any size passes."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate) - size
        self._filled = now
        return max(0.0, -self._tokens / self._rate)

    async def take(self, size: int) -> None:
        if (delay := self.delay_s(size)) > 0:
            await asyncio.sleep(delay)
