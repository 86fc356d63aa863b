"""The subprocess box: a temporary folder, limits of the shell, and a process group. It isolates nothing.

Commands run as this user. They read and write whatever this user may, and reach the network. It is for code that is
trusted, and for machines without a sandbox.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from composer_prime.run.process import signal_session
from composer_prime.run.scratch import Scratch
from orchestrator.coding.sandbox.box import NOTHING, WORK, Box, CommandResult, inside_path
from orchestrator.coding.sandbox.files import list_regular, read_regular
from orchestrator.coding.sandbox.output import CommandStreams

END_TIMEOUT_S = 10.0
_MIB = 1 << 20
# A limit that the system refuses (macOS has no -v) must not stop the command.
_WITH_LIMITS = """ulimit -c 0; ulimit -t "$0" 2>/dev/null; ulimit -v "$1" 2>/dev/null; ulimit -f "$2" 2>/dev/null
shift 2; exec "$@\""""


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a command and end what it left in its session. Returns its status."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13.
        status = process.wait()
        signal_session(process.pid, signal.SIGKILL)
        return status
    # Until it is collected, no other process can get its pid.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    signal_session(process.pid, signal.SIGKILL)
    return process.wait()


@functools.cache
def _ends_with_parent() -> list[str]:
    """Return the words before a command that end it with this process; none where setpriv cannot do so."""
    words = [shutil.which("setpriv") or "setpriv", "--pdeathsig", "KILL"]
    try:
        works = subprocess.run([*words, "true"], capture_output=True, timeout=END_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return words if works.returncode == 0 else []


class SubprocessBox(Box):
    """Commands as plain sub-processes in a temporary folder."""

    def __init__(self, runtime: RuntimeConfig, python_path: Sequence[str] = ()) -> None:
        self.runtime = runtime
        self._scratch = Scratch("box")  # It removes what dead processes left.
        self._home = self._scratch.path
        self._work = self._home / "work"
        self._work.mkdir()
        (self._home / "bin").mkdir()
        (self._home / "bin/python").symlink_to(sys.executable)
        (self._home / "bin/python3").symlink_to(sys.executable)
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(self._home),
            "TMPDIR": str(self._home),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if python_path:
            self._env["PYTHONPATH"] = os.pathsep.join(str(self._outside(folder)) for folder in python_path)
        self._one_at_a_time = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @classmethod
    async def open(cls, runtime: RuntimeConfig, python_path: Sequence[str] = ()) -> SubprocessBox:
        return cls(runtime, python_path)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = NOTHING,
        stdin: bytes = b"",
        cwd: str = ".",
        timeout_s: float | None = None,
        output_bytes: int | None = None,
    ) -> CommandResult:
        async with self._one_at_a_time:
            self._check_open()
            streams = CommandStreams(self.runtime.limits, output_bytes, lambda _: self._end_command())
            try:
                await streams.connect(stdin)
                status = await self._run_to_end(argv, env, cwd, streams, timeout_s or self.runtime.limits.wall_s)
                await streams.drained(END_TIMEOUT_S)
                return streams.result(status)
            finally:
                self._end_command()
                self._process = None
                streams.close()

    async def _run_to_end(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, streams: CommandStreams, timeout_s: float
    ) -> int:
        limits = self.runtime.limits
        amounts = [str(limits.cpu_s), str(int(limits.memory_gb * _MIB)), str(int(limits.file_mb * 2048))]
        stdin, stdout, stderr = [subprocess.DEVNULL, *streams.child_fds][-3:]
        folder = self._outside(cwd)
        try:
            self._process = subprocess.Popen(
                [*_ends_with_parent(), "/bin/sh", "-c", _WITH_LIMITS, *amounts, *argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env={**self._env, **env},
                start_new_session=True,
            )
        except OSError as error:  # Words that are too long, no such folder: what the command gave is to blame.
            culprit = argv[0] if os.path.isdir(folder) else cwd
            os.write(stderr, f"{culprit}: {error.strerror}\n".encode(errors="replace"))
            streams.handed_over()
            return 127 if error.errno == errno.ENOENT else 126
        streams.handed_over()
        waiting = asyncio.ensure_future(asyncio.to_thread(_wait, self._process))
        done, _ = await asyncio.wait([waiting], timeout=timeout_s)
        if not done:
            streams.end("wall_s")
        return await waiting

    def _end_command(self) -> None:
        """End the command's session while it runs. A process that left it, by setsid, is not found."""
        if self._process is not None and self._process.returncode is None:
            signal_session(self._process.pid, signal.SIGKILL)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self._check_open()
        for path, content in files.items():
            target = self._outside(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink():
                target.unlink()
            target.write_bytes(content)

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        self._check_open()
        name = str(self._outside(path).relative_to(self._work))
        try:
            work_fd = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise FileNotFoundError(f"the sandbox has no regular file {path!r}: {error.strerror}") from error
        try:
            return read_regular(work_fd, name, max_bytes)
        finally:
            os.close(work_fd)

    async def list_files(self) -> dict[str, int]:
        self._check_open()
        try:
            work_fd = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # A command took the permission away, or the folder.
            return {}
        try:
            return await asyncio.to_thread(list_regular, work_fd, self.runtime.limits.files)
        finally:
            os.close(work_fd)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_command()
        await asyncio.to_thread(self._scratch.close)

    def _outside(self, path: str) -> Path:
        """Return the host's path. Raises ValueError for one that is not below the work folder."""
        inside = inside_path(path)
        if inside != WORK and not inside.startswith(WORK + "/"):
            raise ValueError(f"a subprocess sandbox has only the work folder, but got {path!r}")
        return self._work / inside.removeprefix(WORK).lstrip("/")

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed; open another one")
