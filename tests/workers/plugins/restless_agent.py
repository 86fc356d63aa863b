"""A verifiers environment whose agent behaves as programs do: it retries, hangs up, rewrites its history, and worse."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
PATHS = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}


class Talk:
    """A conversation in one dialect, as its program keeps it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.history: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]

    def body(self, *, tools: bool = True) -> dict[str, Any]:
        flat = {"type": "function", **TOOL}
        tool = {
            "chat": {"type": "function", "function": TOOL},
            "messages": {"name": TOOL["name"], "input_schema": TOOL["parameters"]},
            "responses": flat,
        }[self.kind]
        body = {"model": "any", "input" if self.kind == "responses" else "messages": list(self.history)}
        return body | ({"tools": [tool]} if tools else {}) | ({"max_tokens": 99} if self.kind == "messages" else {})

    def take(self, reply: dict[str, Any], draw: random.Random) -> None:
        """Add an answer as the program writes it down, and what follows it."""
        if self.kind == "chat":
            message = reply["choices"][0]["message"]
            calls = message.get("tool_calls") or []
            for call in calls:  # The same arguments, written anew.
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"seen {draw.random()}"} for call in calls
            ]
            added = [message, *results]
        elif self.kind == "messages":
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": f"seen {draw.random()}"}
                for block in reply["content"] if block["type"] == "tool_use"
            ]  # fmt: skip
            added = [{"role": "assistant", "content": reply["content"]}]
            added += [{"role": "user", "content": results}] if results else []
        else:
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": f"seen {draw.random()}"}
                for item in reply["output"] if item["type"] == "function_call"
            ]  # fmt: skip
            added = [*reply["output"], *results]
        self.history += added if results else [*added, {"role": "user", "content": f"Go on {draw.random()}."}]


class RestlessAgent(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        draw = random.Random(data.idx)
        talk = Talk(draw.choice(sorted(PATHS)))
        headers = {"Authorization": f"Bearer {secret}", "x-api-key": secret}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(draw.randint(1, 6)):
                await self._act(draw, talk, session, endpoint + PATHS[talk.kind])
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _act(self, draw: random.Random, talk: Talk, session: aiohttp.ClientSession, url: str) -> None:
        async def ask(body: Any, **headers: str) -> dict[str, Any] | None:
            async with session.post(url, json=body, headers=headers) as reply:
                content = await reply.read()
                return json.loads(content) if reply.ok and content[:1] == b"{" else None

        await _disturb(draw.choice(["", "hang up", "rewrite", "cut", "title", "bad", "stream"]), draw, talk, ask)
        replies, again = [await ask(talk.body())], draw.choice(["", "", "again", "retry", "twice"])
        if again == "again":  # Without a word of it being a retry: another answer.
            replies.append(await ask(talk.body()))
        elif again == "retry":
            replies.append(await ask(talk.body(), **{"x-stainless-retry-count": "1"}))
            assert replies[0] == replies[1], "a marked retry must get the recorded answer"
        elif again == "twice":
            replies += await asyncio.gather(ask(talk.body()), ask(talk.body()))
        if (reply := draw.choice(replies)) is not None:
            talk.take(reply, draw)


async def _disturb(action: str, draw: random.Random, talk: Talk, ask: Any) -> None:
    if action == "hang up":
        with suppress(TimeoutError, aiohttp.ClientError):
            await asyncio.wait_for(ask(talk.body()), draw.random() / 20)
    elif action == "rewrite":  # A compaction: what was said becomes a summary.
        talk.history = [{"role": "user", "content": f"So far: {draw.random()}. Go on."}]
    elif action == "cut":
        talk.history = talk.history[:1]
    elif action == "title":
        await ask(Talk(talk.kind).body(tools=False))
    elif action == "bad":
        for wrong in ({"messages": 5}, [], {"input": {"a": 1}}):
            await ask(wrong)
    elif action == "stream":
        await ask(talk.body() | {"stream": True})


class Session(vf.Task[vf.TaskData]):
    @vf.reward
    async def done(self, trace: vf.Trace) -> float:
        return 1.0


class SessionsConfig(vf.TasksetConfig):
    num_tasks: int = 10


class Sessions(vf.Taskset[Session, SessionsConfig]):
    def load(self) -> list[Session]:
        count = self.config.num_tasks
        return [Session(vf.TaskData(idx=index, prompt=f"Session {index}."), self.config.task) for index in range(count)]


__all__ = ["RestlessAgent", "Sessions"]
