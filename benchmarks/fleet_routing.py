"""Compare ways to choose a node for each turn, on 4 fast and 4 six-fold slower nodes, in simulated time.

    groups of rollouts (closed loop) -> the product's Router, one policy after the other -> simulated engines

    python -m benchmarks.fleet_routing --seeds 0 1 2
    python -m benchmarks.fleet_routing --traces outputs/a1 outputs/code-a1 --groups 1600 --quantum-s 0.02

The policies: `ours` is the Router as it is; `session` keeps a conversation on its node and gives others the node with
the fewest requests for its places; `least` always takes that node; `hash` takes the node that the conversation hashes
to, the next one on the ring when that is full. All run the same router, traces and engines, in one process.

Traces come from a seed. A group has 8 rollouts of one task; its prompt has 400 to 3,000 tokens (log-uniform). A rollout
has 1 + Poisson(5) turns. An answer has a lognormal number of tokens (median 120, sigma 0.9, at most 2,000), a tool's
reply likewise (median 200, sigma 0.8), and a tool takes a lognormal time (median 0.5 s, sigma 1). A group begins when
another ends, so that `--concurrent` rollouts are under way. With --traces, turns have the lengths and tool times that
were recorded, as they are; --groups of them are taken, each as often as the others, in an order from the seed.

An engine decodes n sequences at a + b n seconds a token, and spends at most half of its time on prompts while others
decode. Its memory is for the requests that run. What is left keeps the prefixes of conversations, least recently used
ones leave. A request that does not fit waits there. Fast: a = 10 ms, b = 0.5 ms, 8,000 prompt tokens a second; slow: a
sixth of that. Both hold 64 requests and 300,000 tokens.

After each fifth of the groups a fast node is killed. It is noticed after 10 s and comes back, cold, after 60 s. Lost at
a kill are tokens that the node had sampled and not streamed; `whole` is `ours` with engines that stream nothing. Wasted
are all tokens that were sampled and are in no answer. Ratios have Student's interval over seeds.

Exit status 1 when ours has, with any seed, fewer groups a second or a longer p90 than another policy, or loses more at
a kill than `whole`. Also when the mean over seeds of its groups a second is less than 1.6 times that of `least` or
`hash`, and with traces from a seed that of `session`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from bisect import bisect
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks._shared import conclude
from benchmarks.fleet_routing_sides.engines import SimulatedFleet, SimulatedLoop
from benchmarks.fleet_routing_sides.traces import SIBLINGS, Group, Turn, describe, drawn, make_groups, recorded_groups
from composer_prime.errors import ConfigError
from composer_prime.stats.intervals import seeds_interval
from composer_prime.wire.node_messages import Sampling
from composer_prime.wire.types import INT
from orchestrator.gateway.nodes import UNPROVEN_PLACES, AttachedNode, GatewayRequest, Placing

RATIO_TARGET = 1.6
_MAX_TOKENS = 4096


# -- policies ------------------------------------------------------------------------------------------------------


def is_full(node: AttachedNode) -> bool:
    return node.status is not None and node.status.kv_used > 0.9


class LeastLoaded(Placing):
    """The node with the fewest requests for its places."""

    def choose(self, request: GatewayRequest, free: list[AttachedNode]) -> AttachedNode:
        def load(node: AttachedNode) -> float:
            """A node that claims many places gets more than others only after it has answered that many."""
            return len(node.leases) / min(node.hello.max_concurrent, UNPROVEN_PLACES + node.record.answers)

        return min(free, key=lambda node: (is_full(node), load(node), node.node_id))


class StickySession(LeastLoaded):
    """The conversation's node while that is free, else the least loaded one."""

    def choose(self, request: GatewayRequest, free: list[AttachedNode]) -> AttachedNode:
        warm = self._sessions.get(request.asked.session)
        for node in free:
            if warm is not None and node.node_id == warm.node_id and not is_full(node):
                return node
        return super().choose(request, free)


