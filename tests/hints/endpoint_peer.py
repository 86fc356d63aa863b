"""A chat endpoint on loopback for tests: answers, stays silent, fails, or writes nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from composer_prime.config.hints import EndpointConfig
from tests.chat_server import chat_server

Answer = Callable[[dict], str]


@dataclass
class ChatPeer:
    url: str = ""
    mode: str = "answer"
    """answer | silent | 500 | 429 | nonsense | no_usage | bad_usage."""
    answer: Answer = lambda body: "use add"
    bodies: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def config(self, **settings) -> EndpointConfig:
        return EndpointConfig(**({"base_url": self.url, "model": "m", "timeout_s": 5.0} | settings))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        body = await request.json()
        self.bodies.append(body)
        if self.mode == "silent":
            await asyncio.sleep(60)
        if self.mode in ("500", "429"):
            return web.Response(status=int(self.mode), text="out of order")
        if self.mode == "nonsense":
            return web.Response(text="<html>welcome</html>")
        reply: dict = {"choices": [{"message": {"role": "assistant", "content": self.answer(body)}}]}
        if self.mode != "no_usage":
            reply["usage"] = {"prompt_tokens": 100, "completion_tokens": None if self.mode == "bad_usage" else 10}
        return web.json_response(reply)


@asynccontextmanager
async def chat_peer(mode: str = "answer", answer: Answer = lambda body: "use add") -> AsyncIterator[ChatPeer]:
    peer = ChatPeer(mode=mode, answer=answer)
    async with chat_server(peer.handle) as peer.url:
        yield peer
