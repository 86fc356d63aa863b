"""Honest nodes in one process: python -m benchmarks.fleet_hostile_sides.honest STATE_FOLDER COUNT, in $COMPOSER_INVITE.

They share one engine, and an answer takes ANSWER_S however fast that is.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_prime.config.inference import InferenceConfig
from composer_prime.model_source import resolve_model
from composer_prime.wire.enrollment import INVITE_VARIABLE, Invite
from composer_prime.wire.node_messages import Answer, Sampling, Status
from inference.engines.local.local_engine import LocalEngine
from inference.enrolling import NodeState, enroll
from inference.node import GatewayLink, InferenceNode
from inference.receiver import Receiver

PLACES, ANSWER_S = 8, 4.0
MACHINE = "no GPU, 2 cores"


@dataclass(slots=True)
class PacedEngine:
    """One node's view of the engine."""

    shared: LocalEngine
    running: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shared, name)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: Sampling, session: str) -> Answer:
        start = time.monotonic()
        self.running += 1
        try:
            done = await self.shared.generate(request_id, prompt_ids, sampling, session)
            await asyncio.sleep(start + ANSWER_S - time.monotonic())
        finally:
            self.running -= 1
        return done

    def stats(self) -> Status:
        return Status(version=0, running=self.running, waiting=0, kv_used=0.1, tokens_per_s=float(self.running))


async def serve(invite: Invite, root: Path, count: int) -> None:
    model = resolve_model("tiny")
    nodes = []
    for slot in range(count):
        state = NodeState(root, invite, slot)
        address, answer = await enroll(state, f"honest-{slot}", MACHINE, 60.0)
        if not nodes:
            settings = {"device": "cpu", "dtype": "float32", "threads": 1, "max_concurrent": PLACES}
            config = InferenceConfig.model_validate(settings | {"local": {"max_batch": count * PLACES}})
            shared = LocalEngine(model, config, answer.max_context)
            await shared.start()
        link = GatewayLink(lambda to=address: f"tcp://{to}", state.keys(), 10.0)
        engine: Any = PacedEngine(shared)
        receiver = Receiver(engine, link, model, config.canary_limit(on_cuda=False))
        node = InferenceNode(answer.node_id, engine, link, receiver, config, max_context=answer.max_context)
        nodes.append(node.run())
    await asyncio.gather(*nodes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(Invite.read(os.environ[INVITE_VARIABLE]), Path(sys.argv[1]), int(sys.argv[2])))
