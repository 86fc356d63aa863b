"""Measure the gateway's event loop as rollouts multiply (orchestrator_whole.py measures the whole process).

    clients (own process) --HTTP--> gateway (this process) --CURVE ZMQ--> node (own process, a fixed delay)

    python benchmarks/orchestrator_scale.py
    python benchmarks/orchestrator_scale.py --levels 64 256 1024 --delay-s 2 --turns 3 --out scale.json

At each level that many rollouts run at a time, all in one run of the gateway. The benchmark prints the gateway
process's CPU per rollout and per request, the event loop's lag (and how much of it is own work; the rest is other
processes on the machine), and what the gateway adds to the node's delay. Two verdicts follow: the 99th percentile of
the lag against its target, and how flat CPU per rollout is (last level over first; 1 is flat). A missed target is a
result, not an error: the exit status is 0 either way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from orchestrator.event_loop import LoopLag
from orchestrator.gateway import Gateway

LAG_TARGET_S = 0.05
PEERS = Path(__file__).with_name("scale_peers.py")
_VOCAB = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The rollouts of one level."""

    concurrent: int
    """Rollouts at a time."""
    rollouts_per_slot: int
    turns: int
    spread_s: float
    """The first rollouts begin evenly over this time; 0 begins all at once."""

    @property
    def rollouts(self) -> int:
        return self.concurrent * self.rollouts_per_slot


