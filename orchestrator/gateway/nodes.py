"""The inference nodes of this run, the requests that they hold, and where a request goes.

    Hello -> attached -> (silent | Goodbye | unreachable) -> away -> Hello -> attached again

A request goes where it would take the least time, by this gateway's own clock (docs/explanation/routing.md). An answer
of T tokens after C prompt tokens that were not cached, on a node with R requests, takes

    prompt_s x C + max(fastest_s, token_s x R) x T    seconds

`prompt_s` and `token_s` are least squares over the node's answers. `fastest_s` bounds what a single request can have: a
GPU with one request is not faster than with eight.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Set
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from composer_prime.wire.node_messages import NO_TOKENS, Answer, Generate, NodeHello, Status
from composer_prime.wire.types import INT
from orchestrator.swarm import NodeTrust

_FAILURES_IN_ROW = 4
"""After this many failures in a row a node gets no request for a while."""
_MAX_REPORTS = 64
CONTINUE = ("local", "vllm")
"""Engines that continue another node's answer as their own, with stops that began in it."""
_FIRST_PLACES, _TOKENS_A_PLACE = 4, 32
"""Requests that a node may hold, and tokens for each one more, until its pace is measured."""
UNPROVEN_PLACES = 32
"""At most so many places count of a node whose speed is not measured."""
_LEAST_ANSWERS = 3
"""Answers from which a node counts as measured."""
_FORGET = 0.95
"""Weight of the past at each answer: about twenty answers count."""
_PREFILL_GAIN = 20.0
"""Prompt tokens a second over sampled tokens a second, until the answers tell them apart."""
_PRIOR = 0.2
"""How much of an answer that ratio counts as, in the fit."""
_LEAST_SAMPLING = 0.25
"""Share of an answer's time that its tokens took at least, however long its prompt."""
_GAIN_RANGE = (0.5, 400.0)
_MOST_ABOVE_MEDIAN = 16.0
_MAX_SESSIONS = 1 << 16
_STAY_FACTOR, _STAY_S = 1.5, 1.0
"""A conversation leaves its node when a turn takes this many times as long there, plus so many seconds."""
_IDLE_S = 600.0
_FULL_FROM, _CROWDED = 0.9, 16.0
"""From this share on a KV cache is full for a new conversation, and its node so many times slower."""
_MEAN_OVER, _MEAN_CONTEXT_OVER = 0.05, 0.005
"""Weight of the newest answer in the running means."""
_UPDATE_EVERY = 32


