"""Loopback HTTP servers for tests of what asks such endpoints."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def http_server(*routes: web.RouteDef) -> AsyncIterator[str]:
    """The base URL, without a slash at its end. A caller that gives up cancels its handler."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def chat_server(handler: Handler) -> AsyncIterator[str]:
    """The base URL, up to and with /v1."""
    async with http_server(web.post("/v1/chat/completions", handler)) as url:
        yield f"{url}/v1"
