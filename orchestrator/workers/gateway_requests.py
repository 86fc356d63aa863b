"""Requests to the gateway that survive a lost connection, for environment workers and for hosts.py.

Where several processes serve the gateway's port, another one takes the request. A turn that is asked for again counts
once (rollouts/samples.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

_LOST = (aiohttp.ClientOSError, aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)
_ASK_AGAIN_S = (0.1, 1.0)
"""Pauses after lost connections."""


async def ask_gateway(
    session: aiohttp.ClientSession, method: str, url: str, data: bytes | None, headers: Mapping[str, str]
) -> tuple[int, str, bytes]:
    """Return status, content type and body. Raises aiohttp.ClientError or OSError when no try is answered."""
    for pause_s in _ASK_AGAIN_S:
        try:
            return await _ask(session, method, url, data, headers)
        except _LOST:
            await asyncio.sleep(pause_s)
    return await _ask(session, method, url, data, headers)


async def _ask(
    session: aiohttp.ClientSession, method: str, url: str, data: bytes | None, headers: Mapping[str, str]
) -> tuple[int, str, bytes]:
    async with session.request(method, url, data=data, headers=headers) as reply:
        return reply.status, reply.content_type, await reply.read()
