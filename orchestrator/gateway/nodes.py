"""The inference nodes of this run: which are attached, their state, the requests they hold, and what they answer.

    Hello -> attached -> (silent for lost_after_s | Goodbye | unreachable) -> away -> Hello -> attached again

A node keeps its counters over a reconnect: they belong to its node_id, not to its connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from composer_prime.errors import RequestError
from composer_prime.monitor.events import event
from composer_prime.wire.node import ComputeDevice, Generate, NodeHello, Sampling, Status
from composer_prime.wire.turns import Prefix, context_overflow
from composer_prime.wire.types import INT
from orchestrator.gateway.adaptive import KV_FULL
from orchestrator.gateway.answers import NodeAnswer, PartialAnswer, VersionReports
from orchestrator.gateway.speed import NodeSpeed
from orchestrator.swarm import NodeTrust

logger = logging.getLogger(__name__)

_COUNTERS = ("answers", "failures", "bad_answers", "late_answers", "garbage", "tokens_out")
UNPROVEN_PLACES = 32
"""As how many places a node counts, at most, whose speed is not measured yet."""
_FAILURES_IN_ROW = 4
"""After this many failures in a row a node gets no request for a while."""
_CONTINUE = ("local", "vllm")
"""The engines that continue another node's answer as if it were their own."""
_FIRST_PLACES, _TOKENS_A_PLACE = 4, 32
"""Requests that a node may hold at first, and delivered tokens for each one more, until its pace is measured."""


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayRequest:
    """A request from its arrival at the gateway to its answer."""

    request_id: str
    session: str
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    since: float
    """When it arrived, monotonic seconds."""
    done: asyncio.Future[NodeAnswer]
    oldest_version: int = 0
    """Nodes with older weights may not answer it."""
    prefix: Prefix | None = None
    """The start of its prompt that the session's newest turn had."""
    node: AttachedNode | None = None
    """None while it waits in the queue."""
    lease: int = 0
    placed: float = 0.0
    """When it went to its node, monotonic seconds."""
    failures: int = 0
    avoid: str | None = None
    """The node on which it failed last."""
    refused_by: set[str] = field(default_factory=set)
    """Nodes that cannot serve it as it stands."""
    last_error: str = ""
    kept: PartialAnswer = field(default_factory=PartialAnswer)
    """What nodes that are gone sampled: its next node continues there."""
    streamed: PartialAnswer = field(default_factory=PartialAnswer)
    """What its present node has sampled so far, after `kept`."""
    last_part: float = 0.0
    """When its node was given it, or last streamed tokens of it, monotonic seconds."""
    load: int = 0
    """Requests that its node held when it got this one, which included."""
    cold: int = 0
    """Prompt tokens that its node had to compute, as far as this gateway knows."""
    twin: GatewayRequest | None = None
    """The same request on a second, faster node. The first answer is used."""

    @property
    def num_prompt(self) -> int:
        """Tokens that its next node begins with."""
        return len(self.prompt_ids) // INT.itemsize + len(self.kept)

    @property
    def num_left(self) -> int:
        """Tokens that its next node may sample at most."""
        return self.sampling.max_tokens - len(self.kept)

    @property
    def num_wanted(self) -> int:
        """Tokens of the prompt and the longest answer together."""
        return self.num_prompt + self.num_left

    @property
    def least_version(self) -> int:
        """Oldest policy version that may continue it: versions never fall within an answer."""
        return max(self.oldest_version, self.kept.newest_version)

    def tokens_on(self, node: AttachedNode) -> int:
        """Return how many tokens it may sample on `node`: what is left, cut where the node's context ends."""
        return int(min(self.num_left, node.context - self.num_prompt))

    def may_go_to(self, node: AttachedNode) -> bool:
        """Whether `node` has not refused it, and may serve it now or later."""
        return not node.draining and node.node_id not in self.refused_by and self.tokens_on(node) >= 1

    def message(self, node: AttachedNode, prefix: Prefix | None) -> Generate:
        """Return what its present `node` is sent, without the tokens of `prefix`, which that one holds."""
        num_held = 0 if prefix is None else prefix.num_tokens
        return Generate(
            request_id=self.request_id,
            lease=self.lease,
            prompt_ids=self.prompt_ids[num_held * INT.itemsize :] + bytes(self.kept.token_ids),
            prefix=prefix,
            sampling=msgspec.structs.replace(self.sampling, max_tokens=self.tokens_on(node), resumed=len(self.kept)),
            session=self.session,
        )

    def fits(self, node: AttachedNode) -> bool:
        """Whether `node` may answer it in full length."""
        return (
            node.context >= self.num_wanted
            and node.version >= self.least_version
            and node.node_id not in self.refused_by
        )


