"""Rollouts of coding tasks in this process, with a scripted inference node on loopback."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import AutoTokenizer

from orchestrator.chat_renderer import build_renderer
from orchestrator.workers.protocol import RolloutReply, RunRollout, SourceSpec

POLICY = str(Path(__file__).parents[2] / "composer_prime" / "assets" / "tiny" / "policy")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedNode:
    """Answers the n-th request with the n-th text. `prompts` holds what it saw."""

    def __init__(self, texts: list[str]) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(POLICY)
        self._texts = texts
        self.prompts: list[list[int]] = []

    async def __aenter__(self) -> ScriptedNode:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        self.prompts.append((await request.json())["token_ids"])
        ids = self._tokenizer.encode(self._texts[len(self.prompts) - 1] + "<|im_end|>", add_special_tokens=False)
        content = [{"token": f"token_id:{i}", "logprob": -0.5} for i in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"request_id": "", "choices": [choice]})

    def seen(self) -> str:
        """The last prompt as text."""
        return self._tokenizer.decode(self.prompts[-1])


def source(folder: Path, **taskset: Any) -> SourceSpec:
    settings = {"id": "orchestrator.coding.code", "folder": str(folder), "split": "all"}
    settings["runtime"] = {"type": "subprocess"}
    return SourceSpec(
        name="code",
        tasksets={"train": settings | taskset},
        harness={"id": "orchestrator.environments.tool_loop", "max_turns": 12},
        model_path=POLICY,
    )


def load(spec: SourceSpec) -> Any:
    from orchestrator.workers.verifiers_adapter import Environment
    from orchestrator.workers.verifiers_compat import install_renderer

    config, renderer = build_renderer(spec.model_path, spec.renderer)
    install_renderer(spec.model_path, config, renderer)
    return Environment(spec, "train", config)


def play(spec: SourceSpec, texts: list[str], **request: Any) -> tuple[RolloutReply, ScriptedNode]:
    """The first task's rollout with these model replies."""
    environment = load(spec)

    async def scenario() -> tuple[RolloutReply, ScriptedNode]:
        async with ScriptedNode(texts) as node, environment.serving():
            defaults = {
                "rollout_id": "r",
                "task_index": 0,
                "model": "policy",
                "timeout_s": 150.0,
                "gateway_url": node.url,
            }
            return await environment.run(RunRollout(**defaults | request)), node

    return asyncio.run(scenario())
