"""A gateway stand-in on loopback: answers /inference/v1/generate with seeded ids after a fixed delay."""

import asyncio
import random
from typing import Any, Self

from aiohttp import web

from tests.chat_server import http_server


def generated(request_id: str, ids: list[int]) -> web.Response:
    content = [{"token": f"token_id:{i}", "logprob": -0.5} for i in ids]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
    return web.json_response({"request_id": request_id, "choices": [choice]})


class Peer:
    """Speaks docs/reference/generate-contract.md.

    `sessions[id]` lists the (prompt, completion) pairs of one X-Session-ID.
    """

    def __init__(
        self, *, delay_s: float = 0.0, max_model_len: int = 4096, fail_status: int = 0, hang_after: int | None = None
    ) -> None:
        self.delay_s, self.max_model_len, self.fail_status = delay_s, max_model_len, fail_status
        self.hang_after = hang_after
        """Requests of a session that are answered; the next one gets no reply."""
        self.sessions: dict[str, list[tuple[list[int], list[int]]]] = {}
        self.params: dict[str, dict] = {}
        """Of each session's last request."""
        self.running = 0
        self.cancelled = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = http_server(
            web.post("/inference/v1/generate", self.generate), web.get("/v1/models", self.models)
        )
        self.url = await self._server.__aenter__() + "/v1"
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._server.__aexit__(*error)

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "policy", "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        session = request.headers["X-Session-ID"]
        if self.fail_status:
            return web.json_response({"error": {"message": "no inference node is connected"}}, status=self.fail_status)
        self.running += 1
        try:
            silent = self.hang_after is not None and len(self.sessions.get(session, ())) >= self.hang_after
            await asyncio.sleep(3600 if silent else self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        turns = self.sessions.setdefault(session, [])
        self.params[session] = body["sampling_params"]
        draw = random.Random(f"{body['sampling_params'].get('seed')}/{len(turns)}")
        ids = [draw.randint(10, 200) for _ in range(11)] + [2]
        turns.append((body["token_ids"], ids))
        return generated(session, ids)
