"""Measure what a turn costs the gateway: by the prompt's length, with many open rollouts.

    clients (own process) --HTTP--> gateway (this process) --CURVE ZMQ--> node (own process, answers at once)

    python -m benchmarks.gateway_scale
    python -m benchmarks.gateway_scale --parts turns --repeats 5
    python -m benchmarks.gateway_scale --parts open --open-rollouts 10000

turns     CPU of the gateway's process a turn, its threads included, with prompts of 205, 4k and 32k tokens, and over a
          conversation of 100 turns. The median run counts. A tool takes .1 s and rollouts begin evenly over that time,
          so that short and long prompts come at one rate, one by one: the more turns the gateway handles at a wake-up,
          the less each costs. What it takes without any request is measured before and left out.
flood     turns per second with and without a second node that floods the link, and the growth of resident memory.
open      lag of the router's event loop with that many rollouts open, each with a request at the node or on its way.

The exit status is 1 when a turn costs more than 4 times as much at 32k as at 205, when a flood costs more than 15 % of
the turns per second or more than 32 MiB, or when the lag's 99th percentile reaches 50 ms. On a busy machine the loop is
also late because others hold the CPU: `own` is what the gateway's work explains of the lag.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks._shared import conclude
from benchmarks.gateway_scale_sides.load import Load, measure, node_process, play, served_gateway
from composer_prime.run.keys import RunKeys

FLAT_TARGET, LAG_TARGET_S = 4.0, 0.05
FLOOD_TARGET, GROWTH_TARGET_MIB = 0.85, 32
_NUM_TOKENS = 16
"""Tokens of each answer in the part turns."""
_TOOL_S = 0.1
"""Time of a tool in the part turns."""


CASES = {
    "205": Load(prompt=205, tool=16, turns=10, concurrent=8, rollouts_per_slot=5, spread_s=_TOOL_S, tool_s=_TOOL_S),
    "4k": Load(prompt=4096, tool=16, turns=10, concurrent=8, rollouts_per_slot=5, spread_s=_TOOL_S, tool_s=_TOOL_S),
    "32k": Load(prompt=32_768, tool=16, turns=10, concurrent=8, rollouts_per_slot=5, spread_s=_TOOL_S, tool_s=_TOOL_S),
    "100 turns": Load(prompt=205, tool=300, turns=100, concurrent=8, spread_s=_TOOL_S, tool_s=_TOOL_S),
}

SHORT_CASES = {name: replace(load, turns=2, rollouts_per_slot=1) for name, load in CASES.items()}


async def measure_turns(repeats: int, cases: dict[str, Load]) -> dict[str, float]:
    """Return milliseconds of CPU a turn, by case."""
    print(f"turns: CPU of the gateway's process a turn, median of {repeats} runs; answers of {_NUM_TOKENS} tokens")
    runs: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        async with served_gateway(Path(folder), 64, 0.0, _NUM_TOKENS, max_context=65_536) as gateway:
            idle_share = await _idle_share()
            # By turns, so that a phase in which the machine is busy meets every case.
            for _, (name, load) in itertools.product(range(repeats), cases.items()):
                requests, cpu_s, wall_s = load.turns_in_all, time.process_time(), time.monotonic()
                await play(gateway, load)
                cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
                runs[name].append(1000 * (cpu_s - idle_share * wall_s) / requests)
    figures = {name: statistics.median(found) for name, found in runs.items()}
    for name, cpu_ms in figures.items():
        print(f"{name:10s} {cpu_ms:9.2f} ms")
    return figures


async def _idle_share() -> float:
    """Return how much of a core the gateway takes without any request: heartbeats, the tick, the lag's timer."""
    cpu_s, wall_s = time.process_time(), time.monotonic()
    await asyncio.sleep(3.0)
    share = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
    print(f"the idle gateway takes {share:.2%} of a core, which no turn counts")
    return share


