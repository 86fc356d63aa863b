"""Ports of the box's own loopback on which the host answers.

The box has no network but its own loopback. Its first process opens a listening socket there and hands it over, so
the host accepts the box's connections itself: no program inside forwards anything, and no socket lies on a disk.

    inside: connect 127.0.0.1:PORT        -->  host: the same port of the host's loopback, such as the model endpoint
    inside: HTTP proxy 127.0.0.1:PROXY_PORT  -->  host: named hosts only (`allow`)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from composer_prime.errors import SandboxError
from orchestrator.coding.sandbox.control import ControlChannel

PROXY_PORT = 3128
PROXY_URL = f"http://127.0.0.1:{PROXY_PORT}"
CONNECT_TIMEOUT_S = 30.0
_MAX_HEAD_BYTES = 1 << 16
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class LoopbackPorts:
    """The ports of one box that lead to the host."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._servers: dict[int, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._connections: set[asyncio.Task[None]] = set()

    async def forward(self, port: int) -> None:
        """Make a port of the host's loopback reachable in the box under the same number."""

        async def serve(inside: Streams) -> None:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                outside = await asyncio.open_connection("127.0.0.1", port)
            await _pump(inside, outside)

        await self._serve(port, serve)

    async def allow(self, hosts: list[str]) -> None:
        """Serve an HTTP proxy that connects to these hosts only."""
        await self._serve(PROXY_PORT, lambda inside: _proxy(inside, hosts))

    async def _serve(self, port: int, serve: Callable[[Streams], Awaitable[None]]) -> None:
        async with self._opening:
            if port in self._servers:
                return
            reply = await self._control.ask({"op": "listen", "port": port})
            if "error" in reply:
                raise SandboxError(f"the sandbox cannot listen on its port {port}: {reply['error']}")
            listening = socket.socket(fileno=self._control.take_fd())

            async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                self._connections.add(task)
                try:
                    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
                        await serve((reader, writer))
                finally:
                    self._connections.discard(task)
                    writer.close()

            self._servers[port] = await asyncio.start_server(accepted, sock=listening)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        for task in self._connections:
            task.cancel()


async def _pump(inside: Streams, outside: Streams) -> None:
    """Copy both ways until both sides have ended."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    try:
        await asyncio.gather(copy(inside[0], outside[1]), copy(outside[0], inside[1]))
    finally:
        outside[1].close()


async def _proxy(inside: Streams, hosts: list[str]) -> None:
    """Serve one connection of an HTTP client: CONNECT, or one plain request with an absolute URL."""
    reader, writer = inside
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        head = await reader.readuntil(b"\r\n\r\n")
    if len(head) > _MAX_HEAD_BYTES:
        raise ValueError("the request's head is too long")
    first, _, rest = head.partition(b"\r\n")
    method, target, version = first.decode("latin-1").split(" ", 2)
    url = urlsplit(f"//{target}" if method == "CONNECT" else target)
    host, port = (url.hostname or "").rstrip("."), url.port or (443 if method == "CONNECT" else 80)
    if not any(entry in (host, f"{host}:{port}") for entry in hosts):
        text = f"the sandbox may not reach {host}:{port}: orchestrator.source.runtime.allow names {hosts}\n"
        writer.write(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text))
        writer.write(text.encode())
        await writer.drain()
        return
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        outside = await asyncio.open_connection(host, port)
    if method == "CONNECT":
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    else:
        # One request a connection: a later one could name another host.
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        lines = [
            line for line in rest.split(b"\r\n") if line and not line.lower().startswith((b"proxy-", b"connection:"))
        ]
        lines.insert(0, f"{method} {path} {version}".encode("latin-1"))
        outside[1].write(b"\r\n".join([*lines, b"Connection: close", b"", b""]))
    await _pump(inside, outside)
