"""Sessions of programs that retry, hang up, rewrite and compact: each token that was sampled for them trains once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import Generate, Sampled
from composer_prime.wire.types import VersionSpan, flags, ints, pack_floats, pack_ints
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import GroupPlan
from orchestrator.rollouts.rollout import Permits, RolloutRunner, compile_rollout, matched_records
from orchestrator.tasks import source_spec
from orchestrator.workers.pool import WorkerPool
from tests.gateway.node_peer import PeerNode
from tests.scripted_node import POLICY, call

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(850)]
SESSIONS = int(os.environ.get("COMPOSER_FUZZED_SESSIONS", "300"))


def configuration() -> Config:
    plugin = "restless_agent"
    source = {"name": "restless", "taskset": {"id": plugin, "num_tasks": SESSIONS}, "harness": {"id": plugin}}
    return Config.model_validate(
        {
            "run": {"name": "restless", "import_from": [str(Path(__file__).with_name("plugins"))]},
            "model": {"path": POLICY, "max_context": 1024},
            "trainer": {"micro_batch_tokens": 1024},
            "orchestrator": {"source": [source], "sampling": {"max_tokens": 256}},
        }
    )


# All answers that the worker took are in the samples, each token once, as many as the node sampled; no session fails.
# The three dialects are drawn alike; a wrong body, a retry or a lost connection harms no later turn.
def test_every_sampled_token_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_GATEWAY_TOKEN", "token-of-this-test")
    tokenizer: Any = AutoTokenizer.from_pretrained(POLICY)

    def answer(request: Generate) -> Sampled:
        digest = hashlib.blake2b(request.prompt_ids + request.request_id.encode(), digest_size=8).digest()
        draw = random.Random(digest)
        words = [
            f"<think>\n{draw.random()}\n</think>\n\n",
            f"It is {draw.random()}.",
            call("look"),
            call("look", a=1, b="x"),
        ]
        text = "".join(word for word in words if draw.random() < 0.5) or "Done."
        ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        return Sampled(
            request_id=request.request_id,
            lease=request.lease,
            token_ids=pack_ints(ids),
            logprobs=pack_floats([-0.5] * len(ids)),
            version_spans=[VersionSpan(0, len(ids), 0)],
            finish_reason="stop",
        )

    async def play_all() -> Counter[str]:
        config, keys = configuration(), RunKeys.create(tmp_path / "keys")
        gateway = Gateway(config, keys, "run", WeightStore(tmp_path / "weights"), model_dir=Path(POLICY))
        pool = WorkerPool(source_spec(config.orchestrator.source[0], config, Path(POLICY)), workers=1, log_dir=tmp_path)
        counts = Counter[str]()
        runner = RolloutRunner(
            config=config.orchestrator, gateway=gateway, pools={"restless": pool}, permits=Permits(16), seed=0
        )

        async def play(index: int) -> None:
            plan = GroupPlan(group=index, source="restless", task_index=index, seed=index, size=1)
            reply, records = await runner.run("restless", runner.training_request(plan, 0, 0), order=index)
            assert reply.failure is None, reply.failure
            samples = compile_rollout(plan, reply, records)
            taken = [record for session in matched_records(reply, records).values() for record in session]
            sampled = Counter(tuple(record.answer.ids.tolist()) for record in taken)
            trained = Counter(tuple(part) for sample in samples for part in turns_of(sample))
            assert trained == sampled, json.dumps([turn.text for turn in reply.turns])
            counts.update(turns=len(taken), tokens=sum(len(each.answer) for each in taken), branches=len(samples))
            counts.update(left_out=len(records) - len(taken))

        try:
            await asyncio.gather(gateway.start(), pool.start())
            async with PeerNode(gateway.node_endpoint, keys.client("node"), "node-0", answer=answer):
                await asyncio.gather(*(play(index) for index in range(SESSIONS)))
        finally:
            await pool.close()
            await gateway.close()
        return counts

    counts = asyncio.run(play_all())
    print(dict(counts))
    assert counts["turns"] > 3 * SESSIONS and counts["branches"] > SESSIONS


def turns_of(sample: Any) -> list[list[int]]:
    """The tokens of each turn of a sample that are trained."""
    ids, mask = ints(sample.input_ids).tolist(), flags(sample.loss_mask).tolist()
    turns = [ids[turn.start : turn.end] for turn in sample.turns]
    assert sum(map(len, turns)) == sum(mask)
    return turns
