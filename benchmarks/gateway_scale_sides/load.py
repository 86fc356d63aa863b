"""Rollouts against a gateway in this process, whose clients and node are processes of peers.py."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._shared import running
from benchmarks.gateway_scale_sides.loop_lag import LoopLag
from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from orchestrator.gateway import Gateway

PEERS = Path(__file__).with_name("peers.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rollouts that run at a time."""

    concurrent: int
    rollouts_per_slot: int = 1
    turns: int
    prompt: int = 200
    """Tokens of a rollout's first prompt."""
    tool: int = 30
    """Tokens that each turn adds after the answer."""
    tool_s: float = 0.0
    """Time between an answer and the next turn."""
    spread_s: float
    """The first rollouts begin evenly over this time; 0 begins all at once."""

    @property
    def turns_in_all(self) -> int:
        return self.concurrent * self.rollouts_per_slot * self.turns


async def play(gateway: Gateway, load: Load) -> None:
    """Play rollouts in a client process that posts token ids, as environment workers do."""
    names = [f"c-{slot}-{number}" for slot in range(load.concurrent) for number in range(load.rollouts_per_slot)]
    for name in names:
        gateway.records.open(name)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(load).items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEERS), "clients", f"--url={gateway.http_url}", *words
    )
    if status := await process.wait():
        raise RuntimeError(f"the client process ended with status {status}")
    recorded = sum(len(gateway.records.take(name)) for name in names)
    if recorded != load.turns_in_all:
        raise RuntimeError(f"{recorded} generations were recorded, {load.turns_in_all} were played")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One load's figures."""

    turns_per_s: float
    cpu_ms: float
    """Of a turn."""
    cpu_share: float
    """Of one core."""
    lag: dict[str, float]
    """Seconds; see LoopLag.window."""


async def measure(gateway: Gateway, load: Load) -> Measured:
    """Measure one load, after the loop has been idle for a moment."""
    await asyncio.sleep(1.0)
    lag = LoopLag(interval_s=0.01)
    measuring = asyncio.create_task(lag.measure())
    cpu_s, wall_s = time.process_time(), time.monotonic()
    await play(gateway, load)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    measuring.cancel()
    turns = load.turns_in_all
    return Measured(turns_per_s=turns / wall_s, cpu_ms=1000 * cpu_s / turns, cpu_share=cpu_s / wall_s, lag=lag.window())


def node_process(gateway: Gateway, keys: RunKeys, role: str, *options: str) -> AbstractContextManager[subprocess.Popen]:
    """Run a role of peers.py at the node port until the block ends."""
    command = [sys.executable, str(PEERS), role, f"--endpoint={gateway.node_endpoint}", *options]
    return running(command, env=os.environ | {"COMPOSER_NODE_TOKEN": keys.client("node").token()})


@asynccontextmanager
async def served_gateway(
    root: Path, concurrent: int, delay_s: float, num_tokens: int, *, max_context: int = 2048
) -> AsyncIterator[Gateway]:
    """Open a gateway for `concurrent` rollouts whose one node answers after `delay_s` with `num_tokens`."""
    (root / "config.json").write_text(json.dumps({"vocab_size": 32_000}))
    keys = RunKeys.create(root / "keys")
    source = {"name": "scale", "taskset": {"id": "none"}, "timeout_s": 600.0}
    config = Config.model_validate(
        {
            "run": {"name": "gateway-scale"},
            "model": {"path": str(root), "max_context": max_context},
            "trainer": {"micro_batch_tokens": max(4096, max_context)},
            "orchestrator": {"source": [source], "max_concurrent": concurrent},
        }
    )
    gateway = Gateway(config, keys, "scale", WeightStore(root / "w"), model_dir=root)
    await gateway.start()
    reply = map(str, range(5, 5 + num_tokens))
    try:
        with node_process(gateway, keys, "node", f"--delay-s={delay_s}", "--reply", *reply):
            async with asyncio.timeout(60):
                while not gateway.router.serving():
                    await asyncio.sleep(0.1)
            yield gateway
    finally:
        await gateway.close()
