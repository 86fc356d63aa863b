"""Background tasks, and waiting for a change."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterable
from typing import Any


async def until_signal(work: Coroutine[Any, Any, None], ends: tuple[signal.Signals, ...]) -> int:
    """Return the exit status of `work`. A signal of `ends` cancels it; SIGINT and SIGTERM else do nothing."""
    task = asyncio.ensure_future(work)
    signals: list[int] = []

    def stop(number: signal.Signals) -> None:
        if number in ends:
            signals.append(number)
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in {signal.SIGINT, signal.SIGTERM, *ends}:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not signals:
            raise
        return 128 + signals[0]
    return 0


def watched(work: Coroutine[Any, Any, None], on_error: Callable[[BaseException], None]) -> asyncio.Task[None]:
    """Run a task whose failure `on_error` gets at once."""
    task = asyncio.create_task(work)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            on_error(error)

    task.add_done_callback(ended)
    return task


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class Notifier:
    """Wakes all that wait for a change."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Return True at the next notification, False after `timeout_s` seconds without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._next.wait()
        return False

    async def wait_for(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Return True once `condition()` holds, False when it does not hold within `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition():
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                return False
            await self.wait(remaining_s)
        return True
