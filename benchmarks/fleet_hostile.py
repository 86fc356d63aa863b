"""Measure what one hostile node costs: 7 honest nodes alone, then with an eighth that misbehaves, over loopback.

    clients (this process) --> gateway (this process) --CURVE ZMQ--> 7 honest nodes (one process)
                                                     <-- floods ---- 1 hostile node (own process)

    python benchmarks/fleet_hostile.py
    python benchmarks/fleet_hostile.py --seconds 20 --clients 64

An honest node has 8 places that take a fixed time for an answer. The hostile one claims 16,384 places, an endless
context and 10^12 tokens a second, takes every request it gets and answers none, tries to attach under an honest node's
name over a second connection, and sends junk, reports, parts of answers that it does not hold and false answers as fast
as its share of the CPU allows. Every client asks again as soon as it has its answer. Goodput is tokens of accepted
answers a second. Both runs, with a gateway each, alternate `--rounds` times; their medians are compared.

Exit status 1 when the goodput with the hostile node is below 85 % of that of the honest ones alone, when it was not
really hostile (it got no request, or the gateway heard no junk), or when the gateway grew by more than 64 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import zmq

from composer_prime.config import Config
from composer_prime.errors import ComposerError
from composer_prime.run.keys import ClientKeys, RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node import (
    MAX_PLACES,
    CancelGenerate,
    Generate,
    Generated,
    HelloAgain,
    NodeHello,
    Progress,
    Sampling,
    Status,
    ToNode,
)
from composer_prime.wire.sockets import dealer
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from orchestrator.gateway import Gateway

HONEST = 7
PLACES = 8
ANSWER_S = 0.2
NUM_TOKENS = 64
LEAST_SHARE = 0.85
MOST_GROWTH = 64 << 20
HEARTBEAT_S, LOST_AFTER_S = 0.5, 2.0
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODER = msgspec.msgpack.Decoder(ToNode)
_SPANS = [VersionSpan(0, NUM_TOKENS, 0)]


def hello(name: str, instance: str, **claims: int) -> bytes:
    usual = NodeHello(node_id=name, engine="fixed", run_id=None, version=0, max_concurrent=PLACES, instance=instance)
    return _ENCODE(msgspec.structs.replace(usual, **claims))


def status(**claims: float) -> bytes:
    usual = Status(version=0, running=1, waiting=0, kv_used=0.1, tokens_per_s=1.0, canary_error=None)
    return _ENCODE(msgspec.structs.replace(usual, **claims))


def answer(request: Generate) -> bytes:
    return _ENCODE(
        Generated(
            request_id=request.request_id,
            lease=request.lease,
            token_ids=pack_ints(range(NUM_TOKENS)),
            logprobs=pack_floats([-0.5] * NUM_TOKENS),
            version_spans=_SPANS,
            finish_reason="stop",
        )
    )


def run_honest(endpoint: str, token: str) -> None:
    """Answer on HONEST connections, each PLACES at a time, until killed."""
    context, poller = zmq.Context(), zmq.Poller()
    sockets = [dealer(context, endpoint, ClientKeys.from_token(token)) for _ in range(HONEST)]
    due: list[deque[tuple[float, Generate]]] = [deque() for _ in sockets]
    cancelled: set[int] = set()
    for index, socket in enumerate(sockets):
        poller.register(socket, zmq.POLLIN)
        socket.send(hello(f"honest-{index}", f"i{index}"))
    beat = time.monotonic() + HEARTBEAT_S
    while True:
        now = time.monotonic()
        for socket, queue in zip(sockets, due, strict=True):
            while queue and queue[0][0] <= now:
                _, request = queue.popleft()
                if request.lease not in cancelled:
                    socket.send(answer(request))
                cancelled.discard(request.lease)
            if now >= beat:
                socket.send(status(running=len(queue)))
        beat = beat + HEARTBEAT_S if now >= beat else beat
        nearest = min([beat, *(queue[0][0] for queue in due if queue)])
        for socket, _ in poller.poll(max(0, int(1000 * (nearest - time.monotonic())))):
            index = sockets.index(socket)
            message = _DECODER.decode(socket.recv())
            if isinstance(message, Generate):
                due[index].append((time.monotonic() + ANSWER_S, message))
            elif isinstance(message, CancelGenerate):
                cancelled.add(message.lease)
            elif isinstance(message, HelloAgain):
                socket.send(hello(f"honest-{index}", f"i{index}"))


def run_hostile(endpoint: str, token: str) -> None:
    """Misbehave in all ways at once until killed."""
    context = zmq.Context()
    own, thief = (dealer(context, endpoint, ClientKeys.from_token(token)) for _ in range(2))
    claims = hello("hostile", "h", max_concurrent=MAX_PLACES, max_context=1 << 40)
    own.send(claims)
    part = Progress(request_id="g0", lease=1, start=0, token_ids=pack_ints([1]), logprobs=pack_floats([-1.0]),
                    version_spans=[VersionSpan(0, 1, 0)])  # fmt: skip
    held: deque[Generate] = deque(maxlen=64)
    number = 0
    while True:
        number += 1
        with contextlib.suppress(zmq.Again):
            own.send(b"\xc1junk", zmq.NOBLOCK)
            own.send(status(tokens_per_s=1e12), zmq.NOBLOCK)
            own.send(_ENCODE(part), zmq.NOBLOCK)
            if number % 50 == 0:
                thief.send(hello("honest-0", f"thief-{number}"), zmq.NOBLOCK)
                if held:
                    false = msgspec.structs.replace(
                        msgspec.msgpack.decode(answer(held[-1]), type=Generated), request_id="stolen"
                    )
                    own.send(_ENCODE(false), zmq.NOBLOCK)
        for socket in (own, thief):
            while socket.poll(0):
                message = _DECODER.decode(socket.recv())
                if isinstance(message, Generate):
                    held.append(message)
                elif isinstance(message, HelloAgain) and socket is own:
                    own.send(claims, zmq.NOBLOCK)
        time.sleep(0.0002)


# -- the measurement -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run."""

    tokens_per_s: float
    grown_bytes: int
    """Of this process, from the end of the warm-up."""
    hostile_requests: int
    """Requests that the hostile node was given."""
    junk: int
    reissued: int