@dataclass(slots=True, kw_only=True)
class RequestCounters:
    """Counts over all requests."""

    requests: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    reissued: int = 0
    late_answers: int = 0
    bad_answers: int = 0
    tokens: int = 0
    """Sampled tokens of accepted answers."""
    tokens_resumed: int = 0
    """Tokens that nodes had streamed before they were gone, and after which others continued."""
    tokens_lost: int = 0
    """Streamed tokens that no answer has. What a node sampled and did not stream is not known."""
    twins: int = 0
    """Requests started a second time because the first node was slow."""
    twins_won: int = 0
    """Of those, answered by the second node."""
    prompt_bytes_sent: int = 0
    """Of token ids in prompts to nodes, 4 bytes each: without the prefixes that they held."""
    prefixes_missing: int = 0
    """Requests whose node wanted the whole prompt."""


@dataclass(slots=True, kw_only=True)
class AttachedNode:
    """One node, attached or away. All times are monotonic seconds."""

    node_id: str
    identity: bytes
    """Routing id of its connection."""
    instance: str
    """Names its process; from its Hello."""
    engine: str
    max_concurrent: int
    """Places that it claims."""
    places: int
    """Requests that it may hold now: what it claims, or 1 after a suspension until it has answered."""
    version: int
    """Policy version it samples with, from its last report."""
    last_heard: float
    last_progress: float
    """When it last gave an answer, reported sampled tokens or installed weights."""
    last_delivered: float
    """When it last gave an answer or a part of one."""
    reports: VersionReports
    key: bytes = b""
    """The public key of its connection; nodes without one of their own share the run's."""
    context: float = math.inf
    """Tokens of prompt and answer together; infinite when it did not say."""
    device: ComputeDevice | None = None
    """As it says; so is its price."""
    usd_per_hour: float | None = None
    attached: bool = True
    draining: bool = False
    status: Status | None = None
    """None before its first heartbeat."""
    cache_is_full: bool = False
    """By its last report, no further conversation fits into its KV cache."""
    trust: NodeTrust = field(default_factory=NodeTrust)
    """What audits of its answers tell; belongs to its name."""
    speed: NodeSpeed = field(default_factory=NodeSpeed)
    """Measured here, from its answers."""
    is_known: bool = False
    """Whether its process served this run before its Hello, perhaps under an earlier start of the orchestrator."""
    idle_since: float | None = None
    """When its heartbeats began to report no request at all; None while it has some."""
    keeps_conversations: bool = False
    """Whether a conversation's cache outlives a swap there."""
    streams: bool = False
    """Whether it has ever delivered a part of an answer."""
    leases: dict[int, GatewayRequest] = field(default_factory=dict)
    """Requests it holds, by lease."""
    suspended_until: float = 0.0
    stalls_in_row: int = 0
    """How often its requests were taken back for lack of progress since its last answer."""
    failures_in_row: int = 0
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

    def cannot_serve(self, now: float, oldest: int, newest: int) -> str | None:
        """Return why it gets no request now, or None when it may get one."""
        if not self.attached:
            return f"gone for {now - self.last_heard:.0f} s"
        if self.draining:
            return "draining"
        if now < self.trust.quarantined_until:
            return f"quarantined for {self.trust.quarantined_until - now:.0f} s: an audit found wrong answers"
        oldest = max(oldest, self.reports.newest)
        if not oldest <= self.version <= newest:
            needed = f"version {oldest}" if oldest >= newest else f"a version in {oldest}..{newest}"
            return f"has policy version {self.version}, needs {needed}"
        if now < self.suspended_until:
            cause = f"{self.stalls_in_row} stalls" if self.stalls_in_row else f"{self.failures_in_row} failures"
            return f"suspended for {self.suspended_until - now:.1f} s after {cause} in a row"
        return None

    @property
    def has_room(self) -> bool:
        """Whether it may get one more request. Until its pace is measured it gets few, as it may be the slowest."""
        places = self.places
        if self.speed.pace is None:
            places = min(places, _FIRST_PLACES + self.speed.tokens // _TOKENS_A_PLACE)
        return len(self.leases) < places

    @property
    def expectation(self) -> float | None:
        """Expected share of right answers, by its audits; 0 in quarantine, None before the first audit."""
        return self.trust.expectation(time.monotonic())

    @property
    def continues(self) -> bool:
        """Whether it continues another such node's answer with the same draws, and finds stops that began there."""
        return self.engine in _CONTINUE

    def rounds_like(self, other: AttachedNode) -> bool:
        """Whether both nodes compute alike, as they say: then the same draws give the same tokens.

        Another count of GPUs or of CPU threads sums in another order.
        """
        one, two = self.device, other.device
        if one is None or two is None or not one.dtype:
            return False
        return (self.engine, one.name, one.count, one.dtype) == (other.engine, two.name, two.count, two.dtype)

    def take_over(self, former: AttachedNode) -> None:
        """Continue as `former` of this name, or a restart would end a suspension. Speed belongs to the process."""
        self.reports = former.reports
        for counter in _COUNTERS:
            setattr(self, counter, getattr(former, counter))
        self.attachments, self.suspended_until = former.attachments + 1, former.suspended_until
        self.stalls_in_row, self.failures_in_row = former.stalls_in_row, former.failures_in_row
        if self.stalls_in_row or self.failures_in_row >= _FAILURES_IN_ROW:
            self.places = 1
        self.speed.is_hopeful = former.speed.pace is not None  # Or it could restart to be tried first, again and again.
        if self.instance and self.instance == former.instance:
            self.speed, self.streams = former.speed, former.streams

    def note_answer(self, num_tokens: int) -> None:
        """Count an accepted answer."""
        self.answers += 1
        self.tokens_out += num_tokens
        self.last_delivered = time.monotonic()
        self.failures_in_row = self.stalls_in_row = 0
        self.suspended_until = 0.0
        self.places = self.max_concurrent

    def note_failure(self, suspend_s: float) -> None:
        """Count a failure. After several in a row it gets no request for a while, then one until it has answered."""
        self.failures_in_row += 1
        if self.failures_in_row >= _FAILURES_IN_ROW:
            self.suspended_until = max(self.suspended_until, time.monotonic() + suspend_s)
            self.places = 1

    def stalled_s(self, now: float) -> float:
        """Return for how long it has held requests without any progress.

        Of a node that streams, what it reports and does not deliver halves the time that counts: it may be slow, and it
        may be lying. Others deliver whole answers, however long those take.
        """
        oldest = min((request.placed for request in self.leases.values()), default=now)
        silent_s = now - max(oldest, self.last_progress)
        return max(silent_s, (now - max(oldest, self.last_delivered)) / 2) if self.streams else silent_s

    @property
    def credible_status(self) -> Status | None:
        """Its last report, with no more requests than it was given; None before its first heartbeat."""
        status, held = self.status, len(self.leases)
        if status is None or max(status.running, status.waiting) <= held:
            return status
        return msgspec.structs.replace(status, running=min(status.running, held), waiting=min(status.waiting, held))


class Nodes:
    """All nodes, by id and by connection."""

    def __init__(self, on_gone: Callable[[AttachedNode, str], None], on_change: Callable[[AttachedNode], None]) -> None:
        """`on_gone(node, reason)` is called once for each departure, after the node was marked as away.

        `on_change(node)` is called when a node has attached or reported.
        """
        self.refused: dict[str, tuple[str, str]] = {}
        """State (EVICTED or BANNED) and reason of names that may not attach."""
        self.trust: defaultdict[str, NodeTrust] = defaultdict(NodeTrust)
        """What audits tell, by node id."""
        self.newest_version = 0
        """The newest that is published."""
        self.contexts: list[float] = []
        """Each context that a node has or had, ascending."""
        self._by_id: dict[str, AttachedNode] = {}
        self._by_identity: dict[bytes, AttachedNode] = {}
        self._on_gone = on_gone
        self._on_change = on_change

    def __iter__(self) -> Iterator[AttachedNode]:
        return iter(self._by_id.values())

    def attached(self) -> list[AttachedNode]:
        return list(self._by_identity.values())

    def at(self, identity: bytes) -> AttachedNode | None:
        """Return the attached node of a connection."""
        return self._by_identity.get(identity)

    def holder(self, identity: bytes, hello: NodeHello) -> AttachedNode | None:
        """Return the attached node that has the name in `hello` but is another process."""
        namesake = self._by_id.get(hello.node_id)
        if namesake is None or not namesake.attached or namesake.identity == identity:
            return None
        return None if hello.instance and hello.instance == namesake.instance else namesake

    def attach(self, identity: bytes, hello: NodeHello, key: bytes = b"") -> AttachedNode:
        """Attach the sender of `hello` on connection `identity`. Requests that it held before count as lost."""
        previous = self._by_identity.get(identity)
        if previous is not None:
            self.leave(previous, "said hello again")
        former = self._by_id.get(hello.node_id)
        if former is not None and former.attached:
            self.leave(former, "came back on a new connection")
        node = AttachedNode(
            node_id=hello.node_id,
            identity=identity,
            instance=hello.instance,
            key=key,
            engine=hello.engine,
            trust=self.trust[hello.node_id],
            max_concurrent=hello.max_concurrent,
            places=hello.max_concurrent,
            version=hello.version,
            reports=VersionReports(),
            last_heard=time.monotonic(),
            last_progress=time.monotonic(),
            last_delivered=time.monotonic(),
            context=math.inf if hello.max_context is None else hello.max_context,
            device=hello.device,
            usd_per_hour=hello.usd_per_hour,
            is_known=hello.run_id is not None,
            keeps_conversations=hello.keeps_conversations,
        )
        if former is not None:
            node.take_over(former)
        node.reports.note(min(node.version, self.newest_version))
        self._by_id.pop(hello.node_id, None)
        self._by_id[hello.node_id] = self._by_identity[identity] = node
        self.contexts = sorted({each.context for each in self})
        self._on_change(node)
        logger.info(
            "node %s attached: engine %s, %d places, version %d",
            node.node_id,
            node.engine,
            node.max_concurrent,
            node.version,
            extra=event("node", text=f"node {node.node_id} connected (engine {node.engine})"),
        )
        return node

    def update_status(self, node: AttachedNode, status: Status) -> None:
        """Take in a heartbeat."""
        now = time.monotonic()
        node.last_heard = now
        if status.tokens_per_s > 0 or status.version != node.version:
            node.last_progress = now
        node.status = status
        node.cache_is_full = status.kv_used > KV_FULL
        node.version = status.version
        node.reports.note(min(node.version, self.newest_version))
        if status.running or status.waiting:
            node.idle_since = None
        elif node.idle_since is None:
            node.idle_since = now
        self._on_change(node)

    def leave(self, node: AttachedNode, reason: str) -> None:
        """Mark `node` as away; its requests go back to the router."""
        if self._by_identity.get(node.identity) is not node:
            return
        del self._by_identity[node.identity]
        node.attached = False
        held = len(node.leases)
        logger.warning("node %s is gone (%s); it held %d requests", node.node_id, reason, held, extra=event("node"))
        self._on_gone(node, reason)

    def largest_context(self, away_s: float) -> float:
        """Return the largest context of the nodes that are attached or were heard within `away_s`, in tokens."""
        since = time.monotonic() - away_s
        return max((node.context for node in self if node.attached or node.last_heard >= since), default=0)

    def lose_silent(self, lost_after_s: float) -> None:
        """Mark every node as away that was silent for longer than `lost_after_s`."""
        now = time.monotonic()
        for node in self.attached():
            if now - node.last_heard > lost_after_s:
                self.leave(node, f"silent for {now - node.last_heard:.1f} s")

    def snapshot(self, oldest: int, newest: int) -> list[dict[str, Any]]:
        """Return the state of every node, for /metrics."""
        return [_describe(node, oldest, newest) for node in self]


def able_nodes(request: GatewayRequest, serving: list[AttachedNode]) -> list[AttachedNode]:
    """Return the nodes that may answer `request`: with room for prompt and answer, else those with the most room.

    None of them if no node has room for the prompt and one token.
    """
    willing = [
        node for node in serving if node.version >= request.least_version and node.node_id not in request.refused_by
    ]
    largest = max((node.context for node in willing), default=0)
    if request.num_prompt >= largest:
        return []
    needed = min(request.num_wanted, largest)
    return [node for node in willing if node.context >= needed]


def node_needs(request: GatewayRequest, contexts: list[float]) -> tuple[int, int, int] | None:
    """Return what is equal for requests that the same nodes may answer; None for one that a node refused.

    `contexts`: of all nodes, ascending. Two lengths between the same two of them make no difference.
    """
    if request.refused_by:
        return None
    length = bisect_left(contexts, request.num_wanted), bisect_left(contexts, request.num_prompt + 1)
    return request.least_version, *length


def too_long(request: GatewayRequest, context: int) -> RequestError:
    """Return the error of a prompt that no known node has room for."""
    return RequestError(
        f"{context_overflow(request.num_prompt, context)}, on the node with the largest context: shorten the "
        "conversation or start a node with a larger --max-context",
        code="context_length_exceeded",
        param="token_ids",
    )


def _describe(node: AttachedNode, oldest: int, newest: int) -> dict[str, Any]:
    now, status = time.monotonic(), node.status
    obstacle = node.cannot_serve(now, oldest, newest)
    reported = ("running", "waiting", "kv_used", "tokens_per_s", "canary_error", "weight_error")
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
        **{name: getattr(status, name) if status else None for name in reported},
        **{name: getattr(node, name) for name in _COUNTERS},
        "attachments": node.attachments,
        "trust": node.expectation,
    }
