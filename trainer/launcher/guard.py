"""Ends a run's processes when the launcher cannot: it is a small process of its own that waits on a pipe.

    launcher --pipe--> guard
      "role PID"   a role was started; its session is PID
      "bye"        the launcher has stopped everything itself: leave
      end of file  the launcher is gone (killed): SIGTERM, a grace period, SIGKILL

Every process of the run is known by its session or by a random mark in its environment, so that processes that roles
started, also in sessions of their own, are found. Standard library and psutil only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import psutil

MARK = "COMPOSER_LAUNCH"


def members(mark: str, sessions: set[int]) -> list[psutil.Process]:
    """Every living process of the run but this one."""
    own = os.getpid()
    return [
        process
        for process in psutil.process_iter()
        if process.pid != own and (_session(process.pid) in sessions or _marked(process, mark)) and _alive(process)
    ]


def end(processes: list[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """SIGTERM, up to `grace_s` seconds, SIGKILL. Returns what is still there afterwards."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(processes, timeout=grace_s)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _, left = psutil.wait_procs(left, timeout=5)
    return [process for process in left if _alive(process)]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError, ValueError):
        return False


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main(mark: str, grace_s: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "bye":
            return
        sessions.add(int(rest))
    end(members(mark, sessions), grace_s)
    end(members(mark, sessions), 0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
