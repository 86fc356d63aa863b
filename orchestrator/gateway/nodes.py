"""The inference nodes of this run: who is attached, what each says of itself, what it holds.

    Hello -> attached -> (silent for lost_after_s | Goodbye | unreachable) -> away -> Hello -> attached again

A node keeps its counters over a reconnect: they belong to its node_id, not to its connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_prime.wire.node import Hello, Status

if TYPE_CHECKING:
    from orchestrator.gateway.routing import Request

logger = logging.getLogger(__name__)

_AWAY_LIMIT = 1024
"""Nodes that left and are still remembered for their counters."""
_FAILURES_IN_ROW = 4
"""After so many failed answers in a row a node gets no request for a while."""


@dataclass(slots=True, kw_only=True)
class Node:
    node_id: str
    identity: bytes
    """Routing id of its connection."""
    instance: str
    """Its process, as it said in its Hello."""
    engine: str
    max_concurrent: int
    version: int
    """Policy version it samples with, as it last reported."""
    attached_at: float
    """Monotonic seconds, as all times here."""
    last_heard: float
    attached: bool = True
    draining: bool = False
    status: Status | None = None
    """None before its first heartbeat."""
    idle_since: float | None = None
    """Since when its heartbeats report no request at all; None while it has some."""
    leases: dict[int, Request] = field(default_factory=dict)
    """Requests it holds, by lease."""
    suspended_until: float = 0.0
    failures_in_row: int = 0
    answers: int = 0
    failures: int = 0
    """Requests it gave back with an error."""
    bad_answers: int = 0
    """Answers that were refused: out of range, not finite, not covered by version spans."""
    late_answers: int = 0
    """Answers to requests that it no longer held."""
    garbage: int = 0
    """Messages that could not be decoded."""
    tokens_out: int = 0
    attachments: int = 1

    @property
    def free(self) -> int:
        return self.max_concurrent - len(self.leases)

    @property
    def load(self) -> float:
        """Share of its places that are taken."""
        return len(self.leases) / self.max_concurrent

    def cannot_serve(self, now: float, oldest: int, newest: int) -> str | None:
        """Why it gets no request now; None when it may."""
        if not self.attached:
            return f"gone for {now - self.last_heard:.0f} s"
        if self.draining:
            return "draining"
        if not oldest <= self.version <= newest:
            wanted = f"version {oldest}" if oldest >= newest else f"a version in {oldest}..{newest}"
            return f"has policy version {self.version}, needs {wanted}"
        if now < self.suspended_until:
            return f"suspended for {self.suspended_until - now:.1f} s after {self.failures_in_row} failures in a row"
        return None

    def succeeded(self, num_tokens: int) -> None:
        self.answers += 1
        self.tokens_out += num_tokens
        self.failures_in_row = 0

    def failed(self, now: float, pause_s: float) -> None:
        """One more failure; the fourth in a row suspends the node for `pause_s`."""
        self.failures_in_row += 1
        if self.failures_in_row >= _FAILURES_IN_ROW:
            self.suspended_until = now + pause_s


class Nodes:
    """All nodes, by id and by connection."""

    def __init__(self, on_gone: Callable[[Node, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`on_gone(node, reason)` is called once for each departure, when the node is already marked as away."""
        self._by_id: dict[str, Node] = {}
        self._by_identity: dict[bytes, Node] = {}
        self._on_gone = on_gone
        self._clock = clock

    def __iter__(self):
        return iter(self._by_id.values())

    def attached(self) -> list[Node]:
        return list(self._by_identity.values())

    def at(self, identity: bytes) -> Node | None:
        """The attached node of a connection."""
        return self._by_identity.get(identity)

    def get(self, node_id: str) -> Node | None:
        """The node of this name, attached or away."""
        return self._by_id.get(node_id)

    def holder(self, identity: bytes, hello: Hello) -> Node | None:
        """The attached node that has the name in `hello` and is another process than the one that says it."""
        known = self._by_id.get(hello.node_id)
        if known is None or not known.attached or known.identity == identity:
            return None
        return None if hello.instance in ("", known.instance) else known

    def attach(self, identity: bytes, hello: Hello) -> Node:
        """The node that says `hello` on connection `identity`. Whatever it held before counts as lost: a node that says
        Hello starts empty."""
        now = self._clock()
        previous = self._by_identity.get(identity)
        if previous is not None:
            self.leave(previous, "said hello again")
        known = self._by_id.get(hello.node_id)
        if known is not None and known.attached:
            self.leave(known, "came back on a new connection")
        node = Node(
            node_id=hello.node_id,
            identity=identity,
            instance=hello.instance,
            engine=hello.engine,
            max_concurrent=hello.max_concurrent,
            version=hello.version,
            attached_at=now,
            last_heard=now,
        )
        if known is not None:
            for counter in ("answers", "failures", "bad_answers", "late_answers", "garbage", "tokens_out"):
                setattr(node, counter, getattr(known, counter))
            node.attachments = known.attachments + 1
        self._by_id.pop(hello.node_id, None)
        self._by_id[hello.node_id] = self._by_identity[identity] = node
        logger.info("node %s attached: engine %s, %d places, version %d", node.node_id, node.engine,
                    node.max_concurrent, node.version)  # fmt: skip
        return node

    def heard(self, node: Node, status: Status) -> None:
        now = self._clock()
        node.last_heard, node.status, node.version = now, status, status.version
        if status.running or status.waiting:
            node.idle_since = None
        elif node.idle_since is None:
            node.idle_since = now

    def leave(self, node: Node, reason: str) -> None:
        """Mark as away; its requests go back to the router."""
        if self._by_identity.get(node.identity) is not node:
            return
        del self._by_identity[node.identity]
        node.attached = False
        logger.warning("node %s is gone (%s); it held %d requests", node.node_id, reason, len(node.leases))
        self._on_gone(node, reason)
        self._forget_oldest()

    def lose_silent(self, lost_after_s: float) -> None:
        """Give up every node that was silent for longer than `lost_after_s`."""
        now = self._clock()
        for node in self.attached():
            if now - node.last_heard > lost_after_s:
                self.leave(node, f"silent for {now - node.last_heard:.1f} s")

    def _forget_oldest(self) -> None:
        away = [node.node_id for node in self if not node.attached]
        for node_id in away[: max(0, len(away) - _AWAY_LIMIT)]:
            del self._by_id[node_id]

    def snapshot(self, oldest: int, newest: int) -> list[dict[str, Any]]:
        """Plain state of every node, for /metrics."""
        now = self._clock()
        return [_describe(node, now, node.cannot_serve(now, oldest, newest)) for node in self]


def _describe(node: Node, now: float, obstacle: str | None) -> dict[str, Any]:
    status = node.status
    return {
        "node_id": node.node_id,
        "engine": node.engine,
        "attached": node.attached,
        "serves": obstacle is None,
        "why_not": obstacle,
        "version": node.version,
        "in_flight": len(node.leases),
        "max_concurrent": node.max_concurrent,
        "heard_s_ago": round(now - node.last_heard, 3),
        "running": status.running if status else None,
        "waiting": status.waiting if status else None,
        "kv_used": status.kv_used if status else None,
        "tokens_per_s": status.tokens_per_s if status else None,
        "canary_error": status.canary_error if status else None,
        "weight_error": status.weight_error if status else None,
        "answers": node.answers,
        "tokens_out": node.tokens_out,
        "failures": node.failures,
        "bad_answers": node.bad_answers,
        "late_answers": node.late_answers,
        "garbage": node.garbage,
        "attachments": node.attachments,
    }
