"""Collect what a command writes to a pipe, within bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

from composer_prime.config.sandbox import SandboxLimits
from orchestrator.coding.sandbox.box import CommandResult

_READ_BYTES = 1 << 16
_SIGNAL_LIMITS: dict[int, str] = {signal.SIGXCPU: "cpu_s", signal.SIGXFSZ: "file_mb"}


class BoundedOutput:
    """The beginning and the end of a stream. What lies between is counted and dropped while it streams."""

    def __init__(self, fd: int, *, keep_bytes: int, end_bytes: int, on_flood: Callable[[], None]) -> None:
        """Read `fd` in the running loop, and own it. `on_flood`: called once, beyond `end_bytes`."""
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._first_bytes = (keep_bytes + 1) // 2
        self._last_bytes = keep_bytes // 2
        self._end_bytes = end_bytes
        self._on_flood = on_flood
        self._first = bytearray()
        self._last = bytearray()
        self._total = 0
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        if self._fd is None:
            return
        try:
            piece = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not piece:
            self.close()
            return
        before = self._total
        self._total += len(piece)
        free = self._first_bytes - len(self._first)
        self._first += piece[:free]
        self._last += piece[free:]
        if len(self._last) > self._last_bytes + 4 * _READ_BYTES:
            del self._last[: -self._last_bytes or None]
        if before <= self._end_bytes < self._total:
            self._on_flood()

    def close(self) -> None:
        """Stop reading."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        if not self.ended.done():
            self.ended.set_result(None)

    def value(self) -> bytes:
        """Return what was kept, with a line in place of what was cut."""
        last = bytes(self._last[-self._last_bytes :]) if self._last_bytes else b""
        cut = self._total - len(self._first) - len(last)
        if not cut:
            return bytes(self._first) + last
        return bytes(self._first) + b"\n[... %d bytes cut ...]\n" % cut + last


class StandardInput:
    """Bytes that are written to a command's standard input while it reads them."""

    def __init__(self, fd: int, content: bytes) -> None:
        """Write `content` to `fd`, which becomes this object's own, in the running loop."""
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._rest = memoryview(content)
        self._loop = asyncio.get_running_loop()
        self._loop.add_writer(fd, self._write)

    def _write(self) -> None:
        if self._fd is None:
            return
        try:
            self._rest = self._rest[os.write(self._fd, self._rest[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:
            self._rest = self._rest[:0]  # The command does not read it.
        if not self._rest:
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = None


class CommandStreams:
    """The three standard streams of one command, seen from the host, and what it came to."""

    def __init__(
        self, stdin: bytes, limits: SandboxLimits, keep_bytes: int | None, kill: Callable[[str], None]
    ) -> None:
        """`keep_bytes` replaces limits.output_kb. `kill`: ends the command that passed the limit of this name."""
        self.child_fds: list[int] = []
        """The command's ends."""
        self._kill = kill
        self._ended_by: list[str] = []
        self._started = time.monotonic()
        self._stdin: StandardInput | None = None
        if stdin:
            read_fd, write_fd = os.pipe()
            self.child_fds.append(read_fd)
            self._stdin = StandardInput(write_fd, stdin)
        keep_bytes = int(limits.output_kb * 1024) if keep_bytes is None else keep_bytes
        outputs = []
        for _ in ("stdout", "stderr"):
            read_fd, write_fd = os.pipe()
            self.child_fds.append(write_fd)
            outputs.append(
                BoundedOutput(
                    read_fd,
                    keep_bytes=keep_bytes,
                    end_bytes=int(limits.output_mb * 2**20),
                    on_flood=lambda: self.end("output_mb"),
                )
            )
        self._stdout, self._stderr = outputs

    def end(self, limit: str) -> None:
        """End the command, which passed a limit."""
        self._ended_by.append(limit)
        self._kill(limit)

    def result(self, status: int | None, note: str = "", ended_by: str = "") -> CommandResult:
        """Return how the command ended. `status`: negative for a signal, None when the box ended."""
        limits = [*self._ended_by, ended_by, _SIGNAL_LIMITS.get(-status, "") if status is not None else ""]
        limit = next(filter(None, limits), "")
        return CommandResult(
            exit_code=None if limit or status is None else status if status >= 0 else 128 - status,
            stdout=self._stdout.value(),
            stderr=self._stderr.value() + note.encode(),
            ended_by=limit,
            wall_s=time.monotonic() - self._started,
        )

    def handed_over(self) -> None:
        """Close the command's ends here, once the command has them."""
        while self.child_fds:
            os.close(self.child_fds.pop())

    async def drained(self, timeout_s: float) -> None:
        """Wait for the end of both outputs. A process that outlived its command may hold them open."""
        await asyncio.wait([self._stdout.ended, self._stderr.ended], timeout=timeout_s)

    def close(self) -> None:
        self.handed_over()
        for stream in (self._stdin, self._stdout, self._stderr):
            if stream is not None:
                stream.close()
