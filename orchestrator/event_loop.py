"""Two small things about the event loop: waiting for a change, and measuring how late the loop runs.

    Notifier   wakes every waiter when something changed
    LoopLag    call_later(interval) -> runs `lag` late -> sample -> call_later(interval) ...

Every rollout, heartbeat and HTTP request waits for the loop's lag on top of its own work, so lag is a metric of the
run. On a busy machine the loop is also late because other processes hold the CPU. `own` is the part that this thread's
own work explains: its CPU time since the last sample, at most the lag. Only that part can be fixed in code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_MAX_SAMPLES = 1 << 14


class Notifier:
    """Wakes whoever waits for a change, within one event loop.

    `wait_for` does not miss a notification that came before the wait.
    """

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None
        """What the current waiters wait for; None while nobody waits."""

    def notify(self) -> None:
        """Wake every current waiter."""
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def wait(self, timeout_s: float) -> bool:
        """Return True at the next notification, False after `timeout_s` seconds without one."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait({self._next}, timeout=timeout_s)
        return bool(done)

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Return True once `condition()` holds, False when it does not hold within `timeout_s` seconds.

        Checks the condition now and at each notification.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition():
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                return False
            await self.wait(remaining_s)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LagStats:
    """The lags of one window, in seconds; None where there is no sample."""

    samples: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    own_p99_s: float | None
    own_max_s: float | None

    def metrics(self) -> dict[str, float]:
        """Return the figures under the names of metrics.jsonl and /metrics."""
        figures = {
            "loop_lag/p50_s": self.p50_s,
            "loop_lag/p99_s": self.p99_s,
            "loop_lag/max_s": self.max_s,
            "loop_lag/own_p99_s": self.own_p99_s,
        }
        return {name: round(value, 6) for name, value in figures.items() if value is not None}


class LoopLag:
    """Measures the running loop between `start` and `stop`."""

    def __init__(self, interval_s: float = 0.02) -> None:
        self._interval_s = interval_s
        self._samples: list[tuple[float, float]] = []
        """(lag, own share of it), in seconds."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._cpu_s = 0.0

    def start(self) -> None:
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def window(self, *, reset: bool = True) -> LagStats:
        """Return the lags since the last reset: at most the first 16384 (five minutes), and always the largest."""
        samples = np.array(self._samples, dtype=float).reshape(-1, 2)
        if reset:
            self._samples = []
        if not len(samples):
            return LagStats(samples=0, p50_s=None, p99_s=None, max_s=None, own_p99_s=None, own_max_s=None)
        (p50, _), (p99, own_p99), (most, own_most) = np.percentile(samples, [50, 99, 100], axis=0).tolist()
        return LagStats(samples=len(samples), p50_s=p50, p99_s=p99, max_s=most, own_p99_s=own_p99, own_max_s=own_most)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + self._interval_s
        self._cpu_s = time.thread_time()
        self._timer = loop.call_at(self._due, self._fire, loop)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        lag = max(0.0, loop.time() - self._due)
        sample = (lag, min(lag, time.thread_time() - self._cpu_s))
        if len(self._samples) < _MAX_SAMPLES:
            self._samples.append(sample)
        elif sample > self._samples[-1]:
            self._samples[-1] = sample
        self._schedule(loop)
