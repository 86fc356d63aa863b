"""Progress where no bar can be drawn, as in a pipe or a log file: a line now and then, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY_S = 30.0


class ProgressLines:
    """The first line comes at once. Output that nobody takes ends the lines, never the work."""

    def __init__(self) -> None:
        self._due = time.monotonic()

    def tell(self, text: Callable[[], str]) -> None:
        """Print `text()` after the time of day, unless a line was printed within the last `EVERY_S` seconds."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + EVERY_S
        try:
            print(f"[{time.strftime('%H:%M:%S')}] {text()}", file=sys.stderr, flush=True)
        except OSError:
            self._due = float("inf")
