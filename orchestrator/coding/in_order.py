"""Do the same for many items, several at a time, and take the results in the items' order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def in_order(
    work: Callable[[Item], Awaitable[Result]], items: Iterable[Item], jobs: int
) -> AsyncGenerator[Result, None]:
    """Yield what `work` returns for each item, in the items' order; `jobs` of them are under way at a time.

    Close it (`contextlib.aclosing`) to cancel what is still under way. Raises what the work of an item raises.
    """
    free = asyncio.Semaphore(jobs)

    async def one(item: Item) -> Result:
        async with free:
            return await work(item)

    running = [asyncio.create_task(one(item)) for item in items]
    try:
        for job in running:
            yield await job
    finally:
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)
