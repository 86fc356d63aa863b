"""Engines and their fleet in simulated time; benchmarks/fleet_routing.py states the formula."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from composer_prime.wire.node_messages import (
    CancelGenerate,
    ComputeDevice,
    Generate,
    NodeHello,
    Sampled,
    Status,
    ToNode,
)
from composer_prime.wire.types import INT, VersionSpan, pack_floats, pack_ints
from orchestrator.gateway.nodes import AttachedNode, Placing, ServedPolicy
from orchestrator.gateway.routing import Router

PLACES = 64
SLOWNESS = 6.0
MEMORY = 300_000
"""Tokens."""
NOTICED_S, AWAY_S = 10.0, 60.0
STREAM_S = 2.0
BEAT_S = 2.0


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@dataclass(slots=True, eq=False)
class Running:
    message: Generate
    num_prompt: int
    target: int
    """Tokens that it samples here."""
    cold: float
    """Prompt tokens that are still to be computed."""
    cached: int = 0
    sampled: float = 0.0
    streamed: int = 0
    streamed_at: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """One node's engine and what it says to the router."""

    name: str
    slowness: float
    fleet: SimulatedFleet
    running: dict[int, Running] = field(default_factory=dict)
    waiting: dict[int, Running] = field(default_factory=dict)
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    alive: bool = True
    node: AttachedNode | None = None
    sampled: int = 0
    lost: int = 0
    """Tokens that it had sampled and not streamed when it was killed."""

    def attach(self) -> None:
        self.alive, self.running, self.waiting = True, {}, {}
        self.cache.clear()
        hello = NodeHello(node_id=self.name, engine="local", run_id=None, version=0, max_concurrent=PLACES,
                          device=ComputeDevice(name="alike", dtype="bfloat16"),
                          instance=f"{self.name}-{self.fleet.loop.now}")  # fmt: skip
        self.node = self.fleet.router.attach(self.name.encode(), hello)
        self.fleet.router.place()

    def take(self, message: Generate) -> None:
        num_prompt = len(message.prompt_ids) // INT.itemsize
        target = self.fleet.targets[message.request_id] - message.sampling.resumed
        self.waiting[message.lease] = Running(message, num_prompt, target, num_prompt, streamed_at=self.fleet.loop.now)

    def cancel(self, lease: int) -> None:
        self.waiting.pop(lease, None)
        if (work := self.running.pop(lease, None)) is not None:
            self._remember(work.message.session, int(work.num_prompt - work.cold + work.sampled))

    def held(self) -> float:
        """Return the tokens of requests that run."""
        return sum(work.num_prompt + work.sampled for work in self.running.values())

    def _begin(self) -> None:
        """Begin the requests that fit, in order. A request that is alone begins in any case."""
        held = self.held() if self.waiting else 0.0
        for lease, work in list(self.waiting.items()):
            held += work.num_prompt
            if self.running and held > MEMORY:
                return
            self.running[lease] = self.waiting.pop(lease)
            work.cached = min(self.cache.pop(work.message.session, 0), work.num_prompt - 1)
            work.cold -= work.cached
            self._evict(held)
            self.fleet.cached += work.cached
            self.fleet.prompts += work.num_prompt

    def advance(self, seconds: float) -> None:
        """Compute for `seconds`: prompts first, for half of the time while others decode."""
        self._begin()
        decoding = [work for work in self.running.values() if work.cold <= 0]
        left = seconds * (0.5 if decoding else 1.0)
        rate = 8000.0 / self.slowness
        for work in self.running.values():
            if work.cold > 0 and left > 0:
                done = min(work.cold, left * rate)
                work.cold -= done
                left -= done / rate
        spent = seconds * (0.5 if decoding else 1.0) - left
        if decoding:
            step_s = self.slowness * (0.010 + 0.0005 * len(decoding))
            for work in decoding:
                before = int(work.sampled)
                work.sampled = min(work.sampled + (seconds - spent) / step_s, float(work.target))
                self.sampled += int(work.sampled) - before

    def report(self) -> None:
        """Answer what is done, stream what is not."""
        now = self.fleet.loop.now
        for lease, work in list(self.running.items()):
            if work.sampled >= work.target:
                del self.running[lease]
                self._remember(work.message.session, work.num_prompt + work.target)
                ids, logprobs, spans = _tokens(work.target)
                self.fleet.router.on_sampled(self._attached(), Sampled(
                    request_id=work.message.request_id, lease=lease, token_ids=ids, logprobs=logprobs,
                    version_spans=spans, finish_reason="stop", prompt_cached=work.cached))  # fmt: skip
            elif self.fleet.streams and (int(work.sampled) - work.streamed >= 64 or now - work.streamed_at >= STREAM_S):
                new = int(work.sampled) - work.streamed
                if new:
                    ids, logprobs, spans = _tokens(new)
                    self.fleet.router.on_sampled(self._attached(), Sampled(
                        request_id=work.message.request_id, lease=lease, start=work.streamed, token_ids=ids,
                        logprobs=logprobs, version_spans=spans))  # fmt: skip
                    work.streamed, work.streamed_at = work.streamed + new, now

    def _attached(self) -> AttachedNode:
        assert self.node is not None
        return self.node

    def _remember(self, session: str, tokens: int) -> None:
        self.cache[session] = tokens
        self.cache.move_to_end(session)
        self._evict(self.held())

    def _evict(self, held: float) -> None:
        """Take what is too much from the conversations used least recently, the end of each first."""
        excess = held + sum(self.cache.values()) - MEMORY
        while self.cache and excess > 0:
            session, tokens = self.cache.popitem(last=False)
            if tokens > excess:
                self.cache[session] = int(tokens - excess)
                self.cache.move_to_end(session, last=False)
            excess -= tokens


