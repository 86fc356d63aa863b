"""The inference nodes of this run: which are attached, their state, and the requests they hold.

    Hello -> attached -> (silent for lost_after_s | Goodbye | unreachable) -> away -> Hello -> attached again

A node keeps its counters over a reconnect: they belong to its node_id, not to its connection. The router calls all of
this and takes back what a node that leaves held. Nothing here knows the router.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from composer_prime.monitor.events import event
from composer_prime.wire.node_messages import NodeHello, Status
from orchestrator.gateway.placing import NodeSpeed
from orchestrator.gateway.requests import GatewayRequest, ServedPolicy, VersionReports
from orchestrator.swarm import NodeTrust

logger = logging.getLogger(__name__)

KV_FULL = 0.9
"""Share of a KV cache in use from which it counts as full."""
_FAILURES_IN_ROW = 4
"""After this many failures in a row a node gets no request for a while."""
_CONTINUE = ("local", "vllm")
"""The engines that continue another node's answer as if it were their own."""
_FIRST_PLACES, _TOKENS_A_PLACE = 4, 32
"""Requests that a node may hold at first, and delivered tokens for each one more, until its pace is measured."""


@dataclass(slots=True)
class NodeCounters:
    """What the processes of one name did."""

    answers: int = 0
    failures: int = 0
    """Requests it returned with an error."""
    bad_answers: int = 0
    """Answers that were refused: out of range, not finite, not covered by version spans."""
    late_answers: int = 0
    """Answers to requests that it no longer held."""
    garbage: int = 0
    """Messages that could not be decoded."""
    tokens_out: int = 0
    attachments: int = 1


@dataclass(slots=True)
class Standing:
    """How many requests a node may hold for its conduct."""

    places: int
    """What it claims, or 1 after a suspension until it has answered."""
    suspended_until: float = 0.0
    stalls_in_row: int = 0
    """How often its requests were taken back for lack of progress since its last answer."""
    failures_in_row: int = 0


@dataclass(slots=True)
class NodeTimes:
    """When a node did something last, monotonic seconds."""

    anything: float = field(default_factory=time.monotonic)
    progress: float = field(default_factory=time.monotonic)
    """It gave an answer, reported sampled tokens or installed weights."""
    delivered: float = field(default_factory=time.monotonic)
    """It gave an answer or a part of one."""


