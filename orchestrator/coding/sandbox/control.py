"""The host's end of the socket to a box's first process (box_init.py): requests, replies by their ids, and ports.

The box has no network but its own loopback. Its first process opens a listening socket there and hands it over, so
the host accepts the box's connections itself: no program inside forwards anything, and no socket lies on a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import socket
import struct
from typing import Any

from composer_prime.errors import SandboxError

_FRAME = struct.Struct(">I")
_MAX_REPLY_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 30.0


class ControlChannel:
    """Requests to one box. Every pending request fails with ConnectionResetError when the box ends."""

    def __init__(self, control: socket.socket) -> None:
        """Own `control` and read it in the running loop."""
        control.setblocking(False)
        self._socket = control
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._fds: list[int] = []
        self._buffer = bytearray()
        self._sending = asyncio.Lock()
        self.closed = False
        self._loop.add_reader(control.fileno(), self._read)

    async def ask(
        self, request: dict[str, Any], *, fds: list[int] | None = None, payload: bytes = b""
    ) -> dict[str, Any]:
        """Send a request and return its reply. Closes `fds` once they are sent. Raises OSError when the box ends."""
        if self.closed:
            raise ConnectionResetError("the sandbox has ended")
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._pending[number] = answer
        try:
            await self._send({**request, "id": number}, fds or [], payload)
            return await answer
        finally:
            self._pending.pop(number, None)

    def tell(self, request: dict[str, Any]) -> None:
        """Send a request that has no reply, behind those that are being sent."""

        async def send() -> None:
            with contextlib.suppress(OSError):
                await self._send(request, [], b"")

        if not self.closed:
            self._telling = asyncio.ensure_future(send())

    def take_fd(self) -> int:
        """Return the descriptor that came with the last reply."""
        return self._fds.pop(0)

    async def _send(self, request: dict[str, Any], fds: list[int], payload: bytes) -> None:
        data = json.dumps(request).encode()
        message = _FRAME.pack(len(data)) + data
        async with self._sending:
            if fds:
                # Descriptors travel with the first bytes, which fit, as nothing else waits in the socket.
                socket.send_fds(self._socket, [message[:4]], fds)
                message = message[4:]
                while fds:
                    os.close(fds.pop())
            await self._loop.sock_sendall(self._socket, message + payload)

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        self._fds += fds
        self._buffer += data
        if not data or not self._dispatch():
            self.close()

    def _dispatch(self) -> bool:
        """Resolve the replies that have arrived whole. Return whether the stream makes sense."""
        while len(self._buffer) >= _FRAME.size:
            (size,) = _FRAME.unpack_from(self._buffer)
            if size > _MAX_REPLY_BYTES:
                return False
            if len(self._buffer) < _FRAME.size + size:
                break
            data = bytes(self._buffer[_FRAME.size : _FRAME.size + size])
            del self._buffer[: _FRAME.size + size]
            try:
                reply = json.loads(data)
                answer = self._pending.get(reply["id"])
            except (ValueError, TypeError, KeyError):
                return False
            if answer is not None and not answer.done():
                answer.set_result(reply)
        return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the sandbox ended"))


class LoopbackPorts:
    """The ports of one box that lead to the same ports of the host's loopback."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._servers: dict[int, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._connections: set[asyncio.Task[None] | None] = set()

    async def forward(self, port: int) -> None:
        """Make a port of the host's loopback reachable in the box under the same number."""
        async with self._opening:
            if port in self._servers:
                return
            reply = await self._control.ask({"op": "listen", "port": port})
            if "error" in reply:
                raise SandboxError(f"the sandbox cannot listen on its port {port}: {reply['error']}")
            listening = socket.socket(fileno=self._control.take_fd())
            self._servers[port] = await asyncio.start_server(functools.partial(self._serve, port), sock=listening)

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    host_reader, host_writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.closing(host_writer):
                    await asyncio.gather(_copy(reader, host_writer), _copy(host_reader, writer))
        finally:
            self._connections.discard(task)
            writer.close()

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        for task in self._connections:
            if task is not None:
                task.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the reader ends."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