class HttpDriver:
    """Rollouts in client processes that post token ids, as environment workers do."""

    def __init__(self, processes: int, *client_options: str) -> None:
        """`client_options`: of scale_peers.py's clients, besides those that a load sets."""
        self.name = f"http clients in {processes} process(es)"
        self._processes = processes
        self._client_options = client_options

    async def play(self, gateway: Gateway, load: Load) -> list[float]:
        for slot in range(load.concurrent):
            for number in range(load.rollouts_per_slot):
                gateway.records.open(f"c{slot % self._processes}-{slot // self._processes}-{number}")
        share = -(-load.concurrent // self._processes)
        shares = [min(share, load.concurrent - share * i) for i in range(self._processes)]
        outputs = await asyncio.gather(*(self._client(gateway, load, slots, i) for i, slots in enumerate(shares)))
        num_records = 0
        for slot in range(load.concurrent):
            for number in range(load.rollouts_per_slot):
                num_records += len(
                    gateway.records.take(f"c{slot % self._processes}-{slot // self._processes}-{number}")
                )
        if num_records != load.rollouts * load.turns:
            raise RuntimeError(f"{num_records} generations were recorded, {load.rollouts * load.turns} were played")
        return [latency for output in outputs for latency in output["latencies_s"]]

    async def _client(self, gateway: Gateway, load: Load, slots: int, index: int) -> dict[str, Any]:
        numbers = {"slots": slots, "rollouts": load.rollouts_per_slot, "turns": load.turns, "spread-s": load.spread_s}
        arguments = [f"--{name}={value}" for name, value in numbers.items()]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(PEERS), "clients", f"--url={gateway.http_url}", f"--name=c{index}", *arguments,
            *self._client_options,
            stdout=subprocess.PIPE, env=_environment(),
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"client process {index} ended with status {process.returncode}")
        return json.loads(output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One level's figures; times in seconds."""

    concurrent: int
    rollouts: int
    requests: int
    wall_s: float
    requests_per_s: float
    cpu_ms_per_rollout: float
    cpu_ms_per_request: float
    cpu_share: float
    """Of one core."""
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    own_lag_p99_s: float
    """The part of the lag that the gateway's own work explains; the rest is other processes having the CPU."""
    own_lag_max_s: float
    added_p50_s: float
    """Latency beyond the node's fixed delay."""
    added_p99_s: float


async def measure(gateway: Gateway, driver: HttpDriver, load: Load, delay_s: float) -> Result:
    """One level, after the loop has been idle for a moment."""
    await asyncio.sleep(1.0)
    lag = LoopLag(interval_s=0.01)
    lag.start()
    cpu, wall = time.process_time(), time.monotonic()
    latencies = np.array(await driver.play(gateway, load))
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    lag.stop()
    lags = lag.window()
    added = np.percentile(latencies - delay_s, [50, 99])
    return Result(
        concurrent=load.concurrent,
        rollouts=load.rollouts,
        requests=len(latencies),
        wall_s=wall,
        requests_per_s=len(latencies) / wall,
        cpu_ms_per_rollout=1000 * cpu / load.rollouts,
        cpu_ms_per_request=1000 * cpu / len(latencies),
        cpu_share=cpu / wall,
        lag_p50_s=lags["p50_s"],
        lag_p99_s=lags["p99_s"],
        lag_max_s=lags["max_s"],
        own_lag_p99_s=lags["own_p99_s"],
        own_lag_max_s=lags["own_max_s"],
        added_p50_s=float(added[0]),
        added_p99_s=float(added[1]),
    )


@contextmanager
def fixed_delay_node(gateway: Gateway, keys: RunKeys, delay_s: float, num_tokens: int):
    """A node process that is gone afterwards."""
    with node_process(gateway, keys, "node", f"--delay-s={delay_s}", "--reply", *map(str, range(5, 5 + num_tokens))):
        yield


@contextmanager
def node_process(gateway: Gateway, keys: RunKeys, role: str, *options: str):
    """A process of scale_peers.py at the node port, which is gone afterwards."""
    command = [sys.executable, str(PEERS), role, f"--endpoint={gateway.node_endpoint}", *options]
    environment = _environment() | {"COMPOSER_NODE_TOKEN": keys.client("node").token()}
    process = subprocess.Popen(command, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def _environment() -> dict[str, str]:
    root = str(PEERS.parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def scale_config(model_dir: Path, concurrent: int, max_context: int) -> Config:
    """Return the configuration of a gateway for `concurrent` rollouts."""
    source = {"name": "scale", "taskset": {"id": "none"}, "timeout_s": 600.0}
    return Config.model_validate(
        {
            "run": {"name": "orchestrator-scale"},
            "model": {"path": str(model_dir), "max_context": max_context},
            "trainer": {"micro_batch_tokens": max(4096, max_context)},
            "orchestrator": {"source": [source], "max_concurrent": concurrent},
        }
    )


async def run(args: argparse.Namespace) -> list[Result]:
    driver = HttpDriver(args.client_processes)
    print(f"driver: {driver.name}; node delay {args.delay_s} s, {args.turns} turns, {args.num_tokens} tokens a turn")
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores\n")
    print(
        "rollouts  requests/s  CPU/rollout  CPU/request  core used   lag p50   lag p99   lag max"
        "   own p99   own max  added p50  added p99"
    )
    results = []
    with tempfile.TemporaryDirectory() as folder:
        async with served_gateway(Path(folder), max(args.levels), args.delay_s, args.num_tokens) as gateway:
            for concurrent in args.levels:
                spread_s = 0.0 if args.burst else args.delay_s
                load = Load(concurrent=concurrent, rollouts_per_slot=args.rollouts_per_slot, turns=args.turns,
                            spread_s=spread_s)  # fmt: skip
                results.append(await measure(gateway, driver, load, args.delay_s))
                print(_row(results[-1]), flush=True)
    return results


@asynccontextmanager
async def served_gateway(
    root: Path, concurrent: int, delay_s: float, num_tokens: int, *, max_context: int = 2048
) -> AsyncIterator[Gateway]:
    """A gateway for `concurrent` rollouts whose one node answers after `delay_s` with `num_tokens`."""
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps({"vocab_size": _VOCAB}))
    keys = RunKeys.create(root / "keys")
    config, store = scale_config(root, concurrent, max_context), WeightStore(root / "w")
    gateway = Gateway(config, keys, "scale", store, model_dir=root)
    await gateway.start()
    try:
        with fixed_delay_node(gateway, keys, delay_s, num_tokens):
            async with asyncio.timeout(60):
                while not gateway.router.serving():
                    await asyncio.sleep(0.1)
            yield gateway
    finally:
        await gateway.close()


def _row(r: Result) -> str:
    ms = 1000.0
    return (
        f"{r.concurrent:8d}  {r.requests_per_s:10.0f}  {r.cpu_ms_per_rollout:8.2f} ms  {r.cpu_ms_per_request:8.2f} ms"
        f"  {r.cpu_share:8.0%}  {r.lag_p50_s * ms:5.1f} ms  {r.lag_p99_s * ms:5.1f} ms  {r.lag_max_s * ms:5.0f} ms"
        f"  {r.own_lag_p99_s * ms:5.1f} ms  {r.own_lag_max_s * ms:5.1f} ms"
        f"  {r.added_p50_s * ms:6.1f} ms  {r.added_p99_s * ms:6.1f} ms"
    )


def verdict(results: list[Result]) -> dict[str, Any]:
    """The two questions, answered."""
    worst = max(result.lag_p99_s for result in results)
    flat = results[-1].cpu_ms_per_rollout / results[0].cpu_ms_per_rollout
    return {
        "lag_p99_s": worst,
        "lag_target_s": LAG_TARGET_S,
        "lag_met": worst < LAG_TARGET_S,
        "own_lag_p99_s": max(result.own_lag_p99_s for result in results),
        "cpu_flatness": flat,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--levels", type=int, nargs="+", default=[64, 256, 1024], help="concurrent rollouts")
    parser.add_argument("--delay-s", type=float, default=2.0, help="the node answers after this long")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rollouts-per-slot", type=int, default=2)
    parser.add_argument("--client-processes", type=int, default=1)
    parser.add_argument("--burst", action="store_true", help="begin all rollouts of a level in the same instant")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    results = asyncio.run(run(args))
    answers = verdict(results)
    met = "met" if answers["lag_met"] else "MISSED"
    worst = f"{answers['lag_p99_s'] * 1000:.1f} ms at worst ({answers['own_lag_p99_s'] * 1000:.1f} ms of own work)"
    print(f"\nevent-loop lag p99: {worst}, target {LAG_TARGET_S * 1000:.0f} ms: {met}")
    print(f"CPU per rollout, last level over first: {answers['cpu_flatness']:.2f} (1 is flat)")
    if args.out:
        args.out.write_text(json.dumps({"results": [asdict(r) for r in results], **answers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
