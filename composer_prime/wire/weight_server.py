"""Serves weight chunks over HTTP/1.1, read-only, for `orchestrator weights`.

    GET /chunks/<sha256>               one Range: bytes=FIRST-LAST
    GET /manifests/v000012.manifest    where a whole weight store is served

These are the paths of the weight store's folder, so any static host of that folder serves the same. Nothing is listed.
A name that a client gives is never a path: a chunk's is 64 hexadecimal digits, a manifest's is a number.

Connections, requests at a time, and the time that a client takes for an answer are bounded. One address (of IPv6, a
network of 48 bits) gets half of the connections and requests that the others leave. So one address never holds all of
them, though eight together may. A client beyond a bound is turned away (503) or cut off, and resumes by Range.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from composer_prime.address import Address, has_share, network
from composer_prime.errors import ConfigError, PortInUseError

logger = logging.getLogger(__name__)

PIECE_BYTES = 512 << 10
_MAX_REQUESTS = 128
"""Of all clients at a time; each holds two pieces in memory. The first address may have 64 of them, a second one 32."""
_LEAST_BYTES_PER_S = 64 << 10
"""A client that reads more slowly than this is cut off. So a chunk of 16 MiB takes about five minutes at most."""
_IDLE_S = 15.0
"""A connection without a request is closed after this long, also one whose request does not end."""
_SHUTDOWN_S = 2.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ChunkReader(Protocol):
    """What is served, such as a weight store. Called in threads."""

    def chunk_size(self, sha256: str) -> int | None: ...

    def chunk(self, sha256: str, offset: int, size: int) -> bytes | None: ...


class WeightServer:
    """Serves from `start` to `close`."""

    def __init__(
        self,
        chunks: ChunkReader,
        manifest: Callable[[int], bytes] | None = None,
        *,
        max_connections: int = 1024,
        max_requests: int = _MAX_REQUESTS,
        piece_timeout_s: float = 60.0,
        least_bytes_per_s: float = _LEAST_BYTES_PER_S,
    ) -> None:
        """`manifest` returns a version's signed manifest or raises FileNotFoundError; None serves chunks alone.

        `max_requests`: at a time, of all clients; a fleet behind one address shares its part. A client is cut off when
        it takes longer than `piece_timeout_s` to read a piece or the rest of an answer, or than that and the time of
        all that it was sent at `least_bytes_per_s`.
        """
        self.url = ""
        self.bytes_sent = 0
        self.refused = 0
        """Requests and connections beyond a limit."""
        self._chunks = chunks
        self._manifest = manifest
        self._max_connections = max_connections
        self._max_requests = max_requests
        self._piece_timeout_s = piece_timeout_s
        self._least_bytes_per_s = least_bytes_per_s
        self._requests: Counter[str] = Counter()
        """Under way, by the client's network."""
        self._connections: dict[Any, str] = {}
        """Their networks, also of some that have ended."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, address: Address) -> None:
        """Listen at `address`; port 0 takes a free one.

        Raises PortInUseError when another process holds it, ConfigError when this machine has no such address.
        """
        app = web.Application(middlewares=[self._limited])
        app.add_routes(
            [
                web.get("/chunks/{sha256:[0-9a-f]{64}}", self._get_chunk),
                web.get(r"/manifests/v{version:[0-9]{6,12}}.manifest", self._get_manifest),
            ]
        )
        runner = self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, keepalive_timeout=_IDLE_S, shutdown_timeout=_SHUTDOWN_S
        )
        await runner.setup()
        host = None if address.host == "*" else address.host
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: _Newcomer(self._admit), host, address.port
            )
        except OSError as error:
            await self.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"http://{address} is held by another process: stop it, or serve the weights at another port"
                ) from None
            raise ConfigError(f"cannot serve weights at http://{address}: {error.strerror}") from None
        port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://{Address(address.host, port)}"

    @property
    def port(self) -> int:
        """The port really bound."""
        return int(self.url.rpartition(":")[2])

    async def close(self) -> None:
        """Stop listening, and give requests under way two seconds."""
        listener, self._listener = self._listener, None
        runner, self._runner = self._runner, None
        if listener is not None:
            listener.close()
        if runner is not None:
            await runner.cleanup()

    def _admit(self, peer: str) -> asyncio.BaseProtocol | None:
        """Return what serves a new connection from `peer`; None when it is beyond a bound."""
        self._connections = {one: place for one, place in self._connections.items() if one.connected}
        client, held = network(peer), Counter(self._connections.values())
        server = self._runner.server if self._runner is not None else None
        if server is None or not has_share(held, client, self._max_connections):
            self.refused += 1
            return None
        handler = server()
        self._connections[handler] = client
        return handler

    @web.middleware
    async def _limited(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer within the share of the client's network. An answer that is not taken in time ends its connection."""
        client = network(request.remote or "")
        place = Counter({client: int(has_share(self._requests, client, self._max_requests))})
        self._requests += place
        try:
            if not place[client]:
                self.refused += 1
                raise web.HTTPServiceUnavailable(headers={"Retry-After": "5"}, text="too many requests at a time\n")
            return await self._finish(request, await handler(request))
        except web.HTTPException as refusal:
            await self._finish(request, refusal)
            raise
        finally:
            self._requests -= place

    async def _finish(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send what is left of `response`: aiohttp itself would wait for ever."""
        try:
            async with asyncio.timeout(self._piece_timeout_s):
                await response.prepare(request)
                await response.write_eof()
        except (TimeoutError, ConnectionError):
            _abort(request)
        return response

    async def _get_manifest(self, request: web.Request) -> web.Response:
        if self._manifest is None:
            raise web.HTTPNotFound
        try:
            signed = await asyncio.to_thread(self._manifest, int(request.match_info["version"]))
        except FileNotFoundError:
            raise web.HTTPNotFound from None
        return web.Response(body=signed, headers={"Cache-Control": "no-cache"})

    async def _get_chunk(self, request: web.Request) -> web.StreamResponse:
        sha256 = request.match_info["sha256"]
        size = await asyncio.to_thread(self._chunks.chunk_size, sha256)
        if size is None:
            raise web.HTTPNotFound
        first, end = _wanted(request, size)
        partial = (first, end) != (0, size)
        response = web.StreamResponse(status=206 if partial else 200)
        response.content_type = "application/octet-stream"
        response.content_length = end - first
        response.headers["Accept-Ranges"] = "bytes"
        response.headers["ETag"] = f'"{sha256}"'
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        if partial:
            response.headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        await response.prepare(request)
        if request.method != "HEAD":
            await self._send(request, response, sha256, first, end)
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, sha256: str, first: int, end: int
    ) -> None:
        """Send bytes `first` to `end` of a chunk. Cuts the connection where they are gone, or the client too slow."""
        loop, start = asyncio.get_running_loop(), first
        until = loop.time() + self._piece_timeout_s
        while first < end:
            piece = await asyncio.to_thread(self._chunks.chunk, sha256, first, min(PIECE_BYTES, end - first))
            try:
                if not piece:
                    raise TimeoutError
                allowed_s = (first - start) / self._least_bytes_per_s
                async with asyncio.timeout_at(min(until + allowed_s, loop.time() + self._piece_timeout_s)):
                    await response.write(piece)
            except TimeoutError:
                _abort(request)
                return
            first += len(piece)
            self.bytes_sent += len(piece)


class _Newcomer(asyncio.Protocol):
    """A connection whose peer is not known yet: then it is served or closed."""

    def __init__(self, admit: Callable[[str], asyncio.BaseProtocol | None]) -> None:
        self._admit = admit

    def connection_made(self, transport: Any) -> None:
        handler = self._admit(str((transport.get_extra_info("peername") or ("",))[0]))
        if handler is None:
            transport.abort()
        else:
            transport.set_protocol(handler)
            handler.connection_made(transport)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _wanted(request: web.Request, size: int) -> tuple[int, int]:
    """Return the first byte and the end of what the Range header asks for; all without one. Raises HTTP 416."""
    try:
        asked = request.http_range
    except ValueError:
        asked = slice(size, None)
    first, end, _ = asked.indices(size)
    if first >= end and (size or "Range" in request.headers):
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    return first, end
