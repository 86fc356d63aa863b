"""Measure what a turn costs the gateway: by the prompt's length, by the number of nodes, with many open rollouts.

    clients (own process) --HTTP--> gateway (this process) --CURVE ZMQ--> node (own process, answers at once)

    python -m benchmarks.gateway_scale
    python -m benchmarks.gateway_scale --parts turns --repeats 5
    python -m benchmarks.gateway_scale --parts open --open-rollouts 10000 --out open.json

turns     CPU of the gateway's process a turn, its threads included, with prompts of 205, 4k and 32k tokens, and over a
          conversation of 100 turns. The median run counts. A tool takes .1 s and rollouts begin evenly over that time,
          so that short and long prompts come at one rate, one by one: the more turns the gateway handles at a wake-up,
          the less each costs. What it takes without any request is measured before and left out.
placing   CPU from a request's arrival at the router to its answer, with 1, 64 and 256 nodes and no network.
flood     turns per second with and without a second node that floods the link, and the growth of resident memory.
open      lag of the router's event loop with that many rollouts open, each with a request at the node or on its way:
          as it is, and with everything that existed at the start exempted from garbage collections, as the
          orchestrator does.

The exit status is 1 when a turn costs more than 4 times as much at 32k as at 205, when placing takes more than 2 ms
with the most nodes, when a flood costs more than 15 % of the turns per second or more than 32 MiB, or when the lag's
99th percentile reaches 50 ms. On a busy machine the loop is also late because others hold the CPU: `own` is what the
gateway's work explains of the lag.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._verdicts import conclude
from benchmarks.gateway_scale_sides.load import Load, measure, node_process, play, served_gateway
from composer_prime.run.keys import RunKeys
from composer_prime.wire.node_messages import Generate, NodeHello, Sampled, Sampling, ToNode
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from orchestrator.event_loop import freeze_startup
from orchestrator.gateway.nodes import AttachedNode, ServedPolicy
from orchestrator.gateway.routing import Router

FLAT_TARGET, PLACING_TARGET_US, LAG_TARGET_S = 4.0, 2000.0, 0.05
FLOOD_TARGET, GROWTH_TARGET_MIB = 0.85, 32
OPEN_STATES = {"as it is": False, "frozen": True}
"""Whether what exists at the start is exempted from garbage collections."""
_NUM_TOKENS = 16
"""Tokens of each answer in the parts turns and placing."""
_PLACED_AT_ONCE = 64
_TOOL_S = 0.1
"""Time of a tool in the part turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Conversations of one kind."""

    name: str
    prompt: int
    """Tokens of the first prompt."""
    tool: int
    """Tokens that each turn adds after the answer."""
    turns: int
    concurrent: int
    rollouts_per_slot: int


CASES = (
    Case(name="205", prompt=205, tool=16, turns=10, concurrent=8, rollouts_per_slot=5),
    Case(name="4k", prompt=4096, tool=16, turns=10, concurrent=8, rollouts_per_slot=5),
    Case(name="32k", prompt=32_768, tool=16, turns=10, concurrent=8, rollouts_per_slot=5),
    Case(name="100 turns", prompt=205, tool=300, turns=100, concurrent=8, rollouts_per_slot=1),
)

SHORT_CASES = [replace(case, turns=2, rollouts_per_slot=1) for case in CASES]


async def measure_turns(repeats: int, cases: Sequence[Case]) -> dict[str, float]:
    """Return milliseconds of CPU a turn, by case."""
    print(f"turns: CPU of the gateway's process a turn, median of {repeats} runs; answers of {_NUM_TOKENS} tokens")
    runs: dict[str, list[float]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        async with served_gateway(Path(folder), 64, 0.0, _NUM_TOKENS, max_context=65_536) as gateway:
            idle_share = await _idle_share()
            # By turns, so that a phase in which the machine is busy meets every case.
            for _, case in itertools.product(range(repeats), cases):
                load = _load(case)
                requests, cpu_s, wall_s = load.turns_in_all, time.process_time(), time.monotonic()
                await play(gateway, load, *_words(case))
                cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
                runs[case.name].append(1000 * (cpu_s - idle_share * wall_s) / requests)
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


def _words(case: Case) -> list[str]:
    return [f"--prompt={case.prompt}", f"--tool={case.tool}", f"--tool-s={_TOOL_S}"]


def _load(case: Case) -> Load:
    return Load(
        concurrent=case.concurrent, rollouts_per_slot=case.rollouts_per_slot, turns=case.turns, spread_s=_TOOL_S
    )


async def measure_placing(levels: list[int], requests: int) -> dict[int, float]:
    """Return microseconds of CPU a request, by number of nodes."""
    print(f"placing: CPU from a request's arrival at the router to its answer, {_PLACED_AT_ONCE} requests at a time")
    figures = {}
    for num_nodes in levels:
        figures[num_nodes] = await _place(num_nodes, requests)
        print(f"{num_nodes:6d} nodes {figures[num_nodes]:8.0f} us", flush=True)
    return figures


async def _place(num_nodes: int, requests: int) -> float:
    placed: list[tuple[AttachedNode, Generate]] = []

    def send(identity: bytes, message: ToNode) -> bool:
        if isinstance(message, Generate):
            placed.append((attached[identity], message))
        return True

    attached: dict[bytes, AttachedNode] = {}
    router = Router(send, policy=ServedPolicy(32_000), suspend_s=1.0, request_timeout_s=60.0)
    for index in range(num_nodes):
        hello = NodeHello(node_id=f"n{index}", engine="none", run_id=None, version=0, max_concurrent=128,
                          instance=f"n{index}")  # fmt: skip
        attached[hello.node_id.encode()] = router.attach(hello.node_id.encode(), hello)
    prompt, sampling = pack_ints(range(205)), Sampling(max_tokens=256)
    ids, logprobs = pack_ints(range(_NUM_TOKENS)), pack_floats([-0.5] * _NUM_TOKENS)
    done, cpu = 0, 0.0
    while done < requests:
        started = time.process_time()
        calls = [
            asyncio.ensure_future(router.generate(f"g{number}", f"s{number % 512}", prompt, sampling))
            for number in range(done, done + _PLACED_AT_ONCE)
        ]
        await asyncio.sleep(0)
        for node, message in placed:
            answer = Sampled(request_id=message.request_id, lease=message.lease, token_ids=ids, logprobs=logprobs,
                               version_spans=[VersionSpan(0, _NUM_TOKENS, 0)], finish_reason="stop")  # fmt: skip
            router.on_sampled(node, answer)
        await asyncio.gather(*calls)
        cpu += time.process_time() - started
        placed.clear()
        done += _PLACED_AT_ONCE
    return 1e6 * cpu / done


async def measure_flood() -> dict[str, float]:
    """Return turns per second with and without a node that floods, and how the resident memory grew, in MiB."""
    print("flood: one node answers after 50 ms; a second one sends heartbeats as fast as the gateway takes them")
    load = Load(concurrent=32, rollouts_per_slot=2, turns=10, spread_s=0.0)
    with tempfile.TemporaryDirectory() as folder:
        async with served_gateway(Path(folder), 64, 0.05, _NUM_TOKENS) as gateway:
            calm = await measure(gateway, load)
            before = _resident_mib()
            with node_process(gateway, RunKeys(Path(folder) / "keys"), "flood"):
                while not gateway.link.conduct.ignored:
                    await asyncio.sleep(0.01)
                flooded = await measure(gateway, load)
                ignored = gateway.link.conduct.garbage
            grown = _resident_mib() - before
    print(f"calm {calm.turns_per_s:.0f} turns/s, {calm.cpu_ms:.2f} ms each; flooded "
          f"{flooded.turns_per_s:.0f} turns/s, {flooded.cpu_ms:.2f} ms each; {ignored} messages of the "
          f"cut-off node ignored; resident memory {grown:+.1f} MiB")  # fmt: skip
    return {"calm": calm.turns_per_s, "flooded": flooded.turns_per_s, "grown_mib": grown}


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def measure_open(num_open: int, delay_s: float, turns: int) -> dict[str, dict[str, float]]:
    """Return the lag in each of OPEN_STATES."""
    print(f"open: {num_open} rollouts of {turns} turns, the node answers after {delay_s:g} s")
    figures = {}
    for state, is_frozen in OPEN_STATES.items():
        gc.unfreeze()
        if is_frozen:
            freeze_startup()
        with longest_collection() as pause:
            figures[state] = await _open(num_open, delay_s, turns)
        figures[state]["collection_s"] = pause["s"]
        print(f"{state}: the longest of {pause['count']:.0f} full garbage collections took {1000 * pause['s']:.0f} ms "
              "of CPU", flush=True)  # fmt: skip
    gc.unfreeze()
    return figures


@contextmanager
def longest_collection() -> Iterator[dict[str, float]]:
    """Yield the number of full garbage collections, and the CPU seconds that the longest took, so far."""
    longest, since = {"s": 0.0, "count": 0.0}, [0.0]

    def note(phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            since[0] = time.thread_time()
        else:
            longest["s"] = max(longest["s"], time.thread_time() - since[0])
            longest["count"] += 1

    gc.callbacks.append(note)
    try:
        yield longest
    finally:
        gc.callbacks.remove(note)


async def _open(num_open: int, delay_s: float, turns: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        async with served_gateway(Path(folder), num_open, delay_s, 64) as gateway:
            load = Load(concurrent=num_open, rollouts_per_slot=1, turns=turns, spread_s=delay_s)
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
    if placing := figures.get("placing"):
        many = max(placing)
        text = f"placing with {many} nodes: {placing[many]:.0f} us, at most {PLACING_TARGET_US:.0f}"
        answers.append((text, placing[many] <= PLACING_TARGET_US))
    if flood := figures.get("flood"):
        share, grown = flood["flooded"] / flood["calm"], flood["grown_mib"]
        text = f"flooded over calm: {share:.0%} of the turns a second, at least {FLOOD_TARGET:.0%}"
        answers.append((text, share >= FLOOD_TARGET))
        answers.append((f"resident memory grew by {grown:.1f} MiB, at most {GROWTH_TARGET_MIB}",
                        grown <= GROWTH_TARGET_MIB))  # fmt: skip
    if lag := figures.get("open", {}).get("frozen"):
        text = f"lag p99 {1000 * lag['lag_p99_s']:.1f} ms, below {1000 * LAG_TARGET_S:.0f}"
        answers.append((f"{text} (own work {1000 * lag['own_lag_p99_s']:.1f} ms)", lag["lag_p99_s"] < LAG_TARGET_S))
    return answers


async def run(args: argparse.Namespace) -> dict[str, Any]:
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    figures: dict[str, Any] = {}
    freeze_startup()  # As the orchestrator does.
    if "turns" in args.parts:
        figures["turns"] = await measure_turns(args.repeats, SHORT_CASES if args.quick else CASES)
    if "placing" in args.parts:
        figures["placing"] = await measure_placing(args.nodes, args.placed)
    if "flood" in args.parts:
        figures["flood"] = await measure_flood()
    if "open" in args.parts:
        figures["open"] = await measure_open(args.open_rollouts, args.delay_s, args.turns)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = ("turns", "placing", "flood", "open")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case and form")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--placed", type=int, default=3200, help="requests that are placed at each number of nodes")
    parser.add_argument("--open-rollouts", type=int, default=10_000)
    parser.add_argument("--delay-s", type=float, default=30.0, help="in the part open the node answers after this long")
    parser.add_argument("--turns", type=int, default=3, help="turns of each rollout in the part open")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="few rollouts: whether it works")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.nodes, args.placed, args.open_rollouts, args.delay_s = 1, [1, 8], 128, 64, 1.0
    figures = asyncio.run(run(args))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
    return conclude(verdicts(figures), is_quick=args.quick)


if __name__ == "__main__":
    sys.exit(main())
