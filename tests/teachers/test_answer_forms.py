"""What endpoints may send for an answer, and how long it took them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from loopback import Endpoint, configured, replayed, serving, state

from composer_prime.traces.replay.records import read_pairs


def overrule(model: str, messages: list[dict]) -> tuple[str, dict]:
    return "cat", {"path": "a.py"}


class Objects(Endpoint):
    """Gives arguments as an object, and text in parts."""

    def _completion(self, body: dict) -> dict:
        completion = super()._completion(body)
        message = completion["choices"][0]["message"]
        message["content"] = [{"type": "text", "text": "Look"}, {"type": "image_url"}, {"type": "text", "text": "ing."}]
        message["tool_calls"][0]["function"]["arguments"] = {"path": "a.py"}
        return completion


# Arguments as an object and content in parts are what their text would be, in one call a teacher.
def test_objects_and_parts(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(Objects(answers=overrule)) as endpoint:
            await replayed(tmp_path, configured(tmp_path, endpoint.url), [state(0)])
            assert len(endpoint.asked) == 2

    asyncio.run(run())
    (pair,) = read_pairs(tmp_path / "pairs.jsonl")
    assert pair.chosen["tool_calls"][0]["function"]["arguments"] == '{"path": "a.py"}'
    assert pair.chosen["content"] == "Looking."


# An answer that the endpoint filtered is no vote, whatever is left of it; it is kept, so that it is not paid again.
def test_a_filtered_answer_is_no_vote(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=overrule, finish_reason="content_filter")) as endpoint:
            config = configured(tmp_path, endpoint.url)
            progress = await replayed(tmp_path, config, [state(0)])
            assert progress.outcomes == {"failed": 1} and "content_filter" in next(iter(progress.without_vote))
            assert (await replayed(tmp_path, config, [state(0)])).failed == 0 and len(endpoint.asked) == 3

    asyncio.run(run())


# A wish to wait that is not a number of seconds is none: the usual pause applies.
@pytest.mark.parametrize("wish", ["nan", "inf", "-inf", "soon"])
def test_a_wish_that_is_no_number(tmp_path: Path, wish: str) -> None:
    class Wishing(Endpoint):
        async def _reply(self, request: web.Request, fault: str, body: dict) -> web.StreamResponse:
            if fault == "429":
                return web.json_response({}, status=429, headers={"retry-after": wish})
            return await super()._reply(request, fault, body)

    async def run() -> None:
        async with serving(Wishing(answers=overrule, script={"gpt-a": ["429"]})) as endpoint:
            async with asyncio.timeout(60):
                progress = await replayed(tmp_path, configured(tmp_path, endpoint.url), [state(0)])
            assert progress.pairs == 1 and len(endpoint.asked) == 3

    asyncio.run(run())