class ServedPolicy:
    """The policy that is served: its vocabulary, and its versions."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.oldest = 0
        """Nodes with older weights get no request: they are catching up."""
        self.newest = 0
        """Nodes with newer weights get no request: their future was rewound."""
        self.published: set[int] = set()
        """Those that there were; the numbers jump in joint runs."""

    def publish(self, version: int) -> None:
        """A trainer that resumed may publish a version again."""
        self.newest = version
        self.oldest = min(self.oldest, version)
        self.published = {old for old in self.published if old < version} | {version}


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Running:
    """A node holds a request since `placed`, monotonic seconds."""

    node: AttachedNode
    lease: int
    placed: float
    load: int
    """Requests that the node held then, with this one."""
    cold: int
    """Prompt tokens that the node had to compute."""
    streamed: Answer = NO_TOKENS
    """Sampled so far, after what is kept."""


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayRequest:
    """From its arrival, at `since` in monotonic seconds, to its answer."""

    asked: Generate
    """Prompt and sampling as they came; its lease is none of a node."""
    since: float
    done: asyncio.Future[Answer]
    oldest_version: int = 0
    running: Running | None = None
    """None while it waits for a node, and once it is done."""
    kept: Answer = NO_TOKENS
    """What nodes that are gone sampled: the next one continues there."""
    failures: int = 0
    avoid: str | None = None
    refused_by: set[str] = field(default_factory=set)
    last_error: str = ""
    row: OrderedDict[str, GatewayRequest] | None = None
    """Those with equal needs that wait with it; None while it does not wait."""
    turn: int = 0

    @property
    def num_prompt(self) -> int:
        """Tokens that its next node begins with, those of `kept` included."""
        return len(self.asked.prompt_ids) // INT.itemsize + len(self.kept)

    @property
    def num_left(self) -> int:
        return self.asked.sampling.max_tokens - len(self.kept)

    @property
    def least_version(self) -> int:
        """Versions never fall within an answer."""
        return max(self.oldest_version, self.kept.newest_version)

    @property
    def needs(self) -> Hashable:
        """What decides which nodes may run it."""
        return self.least_version, frozenset(self.refused_by), bool(self.kept)

    def may_run_on(self, node: AttachedNode) -> bool:
        return node.version >= self.least_version and node.node_id not in self.refused_by

    def message(self, lease: int) -> Generate:
        asked, num_kept = self.asked, len(self.kept)
        sampling = msgspec.structs.replace(asked.sampling, max_tokens=self.num_left, resumed=num_kept)
        prompt_ids = self.asked.prompt_ids + self.kept.token_ids
        return msgspec.structs.replace(asked, lease=lease, prompt_ids=prompt_ids, sampling=sampling)


class RequestQueue:
    """Requests without a node, in rows of equal needs: where the first waits, its whole row does."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, OrderedDict[str, GatewayRequest]] = {}
        self._turns = itertools.count(1)

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def values(self) -> list[GatewayRequest]:
        return [request for row in self._rows.values() for request in row.values()]

    def add(self, request: GatewayRequest, *, is_first: bool = False) -> None:
        request_id, turn = request.asked.request_id, next(self._turns)
        request.turn = -turn if is_first else turn
        request.row = self._rows.setdefault(request.needs, OrderedDict())
        request.row[request_id] = request
        request.row.move_to_end(request_id, last=not is_first)

    def discard(self, request: GatewayRequest) -> None:
        if request.row is not None:
            del request.row[request.asked.request_id]
            request.row = None

    def first(self, unmet: Set[Hashable]) -> tuple[Hashable, GatewayRequest] | None:
        """Return whose turn it is, behind its needs, which are none of `unmet`."""
        self._rows = {needs: row for needs, row in self._rows.items() if row}
        heads = [(needs, next(iter(row.values()))) for needs, row in self._rows.items() if needs not in unmet]
        return min(heads, key=lambda head: head[1].turn, default=None)


# -- nodes -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    """What all processes of one name did: a restart must not end a suspension."""

    trust: NodeTrust
    answers: int = 0
    tokens_out: int = 0
    failures: int = 0
    bad_answers: int = 0
    """Answers that check_sampled refused."""
    suspended_until: float = 0.0
    stalls_in_row: int = 0
    """Stalls since its last answer."""
    failures_in_row: int = 0
    newest_version: int = 0
    """With an older one it gets no request."""
    first_reported: dict[int, float] = field(default_factory=dict)
    """When it first reported its last versions, monotonic seconds."""

    @property
    def is_on_trial(self) -> bool:
        """Tell whether it gets one request at a time."""
        return self.stalls_in_row > 0 or self.failures_in_row >= _FAILURES_IN_ROW

    def note_answer(self, num_tokens: int) -> None:
        self.answers += 1
        self.tokens_out += num_tokens
        self.suspended_until, self.stalls_in_row, self.failures_in_row = 0.0, 0, 0

    def note_failure(self, suspend_s: float) -> None:
        self.failures_in_row += 1
        if self.failures_in_row >= _FAILURES_IN_ROW:
            self.suspended_until = max(self.suspended_until, time.monotonic() + suspend_s)

    def note_version(self, version: int) -> None:
        """Versions only rise: going back to one is no swap."""
        if version > self.newest_version:
            self.newest_version = version
            self.first_reported[version] = time.monotonic()
            if len(self.first_reported) > _MAX_REPORTS:
                del self.first_reported[min(self.first_reported)]

    def forget_version(self, version: int) -> None:
        """Forget this and later ones: a trainer that resumed publishes them again."""
        self.newest_version = min(self.newest_version, version - 1)
        self.first_reported = {old: time_s for old, time_s in self.first_reported.items() if old < version}


