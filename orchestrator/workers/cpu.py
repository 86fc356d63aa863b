"""What a process used: resident memory, and each concurrent rollout's share of the CPU time."""

from __future__ import annotations

import os
import resource
import sys
import time

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class CpuShares:
    """Splits the process's CPU time evenly over the rollouts that run at the time (processor sharing).

    The shares of all rollouts add up to the CPU time of the whole process while at least one was running, threads
    included.
    """

    def __init__(self) -> None:
        self._running = 0
        self._per_rollout_s = 0.0
        self._seen_s = time.process_time()

    def enter(self) -> float:
        """A mark to hand to `leave`."""
        self._advance()
        self._running += 1
        return self._per_rollout_s

    def leave(self, mark: float) -> float:
        """CPU seconds since the mark."""
        self._advance()
        self._running -= 1
        return self._per_rollout_s - mark

    def _advance(self) -> None:
        now_s = time.process_time()
        if self._running:
            self._per_rollout_s += (now_s - self._seen_s) / self._running
        self._seen_s = now_s


def rss_bytes() -> int:
    """Resident memory of this process; where the system does not tell, its highest value so far."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
