"""Ports of the box's own loopback on which the host answers, such as that of the model endpoint.

The box has no network but its own loopback. Its first process opens a listening socket there and hands it over, so
the host accepts the box's connections itself: no program inside forwards anything, and no socket lies on a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket

from composer_prime.errors import SandboxError
from orchestrator.coding.sandbox.control import ControlChannel

CONNECT_TIMEOUT_S = 30.0


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
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
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
