"""A conversation of `composer chat`, with a scripted model on loopback and with tools that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from composer_prime.cli.chat.chat_command import LiveAnswer, _obey
from composer_prime.cli.chat.chat_page import ChangeCount, PageConversation, chat_server
from composer_prime.cli.chat.conversation import ChatSettings, Conversation
from composer_prime.errors import DeadlineError, RolloutError
from composer_prime.model_source import resolve_model
from tests.chat_server import chat_server as model_server

pytest.importorskip("verifiers.v1")
Answer = Callable[[web.Request], Awaitable[dict[str, Any]]]
CALLS = [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


class Tasks:
    """Task 0 has tools whose calls run `look`; task 1 does not begin; ends are noted."""

    num_tasks = 2
    schemas: tuple[()] = ()

    def __init__(self, look: Callable[[], Awaitable[str]]) -> None:
        self.look, self.index, self.ended = look, 0, []

    def describe(self, index: int) -> tuple[str, str]:
        return "", ["Look.", "Never."][index]

    def tools(self, index: int) -> Tasks:
        self.index = index
        return self

    async def start(self) -> str:
        if self.index == 1:
            raise OSError("no such box")
        return ""

    async def call(self, name: str, arguments_json: str) -> str:
        try:
            return await self.look()
        finally:
            self.ended.append("call")

    async def finish(self, trace: Any) -> None:
        self.ended.append("task")


async def fails() -> str:
    raise TimeoutError("too slow")


@asynccontextmanager
async def talking(
    answer: Callable[[web.Request], Awaitable[dict[str, Any]]], **made: Any
) -> AsyncIterator[Conversation]:
    async def reply(request: web.Request) -> web.Response:
        choice = {"finish_reason": "stop", "token_ids": [], **await answer(request)}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 1, "total_tokens": 2}})

    settings = ChatSettings(temperature=1.0, max_tokens=9, system=" hi\r\nyou \n")
    made = {"environment": None, "tokenizer": None, "on_token": lambda: None, **made}
    async with model_server(reply) as url:
        talk = Conversation(url.removesuffix("/v1"), "token", settings, **made)
        await talk.restart()
        yield talk
        await talk.close()


async def calls_a_tool(request: web.Request) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": "", "tool_calls": CALLS}}


# A tool may raise anything: the terminal tells it and goes on. A task that does not begin leaves no closed tools.
@pytest.mark.process
async def test_an_environment_that_fails(capsys):
    async with talking(calls_a_tool, environment=Tasks(fails)) as talk:
        assert await _obey(talk, LiveAnswer(), 0, "/task")
        assert "the tool look failed: TimeoutError: too slow; /new" in capsys.readouterr().err
        assert [entry.message["role"] for entry in talk.entries] == ["system", "user", "assistant", "tool"]
        with pytest.raises(RolloutError, match="task 1 failed: OSError: no such box"):
            await talk.use_task(1)
        assert talk.tools is None and len(talk.entries) == 1 and talk.task == 0
        for index in ("²", "one", "-1", "9" * 5000):
            assert await _obey(talk, LiveAnswer(), 0, f"/task {index}")
            assert f"there is no task '{index[:80]}'; give a number" in capsys.readouterr().err


# The request goes straight to the gateway. What a stopped answer samples late is not in the next one.
async def test_late_tokens_and_proxies(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    sessions: list[str] = []

    async def answer(request: web.Request) -> dict[str, Any]:
        sessions.append(request.headers["X-Session-ID"])
        for token, session in enumerate(sessions):
            talk.take(session, token, -1.0)
        if len(sessions) == 1:
            await asyncio.Event().wait()
        return {"message": {"role": "assistant", "content": "x"}, "token_ids": [1]}

    sampled = asyncio.Event()
    async with talking(answer, on_token=sampled.set) as talk:
        first = asyncio.ensure_future(anext(talk.say("Hello")))
        await sampled.wait()
        first.cancel()
        await asyncio.wait([first])
        assert [entry.sampled async for entry in talk.say("Again")] == [[(1, "#1", -1.0)]]
        assert [entry.finish_reason for entry in talk.entries] == [None, None, "cancelled", None, "stop"]


# What ends a turn is no text of it, on the page as in the terminal; special tokens within an answer are shown.
async def test_an_end_of_turn_is_not_shown():
    tokenizer = Tokenizer.from_file(str(resolve_model("tiny") / "tokenizer.json"))
    ids = tokenizer.encode("Yes<|im_start|>no<|im_end|>", add_special_tokens=False).ids

    async def answer(request: web.Request) -> dict[str, Any]:
        for token in ids:
            talk.take(request.headers["X-Session-ID"], token, -1.0)
        partial = talk.partial()
        assert partial is not None and "".join(text for _, text, _ in partial.sampled) == "Yes<|im_start|>no"
        return {"message": {"role": "assistant", "content": "x"}, "token_ids": ids}

    async with talking(answer, tokenizer=tokenizer) as talk:
        page = PageConversation(talk, ChangeCount(), {})
        assert [entry.message["role"] async for entry in talk.say("Hello")] == ["assistant"]
        turn = (await page.state(-1))["turns"][-1]
        assert "".join(turn["tokens"]["texts"]) == "Yes<|im_start|>no"
        assert len(turn["tokens"]["texts"]) == len(ids) == len(turn["tokens"]["logprobs"])


# A system message that differs only in how it ends lines is the same: the conversation stays.
async def test_settings_of_the_page():
    async with talking(calls_a_tool) as talk:
        page = PageConversation(talk, ChangeCount(), {})
        entries = talk.entries
        await page.change(b'{"temperature": 0, "max_tokens": 9, "system": "hi\\nyou"}')
        assert talk.entries is entries and talk.settings.temperature == 0
        await page.change(b'{"temperature": 0, "max_tokens": 9, "system": ""}')
        assert talk.entries == [] and talk.settings.system is None


# An answer that does not stop keeps its settings: the page shows no system message that the model never gets.
@pytest.mark.process
async def test_settings_while_an_answer_does_not_stop():
    waits, goes_on = asyncio.Event(), asyncio.Event()

    async def look() -> str:
        waits.set()
        while not goes_on.is_set():
            with suppress(asyncio.CancelledError):
                await goes_on.wait()
        raise OSError("no such box")

    async with talking(calls_a_tool, environment=Tasks(look)) as talk:
        page = PageConversation(talk, ChangeCount(), {}, stop_s=0.01)
        await page.act("task", b'{"index": 0, "ask": true}')
        await waits.wait()
        before, new = talk.settings, b'{"temperature": 0, "max_tokens": 9, "system": "new"}'
        with pytest.raises(DeadlineError, match=r"waited 0\.01 s for the tool look to stop"):
            await page.act("settings", new)
        assert (await page.state(-1))["settings"] == before
        goes_on.set()
        while (await page.state(-1))["for_s"] is not None:
            await asyncio.sleep(0.01)
        await page.act("settings", new)
        assert talk.settings.system == talk.entries[0].message["content"] == "new"


# The page's end stops the answer before its task's tools are closed.
@pytest.mark.process
async def test_the_end_of_the_page():
    waits = asyncio.Event()

    async def look() -> str:
        waits.set()
        return await asyncio.Future()

    tasks = Tasks(look)
    async with talking(calls_a_tool, environment=tasks) as talk:
        async with chat_server(talk, ChangeCount(), "tiny", 99, 0) as server:
            await server.page.act("task", b'{"index": 0, "ask": true}')
            await waits.wait()
        assert tasks.ended == ["call"]
        assert talk.entries[-1].error == "Stopped by the user."
    assert tasks.ended == ["call", "task"]