async def measure_flood() -> dict[str, float]:
    """Return turns per second with and without a node that floods, and how the resident memory grew, in MiB."""
    print("flood: one node answers after 50 ms; a second one sends heartbeats as fast as the gateway takes them")
    load = Load(concurrent=32, rollouts_per_slot=2, turns=10, spread_s=0.0)
    with tempfile.TemporaryDirectory() as folder:
        async with served_gateway(Path(folder), 64, 0.05, _NUM_TOKENS) as gateway:
            calm = await measure(gateway, load)
            before = psutil.Process().memory_info().rss
            with node_process(gateway, RunKeys(Path(folder) / "keys"), "flood"):
                while not gateway.link.conduct.ignored:
                    await asyncio.sleep(0.01)
                flooded = await measure(gateway, load)
                ignored = gateway.link.conduct.garbage
            grown = (psutil.Process().memory_info().rss - before) / (1 << 20)
    print(f"calm {calm.turns_per_s:.0f} turns/s, {calm.cpu_ms:.2f} ms each; flooded "
          f"{flooded.turns_per_s:.0f} turns/s, {flooded.cpu_ms:.2f} ms each; {ignored} messages of the "
          f"cut-off node ignored; resident memory {grown:+.1f} MiB")  # fmt: skip
    return {"calm": calm.turns_per_s, "flooded": flooded.turns_per_s, "grown_mib": grown}


async def measure_open(num_open: int, delay_s: float, turns: int) -> dict[str, float]:
    print(f"open: {num_open} rollouts of {turns} turns, the node answers after {delay_s:g} s")
    with tempfile.TemporaryDirectory() as folder:
        async with served_gateway(Path(folder), num_open, delay_s, 64) as gateway:
            load = Load(concurrent=num_open, turns=turns, spread_s=delay_s)
            result = await measure(gateway, load)
    lag = {name: 1000 * result.lag[name] for name in ("p50_s", "p99_s", "own_p99_s", "max_s", "own_max_s")}
    print(f"{result.turns_per_s:.0f} turns/s, {result.cpu_ms:.2f} ms a turn, {result.cpu_share:.0%} of a core")
    print(
        f"lag p50 {lag['p50_s']:.1f} ms, p99 {lag['p99_s']:.1f} ms (own {lag['own_p99_s']:.1f} ms), "
        f"most {lag['max_s']:.0f} ms (own {lag['own_max_s']:.0f} ms)"
    )
    return {"lag_p99_s": result.lag["p99_s"], "own_lag_p99_s": result.lag["own_p99_s"], "cpu_ms": result.cpu_ms}


def verdicts(figures: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return each question with its answer, in words, and whether the answer is good."""
    answers = []
    if turns := figures.get("turns"):
        flat = turns["32k"] / turns["205"]
        answers.append((f"32k over 205: {flat:.2f}, at most {FLAT_TARGET}", flat <= FLAT_TARGET))
    if flood := figures.get("flood"):
        share, grown = flood["flooded"] / flood["calm"], flood["grown_mib"]
        text = f"flooded over calm: {share:.0%} of the turns a second, at least {FLOOD_TARGET:.0%}"
        answers.append((text, share >= FLOOD_TARGET))
        answers.append((f"resident memory grew by {grown:.1f} MiB, at most {GROWTH_TARGET_MIB}",
                        grown <= GROWTH_TARGET_MIB))  # fmt: skip
    if lag := figures.get("open"):
        text = f"lag p99 {1000 * lag['lag_p99_s']:.1f} ms, below {1000 * LAG_TARGET_S:.0f}"
        answers.append((f"{text} (own work {1000 * lag['own_lag_p99_s']:.1f} ms)", lag["lag_p99_s"] < LAG_TARGET_S))
    return answers


async def run(args: argparse.Namespace) -> dict[str, Any]:
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    figures: dict[str, Any] = {}
    gc.collect()
    gc.freeze()  # As the orchestrator does.
    if "turns" in args.parts:
        figures["turns"] = await measure_turns(args.repeats, SHORT_CASES if args.quick else CASES)
    if "flood" in args.parts:
        figures["flood"] = await measure_flood()
    if "open" in args.parts:
        figures["open"] = await measure_open(args.open_rollouts, args.delay_s, args.turns)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = ("turns", "flood", "open")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case and form")
    parser.add_argument("--open-rollouts", type=int, default=10_000)
    parser.add_argument("--delay-s", type=float, default=30.0, help="in the part open the node answers after this long")
    parser.add_argument("--turns", type=int, default=3, help="turns of each rollout in the part open")
    parser.add_argument("--quick", action="store_true", help="few rollouts: whether it works")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.open_rollouts, args.delay_s = 1, 64, 1.0
    figures = asyncio.run(run(args))
    return conclude(verdicts(figures), is_quick=args.quick)


if __name__ == "__main__":
    sys.exit(main())
