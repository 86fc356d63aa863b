"""Stopping on SIGTERM or SIGINT, also while a collective blocks the main thread.

    signal -> watcher thread: sets `requested`; the main thread sees it at its next look and leaves in order
                              after patience_s it has not: the process ends at once with 128 + signal number

The signals are blocked in every thread, so that only the watcher takes them: Python runs handlers in the main thread
alone, which never comes back from a collective whose other ranks are gone.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVE_S = 3.0
"""Patience while there is nothing to save."""
_SLICE_S = 0.1
logger = logging.getLogger(__name__)


class StopSignal:
    """Made first thing in the process, before any other thread exists."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.patience_s = LEAVE_S
        """How long the main thread may take to leave; it may be changed at any time, also after the signal."""
        self.number: int | None = None
        """The signal that came; None while none did."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._watch, name="stop-signal", daemon=True).start()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    @property
    def exit_code(self) -> int:
        return 128 + (self.number or 0)

    def _watch(self) -> None:
        self.number = signal.sigwait(SIGNALS)
        logger.info("%s: stopping", signal.Signals(self.number).name)
        came_at = time.monotonic()
        self._event.set()
        while time.monotonic() - came_at < self.patience_s:
            time.sleep(_SLICE_S)
        if self.patience_s > LEAVE_S:
            logger.warning("no checkpoint within %.0f s: leaving without", self.patience_s)
        os._exit(self.exit_code)
