"""mini-swe-agent in a sandbox: its program drives the policy, and what trains are the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from code_tasks_made import STUB, make_folder
from transformers import AutoTokenizer

from composer_prime.config import Config
from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import Generate, Sampled
from composer_prime.wire.types import Sample, VersionSpan, flags, floats, ints, pack_floats, pack_ints
from orchestrator.coding.sandbox.box import open_box
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import GroupPlan
from orchestrator.rollouts.rollout import Permits, RolloutRunner, compile_rollout
from orchestrator.tasks import source_spec
from orchestrator.workers.pool import RolloutReply, WorkerPool
from tests.gateway.node_peer import PeerNode
from tests.scripted_node import POLICY, call

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
"""litellm has its prices in the package, and a full context is no reason to ask ten times."""
CONTEXT = 4096
"""Its system prompt and format errors are long. The tiny model has 1,024 places; here it gets more, untrained ones."""


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    """Skip where the program or bubblewrap is missing. The first use copies and compiles the program's packages."""
    runtime = RuntimeConfig(type="bubblewrap", packages=["mini-swe-agent"])

    async def open_and_close() -> None:
        await (await open_box(runtime)).close()

    try:
        asyncio.run(open_and_close())
    except SandboxError as error:
        pytest.skip(f"needs the extra mini-swe-agent and bubblewrap: {error}")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "model"
    shutil.copytree(POLICY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    yield folder


def configuration(model: Path, tasks: Path) -> Config:
    """The recipe of the documentation: the program's packages are for its own sandbox only, not for grading."""
    taskset = {"id": "orchestrator.coding.code", "folder": str(tasks), "split": "all", "instruction": ""}
    source = {
        "name": "code",
        "taskset": {**taskset, "runtime": {"type": "bubblewrap"}},
        "harness": {"id": "mini_swe_agent", "env": PROGRAM_ENV},
        "runtime": {"type": "bubblewrap", "packages": ["mini-swe-agent"], "limits": {"memory_gb": 4.0}},
        "timeout_s": 500.0,
    }
    return Config.model_validate(
        {
            "run": {"name": "program"},
            "model": {"path": str(model), "max_context": CONTEXT},
            "trainer": {"micro_batch_tokens": CONTEXT},
            "orchestrator": {"source": [source], "sampling": {"max_tokens": 160}},
        }
    )


async def play(config: Config, gateway: Gateway, pool: WorkerPool) -> tuple[RolloutReply, list[Sample]]:
    """One rollout as a run plays it, and the samples that a trainer would get."""
    runner = RolloutRunner(
        config=config.orchestrator, gateway=gateway, pools={"code": pool}, permits=Permits(1), seed=0
    )
    plan = GroupPlan(group=0, source="code", task_index=0, seed=0, size=1)
    reply, records = await runner.run("code", runner.training_request(plan, 0, 0), order=0)
    return reply, compile_rollout(plan, reply, records)


# The program reads, edits and submits, and the task is solved. Each prompt extends the tokens before it, so all turns
# are one sample. Its tokens are those that the node saw, and those that it sampled are trained, with their logprobs.
async def test_its_tokens_are_those_that_the_node_sampled(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_GATEWAY_TOKEN", "token-of-this-test")
    edit = f"sed -i 's/{STUB}/    return sum(values)/' demo/numbers.py"
    commands = ["cat demo/numbers.py", edit, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    tokenizer: Any = AutoTokenizer.from_pretrained(POLICY)
    answers: list[list[int]] = []

    def answer(request: Generate) -> Sampled:
        text = call("bash", command=commands[len(answers)]) + "<|im_end|>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        answers.append(ids)
        return Sampled(
            request_id=request.request_id,
            lease=request.lease,
            token_ids=pack_ints(ids),
            logprobs=pack_floats([-0.01 * place for place in range(len(ids))]),
            version_spans=[VersionSpan(0, len(ids), 0)],
            finish_reason="stop",
        )

    config, keys = configuration(model, make_folder(tmp_path / "tasks")), RunKeys.create(tmp_path / "keys")
    gateway = Gateway(config, keys, "run", WeightStore(tmp_path / "weights"), model_dir=model)
    spec = source_spec(config.orchestrator.source[0], config, model)
    pool = WorkerPool(spec, workers=1, start_timeout_s=300.0, log_dir=tmp_path / "logs")
    await asyncio.gather(gateway.start(), pool.start())
    try:
        async with PeerNode(gateway.node_endpoint, keys.client("node"), "node-0", answer=answer) as node:
            reply, samples = await play(config, gateway, pool)
    finally:
        await pool.close()
        await gateway.close()

    assert reply.failure is None and reply.reward == 1.0, reply
    prompts = [ints(request.prompt_ids).tolist() for request in node.generates]
    assert len(prompts) == 3 and len(samples) == 1
    seen = prompts[-1] + answers[-1]
    assert ints(samples[0].input_ids).tolist() == seen
    mask, logprobs = np.zeros(len(seen), bool), np.zeros(len(seen), np.float32)
    for prompt, ids in zip(prompts, answers, strict=True):
        assert seen[: len(prompt) + len(ids)] == prompt + ids
        mask[len(prompt) : len(prompt) + len(ids)] = True
        logprobs[len(prompt) : len(prompt) + len(ids)] = -0.01 * np.arange(len(ids))
    assert np.array_equal(flags(samples[0].loss_mask), mask)
    assert np.array_equal(floats(samples[0].logprobs), logprobs)
