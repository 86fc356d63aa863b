"""Plain HTTP calls on a gateway."""

from __future__ import annotations

from typing import Any

import aiohttp


async def post(url: str, body: Any, path: str = "/inference/v1/generate", **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}) as reply,
    ):
        return reply.status, await reply.json()


def generate_body(*token_ids: int, **sampling: Any) -> dict[str, Any]:
    return {"model": "policy", "token_ids": list(token_ids), "sampling_params": {"max_tokens": 16} | sampling}


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.json()
