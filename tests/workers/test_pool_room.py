"""Rollouts that wait for a worker with room."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from composer_prime.errors import DeadlineError
from orchestrator.workers.players import RolloutPlayer
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import RolloutReply, RunRollout, SourceSpec, WorkerReady

READY = WorkerReady(num_tasks={"train": 8}, digests={"train": "aa"})


def rollout(rollout_id: str) -> RunRollout:
    return RunRollout(rollout_id=rollout_id, task_index=0, model="policy", gateway_url="", timeout_s=100)


class Player(RolloutPlayer):
    """Workers elsewhere that say what the test says."""

    def __init__(self, *, has_room: bool) -> None:
        super().__init__("far")
        self._has_room = has_room
        self.asked = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self._has_room

    def send(self, message: msgspec.Struct) -> None:
        self.asked.set()


async def test_a_rollout_that_waited_for_room_outlives_a_gap_without_hosts() -> None:
    """start_timeout_s counts from when no worker is left, not from when the rollout began to wait."""
    spec = SourceSpec(name="s", tasksets={}, harness={}, model_path="m")
    pool = WorkerPool(spec, workers=0, start_timeout_s=1.5)
    full, free = Player(has_room=False), Player(has_room=True)
    pool.attach(full, READY)
    call = asyncio.create_task(pool.run(rollout("r")))
    await asyncio.sleep(1.6)
    full.end("power")
    await asyncio.sleep(0.2)
    pool.attach(free, READY)
    await asyncio.wait_for(free.asked.wait(), 100)
    free.answer(RolloutReply(rollout_id="r", task_id="t", reward=1.0))
    assert (await call).reward == 1.0
    free.end("power")
    with pytest.raises(DeadlineError, match=r"'s': no environment worker was ready within 1.5 s"):
        await pool.run(rollout("again"))
