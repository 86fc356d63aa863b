"""Wakes whoever waits for something to change. Single event loop; a beat before the wait is not lost to `wait_for`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def beat(self) -> None:
        """Something changed: every current waiter looks again."""
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def wait(self, timeout_s: float) -> bool:
        """True at the next beat, False after `timeout_s` without one."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait({self._next}, timeout=timeout_s)
        return bool(done)

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """True once `condition()` holds (looked at now and at each beat), False when it does not within `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition():
            left = deadline - loop.time()
            if left <= 0:
                return False
            await self.wait(left)
        return True