class ConsistentHash(LeastLoaded):
    """The first free node on a ring of hashes, from the conversation's on."""

    def choose(self, request: GatewayRequest, free: list[AttachedNode]) -> AttachedNode:
        names = {node.node_id: node for node in free}
        start = bisect(_RING, (_hash(request.asked.session), ""))
        return next(names[name] for _, name in (*_RING[start:], *_RING[:start]) if name in names)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


_RING = sorted((_hash(f"{kind}{i}/{copy}"), f"{kind}{i}") for kind in ("fast", "slow") for i in range(4)
               for copy in range(64))  # fmt: skip


# -- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One policy's figures; times in simulated seconds."""

    groups_per_s: float
    group_p50_s: float
    group_p90_s: float
    warm_share: float
    """Of all prompt tokens, those that were in the engine's cache."""
    lost_at_kills: int
    """Tokens."""
    wasted: float
    """Share of all sampled tokens."""


async def play(fleet: SimulatedFleet, groups: list[Group], concurrent: int) -> Outcome:
    """Play every group, `concurrent` rollouts at a time."""
    waiting, durations = iter(enumerate(groups)), []
    router, begun = fleet.router, fleet.loop.now
    answered = 0

    async def rollout(group: int, sibling: int, turns: list[Turn]) -> None:
        nonlocal answered
        session, context = f"g{group}-{sibling}", 0
        for number, turn in enumerate(turns):
            context += turn.new_prompt
            name = f"{session}/{number}"
            fleet.targets[name] = turn.answer
            sampling = Sampling(max_tokens=_MAX_TOKENS, seed=1)
            answer = await router.generate(name, session, bytes(INT.itemsize * context), sampling)
            assert len(answer) == turn.answer, "an answer has as many tokens as its trace"
            answered += turn.answer
            context += turn.answer
            await asyncio.sleep(turn.tool_s)
        router.placing.forget(session)

    async def slot() -> None:
        for group, trace in waiting:
            started = fleet.loop.now
            await asyncio.gather(*(rollout(group, i, turns) for i, turns in enumerate(trace.rollouts)))
            durations.append(fleet.loop.now - started)
            fifth, rest = divmod(len(durations), len(groups) // 5)
            if not rest and 1 <= fifth <= 4:
                killed.append(asyncio.ensure_future(fleet.kill(f"fast{fifth - 1}")))

    killed: list[asyncio.Future[None]] = []
    engines = asyncio.ensure_future(fleet.run())
    await asyncio.gather(*(slot() for _ in range(concurrent // SIBLINGS)))
    for task in (engines, *killed):
        task.cancel()
    await asyncio.gather(engines, *killed, return_exceptions=True)
    sampled = sum(engine.sampled for engine in fleet.engines.values())
    return Outcome(
        groups_per_s=len(groups) / (fleet.loop.now - begun),
        group_p50_s=float(np.percentile(durations, 50)),
        group_p90_s=float(np.percentile(durations, 90)),
        warm_share=fleet.cached / fleet.prompts,
        lost_at_kills=sum(engine.lost for engine in fleet.engines.values()),
        wasted=1 - answered / sampled,
    )


POLICIES: dict[str, tuple[type[Placing], bool]] = {
    "ours": (Placing, True),
    "whole": (Placing, False),
    "session": (StickySession, False),
    "least": (LeastLoaded, False),
    "hash": (ConsistentHash, False),
}
"""Placing, and whether nodes stream."""


def simulate(name: str, groups: list[Group], concurrent: int, quantum_s: float) -> Outcome:
    """Run one policy in a loop of its own, with its clock as the process's monotonic clock."""
    policy, streams = POLICIES[name]
    loop, clock = SimulatedLoop(), time.monotonic
    time.monotonic = loop.time
    try:

        async def scenario() -> Outcome:
            fleet = SimulatedFleet(loop, policy(), streams=streams, quantum_s=quantum_s)
            return await play(fleet, groups, concurrent)

        return loop.run_until_complete(scenario())
    finally:
        time.monotonic = clock
        loop.close()


def compare(groups: list[Group], concurrent: int, quantum_s: float) -> dict[str, Outcome]:
    outcomes = {}
    print("policy    groups/s   p50 s   p90 s   warm  lost at kills  wasted  CPU s")
    for name in POLICIES:
        cpu = time.process_time()
        one = outcomes[name] = simulate(name, groups, concurrent, quantum_s)
        print(f"{name:8s} {one.groups_per_s:9.3f} {one.group_p50_s:7.1f} {one.group_p90_s:7.1f} {one.warm_share:6.1%} "
              f"{one.lost_at_kills:14d} {one.wasted:7.2%} {time.process_time() - cpu:6.1f}",
              flush=True)  # fmt: skip
    return outcomes


def losses_of(outcomes: dict[str, Outcome]) -> list[str]:
    """Return what ours loses, in words."""
    ours, losses = outcomes["ours"], []
    for name, other in outcomes.items():
        if name in ("ours", "whole"):
            continue
        if ours.groups_per_s <= other.groups_per_s:
            losses.append(f"{name} has more groups a second")
        if ours.group_p90_s >= other.group_p90_s:
            losses.append(f"{name} has a shorter p90")
    if ours.lost_at_kills >= outcomes["whole"].lost_at_kills:
        losses.append("nodes that stream nothing lose fewer tokens at a kill")
    return losses


def verdicts(by_seed: dict[int, dict[str, Outcome]], names: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Return the aim over each of the policies `names` beside what was measured, in words, and whether it is met."""
    answers = []
    for name in names:
        ratio = fmean(each["ours"].groups_per_s / each[name].groups_per_s for each in by_seed.values())
        answers.append((f"ours / {name}: {ratio:.2f} groups/s, at least {RATIO_TARGET}", ratio >= RATIO_TARGET))
    return answers


def print_ratios(by_seed: dict[int, dict[str, Outcome]]) -> None:
    for name in POLICIES:
        if name in ("ours", "whole"):
            continue
        rates = [each["ours"].groups_per_s / each[name].groups_per_s for each in by_seed.values()]
        tails = [each["ours"].group_p90_s / each[name].group_p90_s for each in by_seed.values()]
        print(f"ours / {name}: {seeds_interval(rates).text()} groups/s, p90 {seeds_interval(tails).text()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=160)
    parser.add_argument("--concurrent", type=int, default=256, help="rollouts under way, a multiple of 8")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--traces", nargs="+", metavar="PATH",
                        help="the traces: run directories, or folders of mini-swe-agent's *.traj.json")  # fmt: skip
    parser.add_argument("--quantum-s", type=float, default=0.1, help="simulated seconds that engines compute at a time")
    parser.add_argument("--quick", action="store_true", help="20 groups: whether it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.groups = 20
    if arguments.concurrent % SIBLINGS or arguments.concurrent < SIBLINGS:
        parser.error(f"--concurrent is {arguments.concurrent}: give a multiple of {SIBLINGS}, the rollouts of a group")
    if arguments.groups < 5:
        parser.error(f"--groups is {arguments.groups}: at least 5, because a node is killed after each fifth of them")
    recorded: list[Group] = []
    if arguments.traces:
        try:
            recorded, left_out = recorded_groups(arguments.traces)
        except ConfigError as error:
            parser.error(f"--traces: {error}")
        print(f"{len(recorded)} recorded groups ({left_out} left out); {describe(recorded)}; {arguments.groups} taken")
    by_seed, losses = {}, []
    for seed in arguments.seeds:
        print(f"seed {seed}")
        groups = drawn(recorded, arguments.groups, seed) if recorded else make_groups(arguments.groups, seed)
        by_seed[seed] = compare(groups, arguments.concurrent, arguments.quantum_s)
        losses += [f"seed {seed}: {loss}" for loss in losses_of(by_seed[seed])]
    print_ratios(by_seed)
    answers = verdicts(by_seed, ("least", "hash") if recorded else ("least", "hash", "session"))
    print("\n".join(losses))
    return int(bool(losses)) or conclude(answers, is_quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
