"""Measure what grows with a run, at a size and at ten times that: what must not grow is named with its bound.

    uv run python -m benchmarks.growth

placing      CPU of one look for a node while requests wait that no free node may take: 500 and 5,000
answer       CPU from a request's arrival at the router to its answer, without a network: 30 and 300 nodes
resume       peak memory of the orchestrator's resume from a journal: 16 and 160 MiB; one group is still needed
publication  CPU of telling a version to all nodes, each: 30 and 300 nodes on real connections
passes       CPU of cutting 30 teacher documents of one session into passes, for each of 10,000 and 100,000 tokens

The exit status is 1 when one of them grew by more than half.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import zmq

from benchmarks._shared import conclude
from composer_prime.run.keys import RunKeys
from composer_prime.wire.node_messages import Generate, Goodbye, NodeHello, NodeWelcome, Sampled, Sampling, ToNode
from composer_prime.wire.sockets import NodeSocket, dealer
from composer_prime.wire.types import Sample, VersionSpan, pack_floats, pack_ints
from orchestrator.durability import Finished, Journal, formed_batches
from orchestrator.gateway.nodes import AttachedNode, ServedPolicy
from orchestrator.gateway.routing import Router
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome, GroupPlan

MOST_GROWTH, LOOKS, GROUP_BYTES, MANIFEST_BYTES = 1.5, 200, 256 << 10, 128 << 10
AT_ONCE, ANSWERS, ANSWER_TOKENS = 64, 640, 16
TAUGHT = 30


def _attach(router: Router, name: str) -> AttachedNode:
    hello = NodeHello(node_id=name, engine="", run_id=None, version=0, max_concurrent=64, instance="")
    return router.attach(name.encode(), hello)


async def placing(waiting: int) -> float:
    """Microseconds of one call of `place`; the requests have three kinds of needs."""
    router = Router(lambda *_: True, policy=ServedPolicy(256), suspend_s=1.0, request_timeout_s=600.0)
    router.policy.newest = 3
    for index in range(8):
        _attach(router, f"n{index}")
    prompt, sampling = pack_ints([1]), Sampling(max_tokens=8)
    calls = [
        asyncio.ensure_future(router.generate(f"g{index}", "s", prompt, sampling, oldest_version=1 + index % 3))
        for index in range(waiting)
    ]
    await asyncio.sleep(0)
    cpu_s = time.process_time()
    for _ in range(LOOKS):
        router.place()
    cpu_s = time.process_time() - cpu_s
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return 1e6 * cpu_s / LOOKS


async def answer(num_nodes: int) -> float:
    """Microseconds of a request."""
    placed: list[tuple[AttachedNode, Generate]] = []

    def send(identity: bytes, message: ToNode) -> bool:
        if isinstance(message, Generate):
            placed.append((nodes[identity], message))
        return True

    router = Router(send, policy=ServedPolicy(32_000), suspend_s=1.0, request_timeout_s=60.0)
    nodes = {name.encode(): _attach(router, name) for name in map(str, range(num_nodes))}
    prompt, sampling, cpu_s = pack_ints(range(205)), Sampling(max_tokens=256), time.process_time()
    ids, logprobs = pack_ints(range(ANSWER_TOKENS)), pack_floats([-0.5] * ANSWER_TOKENS)
    spans = [VersionSpan(0, ANSWER_TOKENS, 0)]
    for first in range(0, ANSWERS, AT_ONCE):
        calls = [
            asyncio.ensure_future(router.generate(f"g{number}", f"s{number % 512}", prompt, sampling))
            for number in range(first, first + AT_ONCE)
        ]
        await asyncio.sleep(0)
        for node, message in placed:
            sampled = Sampled(request_id=message.request_id, lease=message.lease, token_ids=ids, logprobs=logprobs,
                              version_spans=spans, finish_reason="stop")  # fmt: skip
            router.on_sampled(node, sampled)
        await asyncio.gather(*calls)
        placed.clear()
    return 1e6 * (time.process_time() - cpu_s) / ANSWERS


async def resume(groups: int) -> float:
    """Peak MiB beyond what the process has."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.create(Path(folder), segment_bytes=4 << 20)
        for number in range(groups):
            plan = GroupPlan(group=number, source="s", task_index=0, seed=0, size=1)
            group = FinishedGroup(plan=plan, outcome=GroupOutcome.READY, rollouts=[], samples=[_sample(number)])
            await journal.append(Finished(seq=number + 1, group=group))
        await journal.close()
        tracemalloc.start()
        formed_batches(Journal(Path(folder)), after=0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak / (1 << 20)


def _sample(number: int) -> Sample:
    return Sample(
        sample_id=str(number), group_id="g", source="s", task_id="t", input_ids=bytes(GROUP_BYTES), loss_mask=b"",
        logprobs=b"", advantages=b"", reward=0.0, temperature=1.0, version_spans=[VersionSpan(0, 1, 0)], turns=[],
    )  # fmt: skip


async def publication(nodes: int) -> float:
    """Microseconds a node."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 4 * nodes)
        keys = RunKeys.create(Path(folder) / "keys")
        socket = NodeSocket(keys, 512)
        socket.bind("tcp://127.0.0.1:0")
        peers = [dealer(context, socket.endpoint, keys.client("node")) for _ in range(nodes)]
        for peer in peers:
            peer.send(msgspec.msgpack.encode(Goodbye(reason="")))
        identities = [(await socket.receive()).identity for _ in peers]
        message = NodeWelcome(run_id="r", manifest=bytes(MANIFEST_BYTES), verify_key=b"", heartbeat_s=1.0, sources=[])
        socket.send_all(identities[:1], message)
        cpu_s = time.thread_time()
        socket.send_all(identities, message)
        cpu_s = time.thread_time() - cpu_s
        await socket.close()
        for peer in peers:
            peer.close(0)
    return 1e6 * cpu_s / nodes


async def passes(thousands: int) -> float:
    """Nanoseconds of a token."""
    from trainer.data import _teacher_passes

    tokens = 1000 * thousands
    ids = np.random.default_rng(0).integers(0, 50_000, tokens).astype(np.int32)
    cuts = np.linspace(64, tokens - 64, TAUGHT).astype(int)
    taught = [np.r_[ids[:cut], np.full(32, number, np.int32), ids[cut : cut + 64]] for number, cut in enumerate(cuts)]
    row = SimpleNamespace(first_teacher=0, tokens=taught.__getitem__, teachers=partial(range, TAUGHT))
    cpu_s = time.process_time()
    _teacher_passes(row, share=True, max_tokens=tokens)
    return 1e9 * (time.process_time() - cpu_s) / tokens


LAWS: dict[str, tuple[Callable[[int], Awaitable[float]], str, int, int]] = {
    "placing": (placing, "us", 500, 50),
    "answer": (answer, "us", 30, 16),
    "resume": (resume, "MiB", 64, 16),
    "publication": (publication, "us a node", 30, 20),
    "passes": (passes, "ns a token", 10, 10),
}
"""What is measured, its unit, its smaller size, and that of a quick run."""


def measured(names: list[str], *, is_quick: bool) -> Iterator[tuple[str, bool]]:
    for name in names:
        law, unit, full, quick = LAWS[name]
        size = quick if is_quick else full
        small, large = (asyncio.run(law(each)) for each in (size, 10 * size))
        figures = f"{name:<12} {small:10.2f} at {size}, {large:10.2f} at {10 * size} ({unit})"
        yield figures, large <= MOST_GROWTH * small


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--quick", action="store_true", help="smaller sizes: whether it works")
    args = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    return conclude(measured(args.laws, is_quick=args.quick), is_quick=args.quick)


if __name__ == "__main__":
    sys.exit(main())
