"""A scripted inference node on loopback, and rollouts through verifiers that it answers."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import AutoTokenizer

from orchestrator.chat_renderer import build_renderer
from orchestrator.workers.pool import RolloutReply, RunRollout, SourceSpec
from tests.workers.peer import Peer, generated

POLICY = str(Path(__file__).parents[1] / "composer_prime/assets/tiny/policy")
RENDERER = dict(name="custom", import_path="orchestrator.chat_renderer.ToolQwen3Renderer", thinking_retention="all")
TOOL_LOOP = "orchestrator.environments.tool_loop"
ONE_TURN = {"id": TOOL_LOOP, "max_turns": 1}
FULL = "the context is full"
"""A script's entry for a node that refuses the prompt as too long."""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedNode(Peer):
    """Answers the n-th request with the n-th text. `prompts` holds what it saw."""

    def __init__(self, texts: Sequence[str], model: str = POLICY) -> None:
        super().__init__()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._texts = texts
        self.prompts: list[list[int]] = []

    async def generate(self, request: web.Request) -> web.Response:
        self.prompts.append((await request.json())["token_ids"])
        text = self._texts[len(self.prompts) - 1]
        if text == FULL:
            message = "Prompt length (400) exceeds maximum context length (384)"
            return web.json_response({"error": {"message": message, "code": "context_length_exceeded"}}, status=400)
        ids = self._tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        return generated("", ids)

    def seen(self) -> str:
        """The last prompt as text."""
        return self._tokenizer.decode(self.prompts[-1])


def load(spec: SourceSpec) -> Any:
    from orchestrator.workers.verifiers_adapter import Environment, install_renderer

    config, renderer = build_renderer(spec.model_path, spec.renderer)
    install_renderer(spec.model_path, config, renderer)
    return Environment(spec, "train", config)


async def played(
    spec: SourceSpec, script: Callable[[str], Sequence[str]], *, task_index: int = 0, **request: Any
) -> tuple[RolloutReply, ScriptedNode]:
    """Play one task as a worker does. `script` makes the policy's replies from the task's id."""
    from orchestrator.workers.verifiers_adapter import keep_folders_in

    environment = load(spec)
    texts = script(environment.describe(task_index)[0])
    defaults = {"rollout_id": "r", "task_index": task_index, "model": "policy", "timeout_s": 150.0}
    with tempfile.TemporaryDirectory() as scratch:
        keep_folders_in(Path(scratch))  # By default they are in the user's cache, named after the rollout.
        async with ScriptedNode(texts) as node, environment.serving():
            return await environment.run(RunRollout(**{**defaults, "gateway_url": node.url, **request})), node


def roll_out(
    taskset: dict[str, Any], script: Callable[[Any], list[str]], *, model: str = POLICY, **harness: Any
) -> tuple[Any, Any, ScriptedNode]:
    """Play the first task in verifiers alone; `script` makes the texts from its data. Returns trace, data and node."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    from orchestrator.workers.verifiers_adapter import import_dotted_plugins

    import_dotted_plugins()
    agent = {"harness": {"id": TOOL_LOOP, **harness}, "runtime": {"type": "subprocess"}}
    config = resolve_env_config({"taskset": taskset, "agent": agent})

    async def play() -> tuple[Any, Any, ScriptedNode]:
        environment = load_environment(config)
        task = next(iter(environment.taskset))
        async with ScriptedNode(script(task.data), model) as node, environment.serving():
            client = vf.TrainClientConfig(base_url=node.url, renderer=RENDERER, renderer_model_name=model)
            context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig(temperature=1.0))
            result = await environment.run_slot(environment.slots(task)[0], context, None)
        return result.traces[0], task.data, node

    return asyncio.run(asyncio.wait_for(play(), timeout=200))


def source_spec_of(taskset: dict[str, Any], harness: dict[str, Any] = ONE_TURN, **more: Any) -> SourceSpec:
    return SourceSpec(
        name="tasks", tasksets={"train": taskset}, harness=harness, model_path=POLICY, renderer=RENDERER, **more
    )


async def play(spec: SourceSpec, script: Callable[[str], Sequence[str]], *, task_index: int = 0) -> RolloutReply:
    """Play one task. `script` makes the policy's replies from the task's id."""
    return (await played(spec, script, task_index=task_index))[0]