@dataclass(slots=True, kw_only=True)
class AttachedNode:
    """One node, attached or away. Times are monotonic seconds."""

    hello: NodeHello
    """What it says of itself; nothing checks engine, device and price."""
    identity: bytes
    key: bytes
    """Of its connection; nodes without one of their own share the run's."""
    record: NodeRecord
    speed: NodeSpeed
    """Of this process."""
    attached: bool = True
    draining: bool = False
    status: Status | None = None
    leases: dict[int, GatewayRequest] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    """When it last sent a heartbeat."""
    progress: float = field(default_factory=time.monotonic)
    """When it last answered, reported sampled tokens or installed weights."""
    delivered: float = field(default_factory=time.monotonic)
    """When it last gave an answer or a part of one."""

    @property
    def node_id(self) -> str:
        return self.hello.node_id

    @property
    def version(self) -> int:
        return self.hello.version if self.status is None else self.status.version

    @property
    def places(self) -> int:
        """How many requests it may hold; few until its pace is measured: it may be the slowest."""
        places = 1 if self.record.is_on_trial else self.hello.max_concurrent
        if self.speed.pace is None:
            places = min(places, _FIRST_PLACES + self.speed.tokens // _TOKENS_A_PLACE)
        return places

    @property
    def has_room(self) -> bool:
        return len(self.leases) < self.places

    def is_current(self, policy: ServedPolicy) -> bool:
        return max(policy.oldest, self.record.newest_version) <= self.version <= policy.newest

    def cannot_serve(self, policy: ServedPolicy) -> str | None:
        """Return why it gets no request now."""
        record, now = self.record, time.monotonic()
        if not self.attached:
            return f"gone for {now - self.heard:.0f} s"
        if self.draining:
            return "draining"
        if now < record.trust.quarantined_until:
            left_s = record.trust.quarantined_until - now
            return f"quarantined for {left_s:.0f} s: an audit found wrong answers"
        if not self.is_current(policy):
            oldest, newest = max(policy.oldest, record.newest_version), policy.newest
            needed = f"version {oldest}" if oldest >= newest else f"a version in {oldest}..{newest}"
            return f"has policy version {self.version}, needs {needed}"
        if now < record.suspended_until:
            stalls, failures = record.stalls_in_row, record.failures_in_row
            cause = f"{stalls} stalls" if stalls else f"{failures} failures"
            return f"suspended for {record.suspended_until - now:.1f} s after {cause} in a row"
        return None

    def placed_at(self) -> list[float]:
        return [request.running.placed for request in self.leases.values() if request.running is not None]

    def stalled_s(self, now: float) -> float:
        """Return for how long it has held requests without any progress.

        Of a node that streams, what it reports and does not deliver counts half: it may be slow, or lie. Others deliver
        whole answers, however long those take.
        """
        oldest = min(self.placed_at(), default=now)
        silent_s = now - max(oldest, self.progress)
        if not self.speed.streams:
            return silent_s
        return max(silent_s, (now - max(oldest, self.delivered)) / 2)


# -- pace ------------------------------------------------------------------------------------------------------------


class Pace(NamedTuple):
    """Seconds a token; see the module's formula."""

    prompt_s: float
    token_s: float
    fastest_s: float = 0.0

    def seconds(self, cold: float, sampled: float, load: int) -> float:
        return self.prompt_s * cold + max(self.fastest_s, self.token_s * load) * sampled


class NodeSpeed:
    """Running sums over one node's answers."""

    def __init__(self, *, is_hopeful: bool = True) -> None:
        self.answers = 0
        self.tokens = 0
        self.pace: Pace | None = None
        self.streams = False
        """Whether its node ever delivered a part of an answer."""
        self.is_hopeful = is_hopeful
        """Whether it counts as fast while idle and not measured, to be tried at all."""
        self._squares, self._times = np.zeros((2, 2)), np.zeros(2)
        """Of (cold tokens, work) by one another, and by seconds."""
        self._weight = 0.0

    def note(self, elapsed_s: float, *, cold: int, sampled: int, load: float) -> None:
        """Take in an answer. `load`: mean requests that the node held."""
        self.answers += 1
        answer = np.array([cold, sampled * load], dtype=float)
        self._squares = _FORGET * self._squares + np.outer(answer, answer)
        self._times = _FORGET * self._times + answer * elapsed_s
        self._weight = _FORGET * self._weight + 1.0
        if self.answers >= _LEAST_ANSWERS:
            self.pace = self._fit(elapsed_s, cold, sampled)

    def _fit(self, elapsed_s: float, cold: int, sampled: int) -> Pace:
        """Solve for both rates, drawn towards their usual ratio."""
        usual = np.array([1.0 / _PREFILL_GAIN, 1.0])
        usual *= (usual @ self._times) / (usual @ self._squares @ usual)
        drawn = self._squares * (1 + np.eye(2) * _PRIOR / self._weight) + np.diag([1e-9, 0.0])
        rates = usual + np.linalg.solve(drawn, self._times - self._squares @ usual)
        prompt, token = float(rates[0]), max(float(rates[1]), 1e-9)
        low, high = _GAIN_RANGE
        prompt = min(max(prompt, token / high), token / low)
        # It rises slowly, so that a node that has slowed down is believed again.
        fastest = max(_LEAST_SAMPLING * elapsed_s, elapsed_s - prompt * cold) / sampled
        if self.pace is not None:
            fastest = min(fastest, 1.02 * self.pace.fastest_s)
        return Pace(prompt, token, fastest)


# -- the choice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WarmPrefix:
    """What a node has cached of a conversation, since then in monotonic seconds."""

    node_id: str
    tokens: int
    size: int
    """Tokens that it takes there, those to be computed included."""
    version: int
    """Most nodes do not use a cache of older weights."""
    since: float


class Placing:
    """What the choice of a node rests on: the pace of all, and where conversations are warm."""

    def __init__(self) -> None:
        self.median: Pace | None = None
        """Of the measured nodes: an unmeasured one counts as this, and it bounds the others."""
        self.mean_sampled = 256.0
        """Tokens of an answer; a running mean."""
        self.mean_context = 0.0
        """Tokens of a conversation after a turn; a running mean."""
        self.warm_tokens = self.prompt_tokens = 0
        """Of all answers: prompt tokens that their nodes had cached, for whatever conversation, and all."""
        self._sessions: OrderedDict[str, WarmPrefix] = OrderedDict()
        """The one that had a turn last comes last."""
        self._sizes: Counter[str] = Counter()
        """Tokens of conversations by node id, without what is being sampled."""
        self._answers = 0
        # Random: an answer to a lease of an earlier orchestrator must not match.
        self._leases = itertools.count(secrets.randbits(48))

    def node_of(self, request: GatewayRequest) -> str | None:
        """Return the node of the conversation's last turn."""
        known = self._sessions.get(request.asked.session)
        return None if known is None else known.node_id

    def choose(self, request: GatewayRequest, free: list[AttachedNode]) -> AttachedNode:
        best = min(free, key=lambda node: self._rank(request, node))
        own = self.node_of(request)
        warm = next((node for node in free if node.node_id == own), best)
        if warm is best or warm.node_id == request.avoid:
            return best
        here, there = self.crowding(request, warm), self.crowding(request, best)
        if there > 1:  # It would take the room of others, so its own lack of room is no reason.
            here = 1.0
        if here == 1 and None in (self.median, warm.speed.pace, best.speed.pace):  # Then paces tell only loads apart.
            return warm
        if here * self.seconds(request, warm) <= _STAY_FACTOR * there * self.seconds(request, best) + _STAY_S:
            return warm
        return best

    def _rank(self, request: GatewayRequest, node: AttachedNode) -> tuple[bool, float, str]:
        seconds = self.seconds(request, node, hopeful=True)
        return node.node_id == request.avoid, seconds * self.crowding(request, node), node.node_id

    def seconds(self, request: GatewayRequest, node: AttachedNode, *, hopeful: bool = False) -> float:
        """Return the time on `node`. A `hopeful` one that is not measured has no `fastest_s`, to be tried at all."""
        pace, speed = self.pace(node), node.speed
        if hopeful and speed.pace is None and speed.is_hopeful:
            pace = Pace(pace.prompt_s, pace.token_s)
        sampled = max(1.0, min(self.mean_sampled, request.num_left))
        return pace.seconds(self.cold(request, node), sampled, len(node.leases) + 1)

    def pace(self, node: AttachedNode) -> Pace:
        """Return the pace to reckon with. A node without one is slower, the fewer places it has."""
        usual, pace = self.median, node.speed.pace
        places_share = min(node.hello.max_concurrent, UNPROVEN_PLACES) / UNPROVEN_PLACES
        if usual is None:
            return Pace(1.0 / _PREFILL_GAIN, 1.0 / places_share)
        if pace is None:
            return Pace(usual.prompt_s, usual.token_s / places_share, usual.fastest_s)
        return Pace(*(max(own, most / _MOST_ABOVE_MEDIAN) for own, most in zip(pace, usual, strict=True)))

    def cold(self, request: GatewayRequest, node: AttachedNode) -> int:
        warm = self._sessions.get(request.asked.session)
        if warm is None or (warm.node_id, warm.version) != (node.node_id, node.version):
            return request.num_prompt
        return max(1, request.num_prompt - warm.tokens)

    def crowding(self, request: GatewayRequest, node: AttachedNode) -> float:
        """Return how many times as slow `node` counts: more than once without room in its KV cache.

        A conversation that joins others counts as an average one at least, and leaves some room: they grow.
        """
        warm = self._sessions.get(request.asked.session)
        joins = warm is None or warm.node_id != node.node_id
        room, used = (node.status.kv_tokens, node.status.kv_used) if node.status is not None else (0, 0.0)
        size = float(self._sizes[node.node_id])
        if joins:
            size += max(request.num_prompt, self.mean_context if size else 0.0)
        is_full = room > 0 and size > (_FULL_FROM if joins else 1.0) * room
        return _CROWDED if is_full or (used > _FULL_FROM and (joins or not room)) else 1.0

    # -- what happens --------------------------------------------------------------------------------------------

    def note_placed(self, request: GatewayRequest, node: AttachedNode) -> Running:
        """Call it before the request is counted at `node`."""
        cold, size, now = self.cold(request, node), request.num_prompt, time.monotonic()
        warm = self._sessions.get(request.asked.session)
        if warm is None or warm.node_id != node.node_id:
            warm = WarmPrefix(node.node_id, 0, size, node.version, now)
        self._remember(request.asked.session, replace(warm, size=max(warm.size, size), since=now))
        return Running(node, next(self._leases), now, load=len(node.leases) + 1, cold=cold)

    def note_answer(
        self, request: GatewayRequest, running: Running, answer: Answer, nodes: Iterable[AttachedNode]
    ) -> None:
        """Take in an answer. Its node, one of `nodes`, no longer holds the request."""
        node, session, now, sampled = running.node, request.asked.session, time.monotonic(), len(answer)
        self.prompt_tokens += request.num_prompt
        self.warm_tokens += min(max(answer.prompt_cached, 0), request.num_prompt)
        load = (running.load + len(node.leases) + 1) / 2
        node.speed.note(max(now - running.placed, 1e-6), cold=running.cold, sampled=sampled, load=load)
        self.mean_sampled += _MEAN_OVER * (sampled - self.mean_sampled)
        self._answers += 1
        size = request.num_prompt + sampled
        self.mean_context += max(_MEAN_CONTEXT_OVER, 1 / self._answers) * (size - self.mean_context)
        if session != request.asked.request_id:  # Else it is of no conversation.
            self._remember(session, WarmPrefix(node.node_id, size, size, node.version, now))
        if self._answers % _UPDATE_EVERY == 0:
            self.update_median(other.speed for other in nodes)

    def update_median(self, speeds: Iterable[NodeSpeed]) -> None:
        if paces := [speed.pace for speed in speeds if speed.pace is not None]:
            self.median = Pace(*map(median, zip(*paces, strict=True)))

    def _remember(self, session: str, warm: WarmPrefix) -> None:
        self.forget(session)
        self._sessions[session] = warm
        self._sizes[warm.node_id] += warm.size
        oldest = next(iter(self._sessions))
        while len(self._sessions) > _MAX_SESSIONS or self._sessions[oldest].since < warm.since - _IDLE_S:
            self.forget(oldest)
            oldest = next(iter(self._sessions))

    def forget(self, session: str) -> None:
        warm = self._sessions.pop(session, None)
        if warm is not None:
            self._sizes[warm.node_id] -= warm.size
