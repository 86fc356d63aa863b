"""Waiting for what another task or process does."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str = "", timeout_s: float = 150.0) -> None:
    """Raises an AssertionError that names `what` when the condition does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what or condition}"
        await asyncio.sleep(0.01)
