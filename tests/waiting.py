"""Time: a clock that a test moves, and waiting for what another task or process does."""

import asyncio
import time
from collections.abc import Callable
from typing import Any


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def until(condition: Callable[[], object], what: str = "", timeout_s: float = 150.0) -> None:
    """Raises an AssertionError that names `what` when the condition does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what or condition}"
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], Any], what: str = "", timeout_s: float = 200.0) -> Any:
    """`until` in a plain function: gives what `condition` gave at last."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what or condition}"
        time.sleep(0.02)
    return found
