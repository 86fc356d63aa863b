"""The subprocess box: a temporary folder, limits of the shell, and a process group. It isolates nothing."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.run.process import signal_session
from composer_prime.run.scratch import Scratch
from orchestrator.coding.sandbox.box import WORK, Box, CommandResult, CommandStreams, environment, inside_path
from orchestrator.coding.sandbox.host_view import read_regular

END_TIMEOUT_S = 10.0
_MIB = 1 << 20
# A limit that the system refuses (macOS has no -v) must not stop the command.
_WITH_LIMITS = """ulimit -c 0; ulimit -t "$0" 2>/dev/null; ulimit -v "$1" 2>/dev/null; ulimit -f "$2" 2>/dev/null
shift 2; exec "$@\""""


class SubprocessBox(Box):
    """Commands as plain sub-processes in a temporary folder."""

    def __init__(self, runtime: RuntimeConfig, python_path: Sequence[str]) -> None:
        self._scratch = Scratch("box")  # It removes what dead processes left.
        self._work = self._scratch.path / "work"
        self._work.mkdir()
        programs = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        folders = [str(self._outside(folder)) for folder in python_path]
        super().__init__(runtime.limits, environment(programs, str(self._scratch.path), folders))
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    async def open(cls, runtime: RuntimeConfig, python_path: Sequence[str] = ()) -> SubprocessBox:
        return cls(runtime, python_path)

    async def _play(self, argv: Sequence[str], env: Mapping[str, str], streams: CommandStreams) -> CommandResult:
        try:
            status = self._start(argv, env, streams)
            if self._process is not None:
                waiting = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
                done, _ = await asyncio.wait([waiting], timeout=streams.limits.wall_s)
                if not done:
                    streams.end("wall_s")
                status = await waiting
                signal_session(self._process.pid, signal.SIGKILL)  # What it left.
            await streams.drained(END_TIMEOUT_S)
            return streams.result(status)
        finally:
            self._end_command()
            self._process = None

    def _start(self, argv: Sequence[str], env: Mapping[str, str], streams: CommandStreams) -> int:
        """Start the command. Return its status where it cannot start."""
        limits = streams.limits
        amounts = [math.ceil(limits.cpu_s), int(limits.memory_gb * _MIB), int(limits.file_mb * 2048)]
        setpriv = shutil.which("setpriv")  # It ends the command with this process.
        owned = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        stdin, stdout, stderr = [subprocess.DEVNULL, *streams.child_fds][-3:]
        try:
            self._process = subprocess.Popen(
                [*owned, "/bin/sh", "-c", _WITH_LIMITS, *map(str, amounts), *argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=self._work,
                env=env,
                start_new_session=True,
            )
            return 0
        except OSError as error:
            os.write(stderr, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
            return 127 if error.errno == errno.ENOENT else 126
        finally:
            streams.handed_over()

    def _end_command(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            signal_session(self._process.pid, signal.SIGKILL)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self._check_open()
        for path, content in files.items():
            target = self._outside(path)
            self._given.add(str(target.relative_to(self._work)))
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink():
                target.unlink()
            target.write_bytes(content)

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        self._check_open()
        name = self._outside(path).relative_to(self._scratch.path)
        return read_regular(os.open(self._scratch.path, os.O_RDONLY | os.O_DIRECTORY), str(name), max_bytes)

    def _open_work(self) -> int:
        return os.open(self._work, os.O_RDONLY | os.O_DIRECTORY)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_command()
        await asyncio.to_thread(self._scratch.close)

    def _outside(self, path: str) -> Path:
        inside = inside_path(path)
        if inside != WORK and not inside.startswith(WORK + "/"):
            raise ValueError(f"a subprocess sandbox has only the work folder, but got {path!r}")
        return self._work / inside.removeprefix(WORK).lstrip("/")
