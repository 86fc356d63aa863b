"""How late the event loop runs what is due: a timer that measures itself.

    call_later(interval) -> runs `lag` late -> sample -> call_later(interval) ...

Lag is what every rollout, heartbeat and HTTP request waits on top of its own work, so it is a metric of the run. On a
busy machine the loop is also late because other processes have the CPU; `own` is the part that this thread's own work
explains (its CPU time since the timer ran last, at most the lag), which is the part that code can mend.

Wakes whoever waits for something to change. Single event loop; a beat before the wait is not lost to `wait_for`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_MAX_SAMPLES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class LagStats:
    """Lags of one window, in seconds; None without a sample."""

    samples: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    own_p99_s: float | None
    own_max_s: float | None

    def metrics(self) -> dict[str, float]:
        """As metrics.jsonl and /metrics name them."""
        named = {
            "loop_lag/p50_s": self.p50_s,
            "loop_lag/p99_s": self.p99_s,
            "loop_lag/max_s": self.max_s,
            "loop_lag/own_p99_s": self.own_p99_s,
        }
        return {name: round(value, 6) for name, value in named.items() if value is not None}


class LoopLag:
    """Measures the running loop between `start` and `stop`."""

    def __init__(self, interval_s: float = 0.02) -> None:
        self._interval_s = interval_s
        self._samples: list[tuple[float, float]] = []
        """(lag, own share of it)."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._cpu = 0.0

    def start(self) -> None:
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def window(self, *, reset: bool = True) -> LagStats:
        """Lags since the last reset (at most the first 16384 of them, five minutes' worth, and always the largest)."""
        samples = np.array(self._samples, dtype=float).reshape(-1, 2)
        if reset:
            self._samples = []
        if not len(samples):
            return LagStats(samples=0, p50_s=None, p99_s=None, max_s=None, own_p99_s=None, own_max_s=None)
        (p50, _), (p99, own_p99), (most, own_most) = np.percentile(samples, [50, 99, 100], axis=0).tolist()
        return LagStats(samples=len(samples), p50_s=p50, p99_s=p99, max_s=most, own_p99_s=own_p99, own_max_s=own_most)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due, self._cpu = loop.time() + self._interval_s, time.thread_time()
        self._timer = loop.call_at(self._due, self._fire, loop)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        lag = max(0.0, loop.time() - self._due)
        sample = (lag, min(lag, time.thread_time() - self._cpu))
        if len(self._samples) < _MAX_SAMPLES:
            self._samples.append(sample)
        elif sample > self._samples[-1]:
            self._samples[-1] = sample
        self._schedule(loop)


class Notifier:
    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def notify(self) -> None:
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
