"""Start, watch and end processes, and leave none behind. Standard library and psutil only.

    parent                                           child
    child_options(...)   keywords of Popen ------->  a session of its own
                                                     end_with_parent(): a signal when the parent dies
    last_words(log)      its last lines, for errors
    stop(process, s)     SIGTERM, s seconds, SIGKILL to the whole session
    OrphanGuard          a small process beside the parent that ends everything when the parent is killed

A parent-death signal reaches direct children only, and a child may ignore it. The guard finds every process of a run by
its session or by a random mark in its environment (docs/decisions/index.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from composer_prime.console import PARENT_POLL

MARK_VARIABLE = "COMPOSER_LAUNCH"
"""Environment variable that marks a guarded run's processes."""
PARENT_VARIABLE = "COMPOSER_PARENT"
"""Environment variable with the parent's process id."""
ORCHESTRATOR_END = signal.SIGHUP
"""Ends the launcher's own orchestrator, which outlives SIGTERM and SIGINT to a run: ranks need it for their last
checkpoint."""
WORKER_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # A request is one small piece of work.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""For `child_options` of environment workers and of the gateway's processes."""
_PR_SET_PDEATHSIG = 1
_PARENT_POLL_S = 1.0
_DISMISS_S = 5.0
_LOG_TAIL_BYTES = 32_768


def child_options(environment: Mapping[str, str] | None = None, pass_fds: Iterable[int] = ()) -> dict[str, Any]:
    """Return keyword arguments for subprocess.Popen and asyncio.create_subprocess_exec.

    The child gets its own session, no standard input, and this process's environment with `environment` on top. Start
    it from the main thread: on Linux the parent-death signal comes when the starting thread ends.
    """
    return {
        "stdin": subprocess.DEVNULL,
        "env": {**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
        "pass_fds": tuple(pass_fds),
        "start_new_session": True,
    }


def end_with_parent(number: signal.Signals = signal.SIGTERM, *, always: bool = False) -> None:
    """Let this process get signal `number` when its parent dies. A child calls it first in `main`.

    Does nothing in a process that was started by hand, unless `always` is set.
    """
    parent = int(os.environ.pop(PARENT_VARIABLE, "0")) or (os.getppid() if always else 0)
    if not parent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent and not psutil.pid_exists(parent):  # it died before the call
            os.kill(os.getpid(), number)
    else:
        threading.Thread(target=_poll_parent, args=(parent, number), name=PARENT_POLL, daemon=True).start()


def _poll_parent(parent: int, number: signal.Signals) -> None:
    direct_parent = os.getppid()  # a wrapper may stand between this process and `parent`
    while os.getppid() == direct_parent and psutil.pid_exists(parent):
        time.sleep(_PARENT_POLL_S)
    os.killpg(0, number)


def signal_session(pid: int, number: signal.Signals) -> None:
    """Send `number` to every process of the session that `pid` leads; it may have ended already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


async def stop(process: asyncio.subprocess.Process, grace_s: float, *, request: bool = True) -> None:
    """End a child: SIGTERM with `request`, up to `grace_s` seconds, SIGKILL to what is left of its session."""
    if request and process.returncode is None:
        signal_session(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
    finally:
        signal_session(process.pid, signal.SIGKILL)
    await process.wait()


def exit_text(status: int | None) -> str:
    """Describe an exit status; negative values are signals."""
    if status is not None and status < 0:
        known = -status in set(signal.Signals)
        return f"was ended by {signal.Signals(-status).name if known else f'signal {-status}'}"
    return f"ended with exit status {status}"


def last_words(log: os.PathLike[str], offset: int = 0, count: int = 25) -> str:
    """Return the last `count` lines that were written to `log` after byte `offset`, indented."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"    (unreadable: {error})"
    return "\n".join(f"    {line}" for line in lines[-count:]) or "    (it wrote nothing)"


class OrphanGuard:
    """A process that ends all processes of a run when this one is killed. Use as a context manager.

    parent --pipe--> guard
      "PID"        a child was started; it leads session PID
      "bye"        everything has ended: leave
      end of file  the parent is gone: SIGTERM, `grace_s` seconds, SIGKILL
    """

    def __init__(self, grace_s: float) -> None:
        self.mark = secrets.token_hex(16)
        """In the children's MARK_VARIABLE."""
        self._sessions: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "composer_prime.run.process", self.mark, str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> OrphanGuard:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Dismiss the guard; after an error it ends what is left."""
        assert self._process.stdin is not None
        if error_type is None:
            self._write("bye")
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if error_type is not None:
            return
        try:
            self._process.wait(_DISMISS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def watch(self, pid: int) -> None:
        """Take in a child that leads session `pid`."""
        self._sessions.add(pid)
        self._write(str(pid))

    def members(self) -> list[psutil.Process]:
        """Return every living process of the run but this one and the guard."""
        return [process for process in _members(self.mark, self._sessions) if process.pid != self._process.pid]

    def _write(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()


def terminate(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Send SIGTERM, wait up to `grace_s` seconds, then SIGKILL what is left."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def _members(mark: str, sessions: set[int]) -> list[psutil.Process]:
    own = os.getpid()
    members = []
    for process in psutil.process_iter():
        try:
            member = process.pid != own and (
                os.getsid(process.pid) in sessions or process.environ().get(MARK_VARIABLE) == mark
            )
            if member and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (psutil.Error, OSError, ValueError):
            continue  # ended, or another user's
    return members


def _guard(mark: str, grace_s: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        if line.strip() == "bye":
            return
        sessions.add(int(line))
    terminate(_members(mark, sessions), grace_s)
    terminate(_members(mark, sessions), 0)


if __name__ == "__main__":
    _guard(sys.argv[1], float(sys.argv[2]))
