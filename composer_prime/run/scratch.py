"""A folder in the temporary directory that does not long outlive the process that made it.

    Scratch("worker")   <tmp>/composer-prime-worker-k3j2h1/, locked while its owner is alive
    close()             removes it
    owner killed        the kernel drops the lock; the next Scratch of that name removes the folder

A lock, because process ids are reused, and containers that share a folder do not share ids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class Scratch:
    """An empty folder, readable by its owner only, until `close`."""

    def __init__(self, name: str) -> None:
        """Make the folder, and remove folders of this name whose owners are dead. Raises OSError."""
        prefix = f"composer-prime-{name}-"
        _sweep(prefix)
        self.path, self._lock = _make(prefix)

    def close(self) -> None:
        """Remove the folder with its content; a second call does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def _make(prefix: str) -> tuple[Path, int | None]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # swept by another process
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)


def _sweep(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its owner is alive
            pass
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
