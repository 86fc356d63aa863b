"""Collect what a command writes to its pipes, within bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

from composer_prime.config.sandbox import SandboxLimits
from orchestrator.coding.sandbox.box import CommandResult

_SLACK_BYTES = 1 << 18
_SIGNAL_LIMITS: dict[int, str] = {signal.SIGXCPU: "cpu_s", signal.SIGXFSZ: "file_mb"}


class BoundedOutput(asyncio.Protocol):
    """The beginning and the end of a stream. What lies between is counted and dropped while it streams."""

    def __init__(self, *, keep_bytes: int, end_bytes: int, on_flood: Callable[[], None]) -> None:
        """`on_flood`: called once, beyond `end_bytes`."""
        self._first_bytes = (keep_bytes + 1) // 2
        self._last_bytes = keep_bytes // 2
        self._end_bytes = end_bytes
        self._on_flood = on_flood
        self._first = bytearray()
        self._last = bytearray()
        self._total = 0
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        before = self._total
        self._total += len(data)
        free = self._first_bytes - len(self._first)
        self._first += data[:free]
        self._last += data[free:]
        if len(self._last) > self._last_bytes + _SLACK_BYTES:
            del self._last[: -self._last_bytes or None]
        if before <= self._end_bytes < self._total:
            self._on_flood()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def value(self) -> bytes:
        """Return what was kept, with a line in place of what was cut."""
        last = bytes(self._last[-self._last_bytes :]) if self._last_bytes else b""
        cut = self._total - len(self._first) - len(last)
        if not cut:
            return bytes(self._first) + last
        return bytes(self._first) + b"\n[... %d bytes cut ...]\n" % cut + last


class CommandStreams:
    """The three standard streams of one command, seen from the host, and what it came to."""

    def __init__(self, limits: SandboxLimits, keep_bytes: int | None, kill: Callable[[str], None]) -> None:
        """`keep_bytes` replaces limits.output_kb. `kill`: ends the command that passed the limit of this name."""
        self.child_fds: list[int] = []
        """The command's ends."""
        self._kill = kill
        self._ended_by: list[str] = []
        self._started = time.monotonic()
        self._stdin: asyncio.WriteTransport | None = None
        self._readers: list[asyncio.ReadTransport] = []
        self._stdout, self._stderr = (
            BoundedOutput(
                keep_bytes=int(limits.output_kb * 1024) if keep_bytes is None else keep_bytes,
                end_bytes=int(limits.output_mb * 2**20),
                on_flood=lambda: self.end("output_mb"),
            )
            for _ in range(2)
        )

    async def connect(self, stdin: bytes) -> None:
        """Make the pipes. `stdin` is written while the command reads it."""
        loop = asyncio.get_running_loop()
        if stdin:
            read_fd, write_fd = os.pipe()
            self.child_fds.append(read_fd)
            self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(write_fd, "wb", 0))
            self._stdin.write(stdin)
            self._stdin.write_eof()
        for output in (self._stdout, self._stderr):
            read_fd, write_fd = os.pipe()
            self.child_fds.append(write_fd)
            reader, _ = await loop.connect_read_pipe(lambda output=output: output, os.fdopen(read_fd, "rb", 0))
            self._readers.append(reader)

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
        if self._stdin is not None and self._stdin.get_write_buffer_size():
            self._stdin.abort()
        for reader in self._readers:
            reader.close()
