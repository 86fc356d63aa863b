"""How long to pause before another try, for everything that retries."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 60
"""Keeps the power within floating-point range."""


def backoff_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds after failure number `failures` (from 0), doubling up to `longest_s`."""
    return min(first_s * 2 ** min(failures, _MAX_DOUBLINGS), longest_s)


@dataclass(slots=True)
class Restarts:
    """How often one process was started again after a crash."""

    count: int = 0

    def pause_s(self, lived_s: float, limit: int) -> float | None:
        """Count a crash after `lived_s` seconds. Return the seconds to pause before the next start, None after `limit`.

        A process that lived for ten minutes starts with none counted.
        """
        if lived_s > 600.0:
            self.count = 0
        if self.count >= limit:
            return None
        self.count += 1
        return backoff_s(self.count - 1, first_s=1.0, longest_s=60.0)