@contextlib.contextmanager
def peer(role: str, endpoint: str, keys: RunKeys) -> Iterator[None]:
    environment = os.environ | {"COMPOSER_NODE_TOKEN": keys.client("node").token()}
    process = subprocess.Popen([sys.executable, __file__, "--peer", role, "--endpoint", endpoint], env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def measure(folder: Path, seconds: float, clients: int, *, hostile: bool) -> Figures:
    """Run one gateway with its nodes; the first fifth of `seconds` is the warm-up."""
    (folder / "config.json").write_text('{"vocab_size": 32000}')
    source = {"name": "s", "taskset": {"id": "orchestrator.environments.toolsmith"}, "timeout_s": 4 * LOST_AFTER_S}
    config = Config.model_validate({
        "run": {"name": "hostile"},
        "model": {"path": str(folder), "max_context": 4096},
        "inference": {"heartbeat_s": HEARTBEAT_S, "lost_after_s": LOST_AFTER_S},
        "orchestrator": {"source": [source], "no_node_timeout_s": 60.0},
    })  # fmt: skip
    keys = RunKeys.create(folder / "keys")
    gateway = Gateway(config, keys, "hostile", WeightStore(folder / "weights"), model_dir=folder)
    await gateway.start()
    with contextlib.ExitStack() as peers:
        try:
            peers.enter_context(peer("honest", gateway.node_endpoint, keys))
            await _attached(gateway, HONEST)
            if hostile:
                peers.enter_context(peer("hostile", gateway.node_endpoint, keys))
                await _attached(gateway, HONEST + 1)
            return await _load(gateway, seconds, clients)
        finally:
            await gateway.close()


async def _attached(gateway: Gateway, count: int) -> None:
    async with asyncio.timeout(60):
        while len(gateway.versions()) < count:
            await asyncio.sleep(0.05)


async def _load(gateway: Gateway, seconds: float, clients: int) -> Figures:
    router, process = gateway.router, psutil.Process()
    prompt, sampling = pack_ints(range(200)), Sampling(max_tokens=256)
    hostile_requests = 0

    async def client(index: int) -> None:
        nonlocal hostile_requests
        number = 0
        while True:
            number += 1
            with contextlib.suppress(ComposerError):
                await router.generate(f"c{index}-{number}", f"c{index}", prompt, sampling)

    tasks = [asyncio.ensure_future(client(index)) for index in range(clients)]
    await asyncio.sleep(0.2 * seconds)
    tokens, started, memory = router.counters.tokens, time.monotonic(), process.memory_info().rss
    while time.monotonic() < started + 0.8 * seconds:
        await asyncio.sleep(0.1)
        held = [len(node.leases) for node in router.nodes if node.node_id == "hostile"]
        hostile_requests = max([hostile_requests, *held])
    rate = (router.counters.tokens - tokens) / (time.monotonic() - started)
    grown = process.memory_info().rss - memory
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Figures(
        tokens_per_s=rate,
        grown_bytes=grown,
        hostile_requests=hostile_requests,
        junk=gateway.state()["link"]["garbage"],
        reissued=router.counters.reissued,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--clients", type=int, default=64, help="requests under way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", choices=("honest", "hostile"), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        run = run_honest if arguments.peer == "honest" else run_hostile
        run(arguments.endpoint, os.environ["COMPOSER_NODE_TOKEN"])
        return 0
    figures: dict[bool, list[Figures]] = {False: [], True: []}
    for _ in range(arguments.rounds):
        for hostile in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                one = asyncio.run(measure(Path(folder), arguments.seconds, arguments.clients, hostile=hostile))
            figures[hostile].append(one)
            print(f"{'with the hostile node' if hostile else '7 honest nodes':22s} {one.tokens_per_s:7.0f} tokens/s, "
                  f"grown {one.grown_bytes / 2**20:5.1f} MiB, it held {one.hostile_requests} requests, "
                  f"{one.junk} messages of junk, {one.reissued} reissued", flush=True)  # fmt: skip
    alone, together = (statistics.median(one.tokens_per_s for one in figures[key]) for key in (False, True))
    print(f"goodput with the hostile node: {together / alone:.1%} of the honest ones alone, at least {LEAST_SHARE:.0%}")
    misbehaved = all(one.hostile_requests and one.junk for one in figures[True])
    grown = max(one.grown_bytes for one in figures[True])
    return int(together < LEAST_SHARE * alone or not misbehaved or grown > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
