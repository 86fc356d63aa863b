"""Coding tasks through the real parts: worker processes, the gateway, an attached node or the local engine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from code_rollouts_made import source
from code_tasks_made import BODY, STUB, make_folder, make_task
from transformers import AutoTokenizer

from composer_prime.cli.served_model import serve_with_workers
from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import FinishedRollout
from orchestrator.rollouts.rollout import RequestFactory
from orchestrator.rollouts.trial import play_episodes
from orchestrator.workers.pool import WorkerPool

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
from node_peer import PeerNode

from composer_prime.wire.node_messages import Generate, Sampled
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from tests.scripted_node import POLICY, call

pytestmark = [pytest.mark.process, pytest.mark.timeout(550)]


def configuration(folder: Path, **taskset: Any) -> Config:
    """A source of coding tasks with one tool: the tiny model has 1,024 tokens of context."""
    settings = {"id": "orchestrator.coding.code", "folder": str(folder), "split": "all", "instruction": ""}
    settings |= {"tools": ["str_replace"], "runtime": {"type": "subprocess"}}
    code = {"name": "code", "taskset": settings | taskset, "timeout_s": 300.0}
    return Config.model_validate(
        {
            "run": {"name": "code-test"},
            "model": {"path": POLICY, "max_context": 1024},
            "orchestrator": {"source": [code], "sampling": {"max_tokens": 200}},
        }
    )


async def played(config: Config, gateway: Gateway, pool: WorkerPool, count: int) -> list[FinishedRollout]:
    requests = RequestFactory(config=config.orchestrator, gateway_url=f"{gateway.http_url}/v1", seed=0)
    return await play_episodes(pool=pool, gateway=gateway, requests=requests, tasks=[0] * count)


def scripted(texts: list[str]) -> tuple[Any, list[int]]:
    """A node's answers, the n-th text for the n-th request, and how many tokens each had."""
    tokenizer: Any = AutoTokenizer.from_pretrained(POLICY)
    waiting, counts = iter(texts), []

    def answer(request: Generate) -> Sampled:
        ids = tokenizer.encode(next(waiting) + "<|im_end|>", add_special_tokens=False)
        counts.append(len(ids))
        return Sampled(
            request_id=request.request_id,
            lease=request.lease,
            token_ids=pack_ints(ids),
            logprobs=pack_floats([-0.5] * len(ids)),
            version_spans=[VersionSpan(0, len(ids), 0)],
            finish_reason="stop",
        )

    return answer, counts


# A policy behind the real gateway solves the task: reward 1, and every sampled token is recorded.
async def test_a_scripted_policy_solves_a_task_through_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "tasks", make_task(prompt="Write demo.numbers.total."))
    monkeypatch.setenv("COMPOSER_GATEWAY_TOKEN", "token-of-this-test")
    config, keys = configuration(folder), RunKeys.create(tmp_path / "keys")
    fix = call("str_replace", path="demo/numbers.py", old_str=STUB, new_str=BODY.rstrip("\n"))
    gateway = Gateway(config, keys, "run", WeightStore(tmp_path / "weights"), model_dir=Path(POLICY))
    spec = msgspec.structs.replace(source(folder), tasksets={"train": dict(config.orchestrator.source[0].taskset)})
    pool = WorkerPool(spec, workers=1, start_timeout_s=300.0, log_dir=tmp_path / "logs")
    await asyncio.gather(gateway.start(), pool.start())
    try:
        answer, counts = scripted([fix, "Done."])
        async with PeerNode(gateway.node_endpoint, keys.client("node"), "node-0", answer=answer) as node:
            (rollout,) = await played(config, gateway, pool, 1)
    finally:
        await pool.close()
        await gateway.close()
    assert rollout.failure is None and rollout.reward == 1.0, rollout.failure
    assert len(node.generates) == 2 and rollout.sampled_tokens == sum(counts)


# The tiny model cannot solve a coding task. Its episodes end as data, with a reward and no failure.
@pytest.mark.slow
async def test_the_tiny_model_plays_through_the_local_engine(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tasks", make_task(prompt="Write demo.numbers.total."))
    config = configuration(folder)
    async with serve_with_workers(config, tmp_path / "run") as (gateway, pools):
        rollouts = await played(config, gateway, pools["code"], 3)
    assert [rollout.failure for rollout in rollouts] == [None] * 3
    assert [rollout.reward for rollout in rollouts] == [0.0] * 3
    assert all(rollout.sampled_tokens for rollout in rollouts)
