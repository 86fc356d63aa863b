"""Serves weight chunks over HTTP/1.1, read-only, for `orchestrator weights`.

    GET /chunks/<sha256>               one Range: bytes=FIRST-LAST
    GET /manifests/v000012.manifest

These are the paths of the weight store's folder, so any static host of that folder serves the same. Nothing is listed.
A name that a client gives is never a path: a chunk's is 64 hexadecimal digits, a manifest's is a number.

The requests at a time are bounded, and so is the time that each may take. A client beyond the bound is turned away
(503), one that reads too slowly is cut off and resumes by Range. It runs in a process of its own: whoever holds all
requests sends nodes to the gateway, and delays nothing else.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from composer_prime.address import Address
from composer_prime.errors import ConfigError, PortInUseError
from composer_prime.run.weights import WeightStore

_MAX_REQUESTS = 128
_LONGEST_S = 300.0
"""For one answer; so a client reads at least 56 kB/s of a chunk of 16 MiB."""
_IDLE_S = 15.0
"""A connection without a request is closed after this long, also one whose request does not end."""
_SHUTDOWN_S = 2.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WeightServer:
    """Serves from `start` to `close`."""

    def __init__(self, store: WeightStore, *, max_requests: int = _MAX_REQUESTS, longest_s: float = _LONGEST_S) -> None:
        """`max_requests`: at a time, of all clients. `longest_s`: how long one may take for an answer."""
        self.url = ""
        self._store = store
        self._places = asyncio.Semaphore(max_requests)
        self._longest_s = longest_s
        self._runner: web.AppRunner | None = None

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
        try:
            await web.TCPSite(runner, None if address.host == "*" else address.host, address.port).start()
        except OSError as error:
            await self.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"http://{address} is held by another process: stop it, or serve the weights at another port"
                ) from None
            raise ConfigError(f"cannot serve weights at http://{address}: {error.strerror}") from None
        self.url = f"http://{Address(address.host, runner.addresses[0][1])}"

    async def close(self) -> None:
        """Stop listening, and give requests under way two seconds."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _limited(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer within the bounds: aiohttp itself would wait for a slow reader for ever."""
        if self._places.locked():
            raise web.HTTPServiceUnavailable(text="too many requests at a time\n")
        async with self._places:
            try:
                async with asyncio.timeout(self._longest_s):
                    response = await handler(request)
                    await response.prepare(request)
                    await response.write_eof()
            except (TimeoutError, ConnectionError):  # Too slow, or gone in the middle of a file.
                if request.transport is not None:
                    request.transport.abort()
                raise web.HTTPRequestTimeout from None
        return response

    async def _get_manifest(self, request: web.Request) -> web.Response:
        try:
            signed = await asyncio.to_thread(self._store.manifest, int(request.match_info["version"]))
        except FileNotFoundError:
            raise web.HTTPNotFound from None
        return web.Response(body=signed, headers={"Cache-Control": "no-cache"})

    async def _get_chunk(self, request: web.Request) -> web.StreamResponse:
        path = await asyncio.to_thread(self._store.pulled_path, request.match_info["sha256"])
        if path is None:
            raise web.HTTPNotFound
        return _Chunk(path, headers={"Cache-Control": "public, max-age=31536000, immutable"})


class _Chunk(web.FileResponse):
    """A file that is sent once: aiohttp asks for it again after `_limited` has sent it."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None if self.prepared else await super().prepare(request)
