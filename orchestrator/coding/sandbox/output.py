"""Collect what a command writes to a pipe, within bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_READ_BYTES = 1 << 16


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
    """The three standard streams of one command, seen from the host. `child_fds` are the command's ends."""

    def __init__(self, stdin: bytes, *, keep_bytes: int, end_bytes: int, on_flood: Callable[[], None]) -> None:
        self.child_fds: list[int] = []
        self.has_stdin = bool(stdin)
        self._stdin: StandardInput | None = None
        if stdin:
            read_fd, write_fd = os.pipe()
            self.child_fds.append(read_fd)
            self._stdin = StandardInput(write_fd, stdin)
        outputs = []
        for _ in ("stdout", "stderr"):
            read_fd, write_fd = os.pipe()
            self.child_fds.append(write_fd)
            outputs.append(BoundedOutput(read_fd, keep_bytes=keep_bytes, end_bytes=end_bytes, on_flood=on_flood))
        self.stdout, self.stderr = outputs

    def handed_over(self) -> None:
        """Close the command's ends here, once the command has them."""
        while self.child_fds:
            os.close(self.child_fds.pop())

    async def drained(self, timeout_s: float) -> None:
        """Wait for the end of both outputs. A process that outlived its command may hold them open."""
        await asyncio.wait([self.stdout.ended, self.stderr.ended], timeout=timeout_s)

    def close(self) -> None:
        self.handed_over()
        for stream in (self._stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
