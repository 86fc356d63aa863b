"""A router by itself, with nodes that answer when the test says so."""

import asyncio
from collections.abc import Sequence

import msgspec
from node_peer import tokens_for

from composer_prime.wire.node_messages import CancelGenerate, Generate, NodeHello, Sampled, Sampling, Status, ToNode
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from orchestrator.gateway.nodes import AttachedNode, ServedPolicy
from orchestrator.gateway.routing import Router, Waits


class Fleet:
    """A router whose nodes answer when the test says so."""

    def __init__(self, **hellos: dict) -> None:
        self.sent: dict[str, list[Generate]] = {name: [] for name in hellos}
        self.cancelled: dict[str, list[int]] = {name: [] for name in hellos}
        """Leases."""
        self.told: list[tuple[str, ToNode]] = []
        """All other messages, by node."""
        self.router = Router(self._send, policy=ServedPolicy(256), suspend_s=1.0, request_timeout_s=60.0)
        self.waits = Waits(self.router, 60.0, "")
        for name, changes in hellos.items():
            hello = NodeHello(node_id=name, engine="test", run_id=None, version=0, max_concurrent=64, instance=name)
            node = self.router.attach(name.encode(), msgspec.structs.replace(hello, **changes))
            node.speed.tokens = 1 << 20  # So that it gets all of its places at once.
        self.calls: list[asyncio.Task] = []

    def _send(self, identity: bytes, message) -> bool:
        name = self.router.connections[identity].node_id
        if isinstance(message, Generate):
            self.sent[name].append(message)
        elif isinstance(message, CancelGenerate):
            self.cancelled[name].append(message.lease)
        else:
            self.told.append((name, message))
        return True

    def node(self, name: str) -> AttachedNode:
        return self.router.nodes[name]

    async def ask(
        self, count: int = 1, prompt: int = 1, session: str | None = None, max_tokens: int = 8,
        oldest_version: int = 0, **sampling,
    ) -> None:  # fmt: skip
        """Send requests and let them be placed."""
        for _ in range(count):
            name, settings = f"g{len(self.calls)}", Sampling(max_tokens=max_tokens, **sampling)
            work = self.router.generate(
                name, session or name, pack_ints([5] * prompt), settings, oldest_version=oldest_version
            )
            self.calls.append(asyncio.create_task(work))
        await asyncio.sleep(0)

    def answer(self, name: str, request: Generate) -> None:
        self.finish(name, request, tokens_for([5], 6)[0])

    def finish(self, name: str, request: Generate, ids: Sequence[int], version: int = 0) -> None:
        """Have a node answer with these tokens, the last of them a stop."""
        logprobs = pack_floats([-0.25] * len(ids))
        self.stream(name, request, ids, version=version, logprobs=logprobs, finish_reason="stop")

    def stream(
        self, name: str, request: Generate, ids: Sequence[int], start: int = 0, version: int = 0, **changes
    ) -> None:
        """Have a node send tokens of an answer that is not complete."""
        part = Sampled(
            request_id=request.request_id,
            lease=request.lease,
            start=start,
            token_ids=pack_ints(ids),
            logprobs=pack_floats([-0.5] * len(ids)),
            version_spans=[VersionSpan(0, len(ids), version)],
        )
        self.router.on_sampled(self.node(name), msgspec.structs.replace(part, **changes))


def status(**changes) -> Status:
    usual = Status(version=0, running=0, waiting=0, kv_used=0.0, tokens_per_s=0.0, canary_error=None)
    return msgspec.structs.replace(usual, **changes)
