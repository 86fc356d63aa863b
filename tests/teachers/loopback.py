"""A teacher on loopback that answers as it is told and counts what it was asked, with states and configurations."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from composer_prime.config import Config
from composer_prime.config.teachers import TeachersConfig
from composer_prime.traces.records import ReplayRecords, TraceState, votes_beside
from composer_prime.traces.replay.replay import Replay, ReplayProgress
from composer_prime.traces.replay.teacher_pool import TeacherPool, teacher_budget
from tests.chat_server import chat_server
from tests.configs_made import config_of

FAULTS = ("429", "500", "504", "522", "half", "nothing", "wrong_json", "late", "not_found")
PROMPT_TOKENS, ANSWER_TOKENS = 100, 10
USD = (PROMPT_TOKENS + ANSWER_TOKENS) / 1000
"""What one answered call costs a pool that is `configured`."""
NEVER_S = 250.0
"""A deadline that no load of the machine reaches: where calls are counted, a slow moment must not add one."""


@dataclass
class Endpoint:
    """Plays a script of faults, then answers: `answers(model, messages)` gives the text or the (tool, arguments)."""

    answers: Callable[[str, list[dict]], str | tuple[str, dict]]
    script: dict[str, list[str]] = field(default_factory=dict)
    """Faults by model, in order."""
    asked: list[tuple[str, int]] = field(default_factory=list)
    """(model, status) of every request."""
    answered: list[tuple[str, str]] = field(default_factory=list)
    """(model, question) of every request that got an answer."""
    seen: list[dict] = field(default_factory=list)
    late_s: float = 30.0
    delay_s: float = 0.0
    refuses: tuple[str, ...] = ()
    """Parameters that it answers status 400 to, as OpenAI does for reasoning models."""
    hold: asyncio.Event | None = None
    """Until it is set nobody is answered."""
    tokens_factor: float = 1.0
    billed_usd: float | None = None
    """What it says that a call cost."""
    finish_reason: str = "stop"
    names: dict[str, str] = field(default_factory=dict)
    """What it calls a model that it is asked for, if otherwise."""
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        model = body["model"]
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            if self.hold is not None:
                await self.hold.wait()
            script = self.script.get(model, [])
            fault = script.pop(0) if script else "fine"
            self.asked.append((model, 200))
            return await self._reply(request, fault, body)
        finally:
            self.in_flight -= 1

    async def _reply(self, request: web.Request, fault: str, body: dict) -> web.StreamResponse:
        refused = next((name for name in self.refuses if name in body), None)
        if refused is not None:
            message = f"Unsupported parameter: '{refused}' is not supported with this model."
            return web.json_response({"error": {"message": message, "param": refused}}, status=400)
        if fault.isdecimal():
            return web.json_response({"error": {"message": fault}}, status=int(fault), headers={"retry-after": "0.01"})
        if fault == "not_found":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if fault == "nothing":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if fault == "late":
            await asyncio.sleep(self.late_s)
        if fault == "wrong_json":
            return web.json_response({"choices": "none", "usage": None})
        content = json.dumps(self._completion(body)).encode()
        if fault == "half":
            reply = web.StreamResponse(
                headers={"Content-Type": "application/json", "Content-Length": str(len(content))}
            )
            await reply.prepare(request)
            await reply.write(content[: len(content) // 2])
            assert request.transport is not None
            request.transport.close()
            return reply
        self.answered.append((body["model"], json.dumps(body["messages"])))
        self.seen.append(body)
        return web.Response(body=content, content_type="application/json")

    def _completion(self, body: dict) -> dict:
        said = self.answers(body["model"], body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            message["tool_calls"] = [call(*said)]
        usage = {
            "prompt_tokens": int(PROMPT_TOKENS * self.tokens_factor),
            "completion_tokens": int(ANSWER_TOKENS * self.tokens_factor),
            "cost": self.billed_usd,
        }
        return {
            "choices": [{"message": message, "finish_reason": self.finish_reason}],
            "usage": usage,
            "model": self.names.get(body["model"], body["model"]),
        }


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[Endpoint]:
    async with chat_server(endpoint.chat) as endpoint.url:
        yield endpoint


def call(name: str, arguments: dict, call_id: str = "c1") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def xml(name: str, thought: str = "I look.", **arguments: str) -> str:
    """A call in the text, as SWE-smith writes it."""
    body = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
    return f"{thought}\n\n<function={name}>\n{body}</function>"


def says(content: str) -> dict:
    return {"role": "assistant", "content": content}


def state(number: int = 0, trace: str = "t", family: str = "claude", **changes: Any) -> TraceState:
    """A state in which the student lists folder `number`."""
    values: dict[str, Any] = {
        "trace_id": trace,
        "state_id": f"{trace}/{number:04d}",
        "step": number,
        "messages": [{"role": "user", "content": f"Task {number} of {trace}."}],
        "student_action": {"role": "assistant", "content": None, "tool_calls": [call("ls", {"n": number})]},
        "source_model": None,
        "source_family": family,
        "tools": [{"function": {"name": name}} for name in ("ls", "cat")],
        "format": "test/1",
    }
    return TraceState(**(values | changes))


def configured(tmp_path: Path, url: str, models: tuple[str, ...] = ("gpt-a", "qwen-b", "glm-c"), **more: Any):
    """A pool of priced teachers at `url`: 1 USD a thousand tokens, so that cents are easy to count."""
    teachers = [
        {
            "name": model,
            "model": model,
            "base_url": url,
            "api_key_var": "LOOPBACK_KEY",
            "input_usd_per_mtok": 1000.0,
            "output_usd_per_mtok": 1000.0,
        }
        for model in models
    ]
    values: dict[str, Any] = {
        "teacher": teachers,
        "cache_dir": tmp_path / "cache",
        "timeout_s": NEVER_S,
        "max_tokens": 20,
        "budget": {"usd_per_run": 1000.0},
    }
    return TeachersConfig(**(values | more))


def run_config(tmp_path: Path, url: str, path: str = "tiny", **teachers: Any) -> Config:
    """A run of toolsmith on the model `path` with `configured` teachers."""
    source = {"name": "t", "taskset": {"id": "orchestrator.environments.toolsmith"}}
    return config_of(
        run={"name": "x", "max_steps": 2, "output_dir": str(tmp_path)},
        model={"path": path, "max_context": 384},
        orchestrator={"source": [source]},
        teachers=configured(tmp_path, url, **teachers).model_dump(),
    )


async def replayed(
    tmp_path: Path, config: TeachersConfig, states: Any, addresses: dict[str, str] | None = None
) -> ReplayProgress:
    """One replay over the files of `tmp_path`; `addresses`: where models are to be found instead."""
    budget = teacher_budget(config.budget, tmp_path / "costs.jsonl")
    records = ReplayRecords(tmp_path / "pairs.jsonl", votes_beside(tmp_path / "pairs.jsonl"))
    pool = TeacherPool(config, budget, addresses)
    try:
        return await Replay(config, pool, budget, records).run(states)
    finally:
        await pool.close()


def overrule(model: str, messages: list[dict]) -> tuple[str, dict]:
    """All agree, against the student of `state`."""
    return "cat", {"path": "a.py"}


def play(tmp_path: Path, states: Any, script: Any = None, endpoint: Any = None, answers: Any = overrule, **more: Any):
    """(progress, endpoint) of one replay with three teachers."""
    played = endpoint or Endpoint(answers=answers, script=script or {})

    async def run() -> ReplayProgress:
        async with serving(played):
            return await replayed(tmp_path, configured(tmp_path, played.url, **more), states)

    return asyncio.run(run()), played


def kept_answers(cache_dir: Path) -> dict[str, bytes]:
    """What the cache holds, by key."""
    with closing(sqlite3.connect(cache_dir / "answers.sqlite")) as database:
        return dict(database.execute("SELECT key, answer FROM answers"))
