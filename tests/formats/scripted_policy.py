"""A policy that says what a script says, so that a test can play a source's tasks through verifiers over loopback."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrator.workers.protocol import RolloutReply, RunRollout, SourceSpec
from orchestrator.workers.verifiers_adapter import Environment

POLICY = Path(__file__).parents[2] / "composer_prime/assets/tiny/policy"
RENDERER = {
    "name": "custom",
    "import_path": "orchestrator.environments.tool_loop.renderer.ToolQwen3Renderer",
    "thinking_retention": "all",
}
ONE_TURN = {"id": "orchestrator.environments.tool_loop", "max_turns": 1}


def source_spec_of(taskset: dict[str, Any], harness: dict[str, Any] = ONE_TURN, **more: Any) -> SourceSpec:
    return SourceSpec(
        name="tasks", tasksets={"train": taskset}, harness=harness, model_path=str(POLICY), renderer=RENDERER, **more
    )


async def play(
    spec: SourceSpec, script: Callable[[str], Sequence[str]], *, task_index: int = 0, timeout_s: float = 150.0
) -> RolloutReply:
    """Play one task. `script` makes the policy's replies from the task's id."""
    from orchestrator.chat_renderer import build_renderer, read_tokenizer
    from orchestrator.workers.verifiers_compat import install_renderer, keep_folders_in

    config, renderer = build_renderer(spec.model_path, spec.renderer)
    install_renderer(spec.model_path, config, renderer)
    tokenizer = read_tokenizer(spec.model_path)
    environment = Environment(spec, "train", config)
    replies = list(script(environment.describe(task_index)[0]))
    asked: list[int] = []

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(len(body["token_ids"]))
        if len(asked) > len(replies):
            return web.json_response({"error": {"message": "the script is over"}}, status=400)
        ids = tokenizer.encode(replies[len(asked) - 1] + "<|im_end|>", add_special_tokens=False)
        logprobs = {"content": [{"token": f"token_id:{token}", "logprob": -0.5} for token in ids]}
        choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
        return web.json_response({"request_id": str(len(asked)), "choices": [choice]})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    request = RunRollout(rollout_id="r", task_index=task_index, model="policy", gateway_url=url, timeout_s=timeout_s)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            keep_folders_in(Path(scratch))  # By default they are in the user's cache, named after the rollout.
            async with environment.serving():
                return await environment.run(request)
    finally:
        await runner.cleanup()
