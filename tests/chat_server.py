"""A loopback HTTP server with one route, /v1/chat/completions, for tests of what asks such endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def chat_server(handler: Handler) -> AsyncIterator[str]:
    """The base URL, up to and with /v1. A caller that gives up cancels its handler."""
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", handler)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
