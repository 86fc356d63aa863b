"""Stopping on SIGTERM or SIGINT, also while a collective blocks the main thread.

    signal -> watcher thread: sets `requested`; the main thread sees it at its next look and leaves in order
                              after grace_s it has not: the process ends at once with 128 + signal number

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
logger = logging.getLogger(__name__)


class StopSignal:
    """Made first thing in the process, before any other thread exists."""

    def __init__(self, grace_s: float) -> None:
        self._event = threading.Event()
        self._grace_s = grace_s
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
        self._event.set()
        time.sleep(self._grace_s)
        os._exit(self.exit_code)