@dataclass(slots=True, kw_only=True)
class AttachedNode:
    """One node, attached or away."""

    hello: NodeHello
    """What it says of itself; nothing checks engine, device and price."""
    identity: bytes
    """Routing id of its connection."""
    key: bytes
    """The public key of its connection; nodes without one of their own share the run's."""
    version: int
    """Policy version it samples with, from its last report."""
    reports: VersionReports
    trust: NodeTrust
    """What audits of its answers tell; belongs to its name."""
    standing: Standing
    attached: bool = True
    draining: bool = False
    status: Status | None = None
    """None before its first heartbeat."""
    speed: NodeSpeed = field(default_factory=NodeSpeed)
    """Measured here, from its answers."""
    leases: dict[int, GatewayRequest] = field(default_factory=dict)
    """Requests it holds, by lease."""
    heard: NodeTimes = field(default_factory=NodeTimes)
    counters: NodeCounters = field(default_factory=NodeCounters)

    @property
    def node_id(self) -> str:
        return self.hello.node_id

    @property
    def cache_is_full(self) -> bool:
        """Tell whether no further conversation fits into its KV cache, by its last report."""
        return self.status is not None and self.status.kv_used > KV_FULL

    def cannot_serve(self, policy: ServedPolicy) -> str | None:
        """Return why it gets no request now, or None when it may get one."""
        standing, now = self.standing, time.monotonic()
        if not self.attached:
            return f"gone for {now - self.heard.anything:.0f} s"
        if self.draining:
            return "draining"
        if now < self.trust.quarantined_until:
            return f"quarantined for {self.trust.quarantined_until - now:.0f} s: an audit found wrong answers"
        oldest, newest = max(policy.oldest, self.reports.newest), policy.newest
        if not oldest <= self.version <= newest:
            needed = f"version {oldest}" if oldest >= newest else f"a version in {oldest}..{newest}"
            return f"has policy version {self.version}, needs {needed}"
        if now < standing.suspended_until:
            stalls, failures = standing.stalls_in_row, standing.failures_in_row
            cause = f"{stalls} stalls" if stalls else f"{failures} failures"
            return f"suspended for {standing.suspended_until - now:.1f} s after {cause} in a row"
        return None

    @property
    def has_room(self) -> bool:
        """Tell whether it may get one more request. Until its pace is measured it gets few: it may be the slowest."""
        places = self.standing.places
        if self.speed.pace is None:
            places = min(places, _FIRST_PLACES + self.speed.tokens // _TOKENS_A_PLACE)
        return len(self.leases) < places

    @property
    def expectation(self) -> float | None:
        """Expected share of right answers, by its audits; 0 in quarantine, None before the first audit."""
        return self.trust.expectation(time.monotonic())

    @property
    def continues(self) -> bool:
        """Tell whether it continues such a node's answer with the same draws, and finds stops that began there."""
        return self.hello.engine in _CONTINUE

    def take_over(self, former: AttachedNode) -> None:
        """Continue as `former` of this name, or a restart would end a suspension. Speed belongs to the process."""
        self.reports, self.counters = former.reports, former.counters
        self.counters.attachments += 1
        was, places = former.standing, self.standing.places
        if was.stalls_in_row or was.failures_in_row >= _FAILURES_IN_ROW:
            places = 1
        self.standing = Standing(places, was.suspended_until, was.stalls_in_row, was.failures_in_row)
        self.speed.is_hopeful = former.speed.pace is not None  # Or it could restart to be tried first, again and again.
        if self.hello.instance and self.hello.instance == former.hello.instance:
            self.speed = former.speed

    def note_answer(self, num_tokens: int) -> None:
        """Count an accepted answer."""
        self.counters.answers += 1
        self.counters.tokens_out += num_tokens
        self.heard.delivered = time.monotonic()
        self.standing = Standing(self.hello.max_concurrent)

    def note_failure(self, suspend_s: float) -> None:
        """Count a failure. After several in a row it gets no request for a while, then one until it has answered."""
        standing = self.standing
        standing.failures_in_row += 1
        if standing.failures_in_row >= _FAILURES_IN_ROW:
            standing.suspended_until = max(standing.suspended_until, time.monotonic() + suspend_s)
            standing.places = 1

    def note_status(self, status: Status, newest_version: int) -> None:
        """Take in a heartbeat."""
        heard = self.heard
        heard.anything = time.monotonic()
        if status.tokens_per_s > 0 or status.version != self.version:
            heard.progress = heard.anything
        self.status, self.version = status, status.version
        self.reports.note(min(self.version, newest_version))

    def placed_at(self) -> list[float]:
        """Return when it was given each request that it holds, monotonic seconds."""
        return [request.running.placed for request in self.leases.values() if request.running is not None]

    def stalled_s(self, now: float) -> float:
        """Return for how long it has held requests without any progress.

        Of a node that streams, what it reports and does not deliver halves the time that counts: it may be slow, and it
        may be lying. Others deliver whole answers, however long those take.
        """
        oldest = min(self.placed_at(), default=now)
        silent_s = now - max(oldest, self.heard.progress)
        if not self.speed.streams:
            return silent_s
        return max(silent_s, (now - max(oldest, self.heard.delivered)) / 2)


class Nodes:
    """All nodes, by id and by connection."""

    def __init__(self) -> None:
        self.trust: defaultdict[str, NodeTrust] = defaultdict(NodeTrust)
        """What audits tell, by node id."""
        self._by_id: dict[str, AttachedNode] = {}
        self._by_identity: dict[bytes, AttachedNode] = {}

    def __iter__(self) -> Iterator[AttachedNode]:
        return iter(self._by_id.values())

    def attached(self) -> list[AttachedNode]:
        return list(self._by_identity.values())

    def at(self, identity: bytes) -> AttachedNode | None:
        """Return the attached node of a connection."""
        return self._by_identity.get(identity)

    def named(self, node_id: str) -> AttachedNode | None:
        """Return the node of this name, attached or away."""
        return self._by_id.get(node_id)

    def holder(self, identity: bytes, hello: NodeHello) -> AttachedNode | None:
        """Return the attached node that has the name in `hello` but is another process."""
        namesake = self._by_id.get(hello.node_id)
        if namesake is None or not namesake.attached or namesake.identity == identity:
            return None
        return None if hello.instance and hello.instance == namesake.hello.instance else namesake

    def add(self, identity: bytes, hello: NodeHello, key: bytes, newest_version: int) -> AttachedNode:
        """Return the new node of connection `identity`. No attached node may have its name or connection."""
        former = self._by_id.pop(hello.node_id, None)
        node = AttachedNode(
            hello=hello,
            identity=identity,
            key=key,
            version=hello.version,
            reports=VersionReports(),
            trust=self.trust[hello.node_id],
            standing=Standing(hello.max_concurrent),
        )
        if former is not None:
            node.take_over(former)
        node.reports.note(min(node.version, newest_version))
        self._by_id[hello.node_id] = self._by_identity[identity] = node
        logger.info(
            "node %s attached: engine %s, %d places, version %d",
            node.node_id,
            hello.engine,
            hello.max_concurrent,
            node.version,
            extra=event("node", text=f"node {node.node_id} connected (engine {hello.engine})"),
        )
        return node

    def remove(self, node: AttachedNode, reason: str) -> bool:
        """Mark `node` as away. Return False when it was that already."""
        if self._by_identity.get(node.identity) is not node:
            return False
        del self._by_identity[node.identity]
        node.attached = False
        held = len(node.leases)
        logger.warning("node %s is gone (%s); it held %d requests", node.node_id, reason, held, extra=event("node"))
        return True

    def snapshot(self, policy: ServedPolicy) -> list[dict[str, Any]]:
        """Return the state of every node, for /metrics."""
        return [_describe(node, policy) for node in self]


def _describe(node: AttachedNode, policy: ServedPolicy) -> dict[str, Any]:
    status, obstacle = node.status, node.cannot_serve(policy)
    reported = ("running", "waiting", "kv_used", "tokens_per_s", "canary_error", "weight_error")
    return {
        "node_id": node.node_id,
        "engine": node.hello.engine,
        "attached": node.attached,
        "serves": obstacle is None,
        "why_not": obstacle,
        "version": node.version,
        "in_flight": len(node.leases),
        "max_concurrent": node.hello.max_concurrent,
        "heard_s_ago": round(time.monotonic() - node.heard.anything, 3),
        **{name: getattr(status, name) if status else None for name in reported},
        **asdict(node.counters),
        "trust": node.expectation,
    }
