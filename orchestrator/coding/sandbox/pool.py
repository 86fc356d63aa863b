"""Boxes that are opened ahead of time, so that taking one costs only the copy of its files.

A box is taken once and closed by its taker: no box serves two rollouts. Waiting boxes have started their interpreter
and imported pytest.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from orchestrator.coding.sandbox.bubblewrap import BubblewrapBox
from orchestrator.coding.sandbox.launch import START_TIMEOUT_S

_POOLS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, BoxPool]] = weakref.WeakKeyDictionary()


class BoxPool:
    """`runtime.warm` open boxes of one event loop and one runtime table."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        self._runtime = runtime
        self._waiting: deque[BubblewrapBox] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    async def take(self, python_path: Sequence[str] = ()) -> BubblewrapBox:
        """Return an open box: one that waits, or else a new one. Raises SandboxError where none can be opened."""
        while self._waiting:
            box = self._waiting.popleft()
            if not box.control.closed:
                box.set_python_path(python_path)
                self.fill()
                return box
            await box.close()
        box = await BubblewrapBox.open(self._runtime, python_path)
        self.fill()
        return box

    def fill(self) -> None:
        """Open boxes in the background until enough wait."""
        if self._filling is None or self._filling.done():
            self._filling = asyncio.ensure_future(self._fill())

    async def _fill(self) -> None:
        while len(self._waiting) < self._runtime.warm and not self._closed:
            box = await BubblewrapBox.open(self._runtime)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await box.preload()
            except BaseException as error:
                await box.close()
                if isinstance(error, OSError | TimeoutError):
                    raise SandboxError(
                        f"a sandbox ended or took more than {START_TIMEOUT_S:g} s to import pytest; "
                        "look at the machine's load and free memory"
                    ) from error
                raise
            self._waiting.append(box)

    async def filled(self) -> None:
        """Wait until enough boxes wait. Raises what kept them from opening."""
        self.fill()
        assert self._filling is not None
        await self._filling

    async def close(self) -> None:
        """Close the boxes that wait."""
        self._closed = True
        if self._filling is not None:
            await asyncio.wait([self._filling])
        while self._waiting:
            await self._waiting.popleft().close()


def shared_pool(runtime: RuntimeConfig) -> BoxPool:
    """Return the running loop's pool of a runtime table."""
    pools = _POOLS.setdefault(asyncio.get_running_loop(), {})
    return pools.setdefault(runtime.model_dump_json(), BoxPool(runtime))


async def close_pools() -> None:
    """Close the running loop's pools."""
    for pool in _POOLS.pop(asyncio.get_running_loop(), {}).values():
        await pool.close()