def _tokens(count: int) -> tuple[bytes, bytes, list[VersionSpan]]:
    return pack_ints([7] * count), pack_floats([-0.5] * count), [VersionSpan(0, count, 0)]


class SimulatedFleet:
    """A router with the fleet's engines behind it."""

    def __init__(self, loop: SimulatedLoop, policy: Placing, *, streams: bool, quantum_s: float) -> None:
        self.loop, self.streams, self.quantum_s = loop, streams, quantum_s
        self.targets: dict[str, int] = {}
        self.router = Router(self._send, policy=ServedPolicy(100), suspend_s=10.0, request_timeout_s=1e6)
        self.router.placing = policy
        self.engines = {f"{kind}{i}": SimulatedEngine(f"{kind}{i}", slowness, self)
                        for kind, slowness in (("fast", 1.0), ("slow", SLOWNESS)) for i in range(4)}  # fmt: skip
        for engine in self.engines.values():
            engine.attach()
        self.cached = self.prompts = 0

    def _send(self, identity: bytes, message: ToNode) -> bool:
        engine = self.engines[identity.decode()]
        if engine.alive and isinstance(message, Generate):
            engine.take(message)
        elif isinstance(message, CancelGenerate):
            engine.cancel(message.lease)
        return True

    async def run(self) -> None:
        beat_at = 0.0
        while True:
            await asyncio.sleep(self.quantum_s)
            for engine in self.engines.values():
                if engine.alive:
                    engine.advance(self.quantum_s)
                    engine.report()
            if self.loop.now >= beat_at:
                self._beat()
                beat_at = self.loop.now + BEAT_S

    def _beat(self) -> None:
        for engine in self.engines.values():
            if engine.alive and engine.node is not None:
                self.router.update_status(engine.node, Status(
                    version=0, running=len(engine.running), waiting=len(engine.waiting),
                    kv_used=min(1.0, engine.held() / MEMORY), kv_tokens=MEMORY,
                    tokens_per_s=1.0, canary_error=None))  # fmt: skip
        self.router.place()

    async def kill(self, name: str) -> None:
        """Let a node vanish, have it noticed, and let it come back."""
        engine = self.engines[name]
        engine.lost += sum(int(work.sampled) - work.streamed for work in engine.running.values())
        engine.alive, engine.running, engine.waiting = False, {}, {}
        await asyncio.sleep(NOTICED_S)
        if engine.node is not None:
            self.router.leave(engine.node, "silent")
        await asyncio.sleep(AWAY_S)
        engine.attach()
