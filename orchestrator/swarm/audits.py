"""Answers that wait for an audit: which, by whom, and what a verdict does to nodes and rollouts.

    gateway: offer(answer) --chosen by the node's trust--> Auditors: queue, AuditRequest, AuditVerdict --> trust
                  |                                                                                         |
    rollout ends: cleared(rollout) waits for the audits of new nodes' answers      evidence -> quarantine --+
                                                                 (its unaudited recent rollouts are tainted)

What an answer's auditor cannot check, or is lost with, is not audited.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from composer_prime.config.orchestrator import AuditConfig
from composer_prime.monitor.events import event
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import (
    PROTOCOL,
    Answer,
    AuditRequest,
    AuditVerdict,
    ChunkRequest,
    Dismissed,
    FromAuditor,
    Goodbye,
    Heard,
    NodeHello,
    NodeWelcome,
    PartVerdict,
    Sampling,
    Status,
)
from composer_prime.wire.sockets import NodeSocket
from composer_prime.wire.types import pack_ints
from orchestrator.swarm.trust import NodeTrust, is_clean

logger = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(FromAuditor)
TIMEOUT_S = 300.0
"""For the audits of new nodes' answers; then their rollout fails."""
_MAX_QUEUED = 4096
MAX_QUEUED_BYTES = 512 << 20
"""Of waiting answers; beyond that, the lowest rank is not audited."""
_QUARANTINE_S = 600.0
"""Of the first quarantine; doubles each time."""
_MAX_RECENT = 1024
"""Unaudited rollouts of a node, for the case that it is quarantined."""
_MAX_TAINTED = 1 << 16


@dataclass(slots=True, kw_only=True, eq=False)
class OfferedAnswer:
    """One answer, until its rollout or its audit ends."""

    parts: list[tuple[str, int]]
    """Its nodes in order, each with the number of tokens that it sampled."""
    quarantines: dict[str, int]
    """Of each of its nodes at its arrival."""
    is_awaited: bool
    rank: float
    """Random, one for all answers of a rollout. The highest is audited first."""
    request: AuditRequest | None = None
    """None when it is not to be audited any more."""
    outcome: asyncio.Future[AuditVerdict | str] = field(default_factory=asyncio.Future)
    """A verdict, or why it could not be audited."""

    @property
    def num_bytes(self) -> int:
        one = self.request
        return 0 if one is None else len(one.prompt_ids) + len(one.token_ids) + len(one.logprobs)

    @property
    def verdict(self) -> AuditVerdict | None:
        outcome = self.outcome.result() if self.outcome.done() else None
        return outcome if isinstance(outcome, AuditVerdict) else None

    def end(self, outcome: AuditVerdict | str) -> None:
        self.request = None
        self.outcome.set_result(outcome)


# -- auditors --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class ConnectedAuditor:
    name: str
    places: int
    last_heard: float
    held: dict[int, tuple[OfferedAnswer, float]] = field(default_factory=dict)
    """By audit number, and since when, monotonic seconds."""
    paused_until: float = -math.inf
    """Set when it could not check what another one might."""


class Auditors:
    """What holders of the trainer's key send to the nodes' port comes to `handle`."""

    def __init__(
        self,
        socket: NodeSocket,
        welcome: NodeWelcome,
        store: WeightStore,
        serve_chunk: Callable[[bytes, bytes, ChunkRequest, Callable[..., Any]], None],
    ) -> None:
        self.failed = 0
        """Answers that could not be audited."""
        self.queue: list[OfferedAnswer] = []
        """By rank, the highest last."""
        self.connected: dict[bytes, ConnectedAuditor] = {}
        self.on_verdict: Callable[[OfferedAnswer, AuditVerdict], None]
        self._welcome = welcome
        self._store = store
        self._serve_chunk = serve_chunk
        self._socket = socket

    def tick(self, lost_after_s: float) -> None:
        """Give up silent auditors, and hand out what waits for paused ones."""
        now = time.monotonic()
        for identity, auditor in list(self.connected.items()):
            silent_s = now - auditor.last_heard
            if silent_s > lost_after_s:
                self._lose(identity, f"silent for {silent_s:.1f} s")
        self._place()

    # -- answers -------------------------------------------------------------------------------------------------

    def check(self, answer: OfferedAnswer) -> None:
        """Have an answer with a request checked."""
        self._enqueue(answer)
        self._place()

    def give_up(self, answers: Iterable[OfferedAnswer]) -> None:
        """Hand out these no more. Verdicts under way count for the node."""
        for answer in answers:
            answer.request = None
        self.queue = [answer for answer in self.queue if answer.request is not None]

    def _enqueue(self, answer: OfferedAnswer) -> None:
        insort(self.queue, answer, key=lambda one: one.rank)
        num_bytes = sum(one.num_bytes for one in self.queue)
        while num_bytes > MAX_QUEUED_BYTES or len(self.queue) > _MAX_QUEUED:
            error = f"{len(self.queue)} answers of {num_bytes / 1e6:.1f} MB wait for an auditor"
            num_bytes -= self.queue[0].num_bytes
            self._fail(self.queue.pop(0), f"{error}: start more (inference audit)")

    def _fail(self, answer: OfferedAnswer, error: str) -> None:
        self.failed += 1
        answer.end(error)

    def _place(self) -> None:
        while self.queue and (identity := self._with_room()) is not None:
            answer, auditor = self.queue.pop(), self.connected[identity]
            assert answer.request is not None, "only answers with a request are queued"
            if self._socket.send(identity, answer.request):
                auditor.held[answer.request.audit] = answer, time.monotonic()
            else:  # It never had the answer.
                self._lose(identity, "unreachable")
                self._enqueue(answer)

    def _with_room(self) -> bytes | None:
        """Return the auditor with the largest share of free places, but none that is paused or holds one for long."""
        now = time.monotonic()
        free = [
            (len(one.held) / one.places, identity)
            for identity, one in self.connected.items()
            if len(one.held) < one.places
            and now >= one.paused_until
            and all(since > now - TIMEOUT_S / 2 for _, since in one.held.values())
        ]
        return min(free)[1] if free else None

    def _lose(self, identity: bytes, reason: str) -> None:
        auditor = self.connected.pop(identity)
        logger.warning("auditor %s is gone (%s); it held %d answers", auditor.name, reason, len(auditor.held))
        for answer, _ in auditor.held.values():
            self._fail(answer, f"auditor {auditor.name} was lost with it ({reason})")

    # -- messages ------------------------------------------------------------------------------------------------

    def publish(self, signed: bytes, identities: Iterable[bytes] | None = None) -> None:
        """Tell all auditors, or these, of a version."""
        message = msgspec.structs.replace(self._welcome, manifest=signed, is_news=True)
        self._socket.send_all(self.connected if identities is None else identities, message)

    def handle(self, identity: bytes, body: bytes) -> None:
        try:
            message = _DECODER.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            logger.warning("dropped a message of an auditor: %s (use one release everywhere)", error)
            return
        auditor = self.connected.get(identity)
        if auditor is not None:
            auditor.last_heard = time.monotonic()
        match message:
            case NodeHello():
                self._hello(identity, message)
            case ChunkRequest():
                self._serve_chunk(identity, identity, message, self._socket.send_large)
            case _ if auditor is None:
                self._socket.send(identity, Heard(known=False))
            case AuditVerdict():
                self._take(auditor, message)
            case Status():
                self._socket.send(identity, Heard())
            case Goodbye(reason=reason):
                self._lose(identity, f"said goodbye: {reason[:200]}")
        self._place()

    def _take(self, auditor: ConnectedAuditor, outcome: AuditVerdict) -> None:
        answer, _ = auditor.held.pop(outcome.audit, (None, 0.0))
        if answer is None:
            return
        error, is_its_fault = outcome.error, outcome.retryable
        if error is None and len(outcome.parts) != len(answer.parts):
            error = f"its verdict has {len(outcome.parts)} parts, the answer {len(answer.parts)}: use one release"
            is_its_fault = True
        if error is None:
            self.on_verdict(answer, outcome)
            return
        if is_its_fault:  # It must not look like one that is fast.
            auditor.paused_until = auditor.last_heard + self._welcome.heartbeat_s
        nodes = ", ".join(answer.quarantines)
        logger.warning("auditor %s cannot check an answer of node %s: %s", auditor.name, nodes, error)
        self._fail(answer, f"auditor {auditor.name}: {error}")

    def _hello(self, identity: bytes, hello: NodeHello) -> None:
        reason, is_other_run = None, hello.run_id not in (None, self._welcome.run_id)
        if hello.protocol != PROTOCOL:
            reason = f"the auditor speaks protocol {hello.protocol}, this run {PROTOCOL}: use one release everywhere"
        elif is_other_run:
            reason = f"the auditor served run {hello.run_id!r}, this is run {self._welcome.run_id!r}: restart it"
        if reason is not None:
            self._socket.send(identity, Dismissed(reason=reason, may_return=is_other_run))
            return
        if identity in self.connected:
            self._lose(identity, "said hello again")
        self.connected[identity] = ConnectedAuditor(
            name=hello.node_id, places=max(1, hello.max_concurrent), last_heard=time.monotonic()
        )
        logger.info("auditor %s attached", hello.node_id)
        kept = []
        for version in self._store.versions():
            with suppress(FileNotFoundError):  # The trainer prunes meanwhile.
                kept.append(self._store.manifest(version))
        newest = kept.pop() if kept else b""
        self._socket.send(identity, msgspec.structs.replace(self._welcome, manifest=newest))
        for signed in kept:
            self.publish(signed, [identity])


# -- audits ----------------------------------------------------------------------------------------------------------


class Audits:
    """Chooses answers, and draws conclusions."""

    def __init__(
        self,
        config: AuditConfig,
        auditors: Auditors,
        trust: Mapping[str, NodeTrust],
        on_quarantine: Callable[[str, str], None] = lambda node_id, reason: None,
        chance: Callable[[], float] = random.SystemRandom().random,
    ) -> None:
        """`trust`: by node. `chance()`: in [0, 1), which no node can know."""
        self.counters: defaultdict[str, Any] = defaultdict(int)
        self.auditors = auditors
        auditors.on_verdict = self._note
        self._config = config
        self._trust = trust
        self._on_quarantine = on_quarantine
        self._chance = chance
        self._open: dict[str, list[OfferedAnswer]] = {}
        """By rollout that has not ended."""
        self._recent: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_MAX_RECENT))
        """Rollouts with an unaudited answer, by node."""
        self._tainted: dict[str, None] = {}
        """Those of quarantined nodes, the oldest first."""

    def offer(self, rollout_id: str, prompt_ids: Any, answer: Answer, sampling: Sampling) -> None:
        """Have an answer audited if it is chosen."""
        parts = answer.sampled_by
        nodes = {node_id: self._trust[node_id] for node_id, _ in parts}
        others = self._open.setdefault(rollout_id, [])
        offered = OfferedAnswer(
            parts=parts,
            quarantines={node_id: trust.quarantines for node_id, trust in nodes.items()},
            is_awaited=any(trust.is_new for trust in nodes.values()),
            rank=others[0].rank if others else random.random(),
        )
        others.append(offered)
        self.counters["answers"] += 1
        share = max(trust.share(self._config.floor) for trust in nodes.values())
        if share < 1.0 and self._chance() >= share:
            return
        self.counters["chosen"] += 1
        offered.request = AuditRequest(
            audit=self.counters["chosen"],
            prompt_ids=pack_ints(prompt_ids),
            sampling=sampling,
            tolerance=self._config.tolerance,
            timeout_s=TIMEOUT_S,
            **msgspec.structs.asdict(answer),
        )
        self.auditors.check(offered)

    async def cleared(self, rollout_id: str) -> str | None:
        """Return why an ended rollout must not be used. Waits for the audits of new nodes' answers."""
        answers = self._open.pop(rollout_id, [])
        if late := await self._wait([answer for answer in answers if answer.is_awaited]):
            nodes = sorted({node_id for answer in late for node_id in answer.quarantines})
            return (
                f"waited {TIMEOUT_S:g} s for the audit of {len(late)} answers of new nodes ({', '.join(nodes[:5])}); "
                f"{len(self.auditors.connected)} auditors are connected (inference audit), {len(self.auditors.queue)} "
                "answers are queued"
            )
        if objection := next(filter(None, map(self._objection, answers)), None):
            return objection
        unaudited = [answer for answer in answers if answer.verdict is None]
        for node_id in {name for answer in unaudited for name in answer.quarantines}:
            self._recent[node_id].append(rollout_id)
        return None

    async def _wait(self, answers: list[OfferedAnswer]) -> list[OfferedAnswer]:
        """Return the answers that got no audit in time."""
        try:
            if answers:
                await asyncio.wait([answer.outcome for answer in answers], timeout=TIMEOUT_S)
        finally:
            late = [answer for answer in answers if not answer.outcome.done()]
            self.auditors.give_up(late)
        return late

    def forget(self, rollout_id: str) -> None:
        self.auditors.give_up(self._open.pop(rollout_id, []))

    def is_tainted(self, rollout_ids: Iterable[str]) -> bool:
        """Tell whether a quarantined node sampled some of them unaudited."""
        return bool(self._tainted) and any(name in self._tainted for name in rollout_ids)

    def _objection(self, answer: OfferedAnswer) -> str | None:
        if answer.verdict is not None:
            found = zip(answer.parts, answer.verdict.parts, strict=True)
            faults = [f"node {node_id}: {_describe(part)}" for (node_id, _), part in found if not is_clean(part)]
            return "; ".join(faults) or None
        for node_id, quarantines in answer.quarantines.items():
            if self._trust[node_id].quarantines != quarantines:
                return f"node {node_id} was quarantined, and this answer of it was not audited"
        if answer.is_awaited:
            nodes = ", ".join(answer.quarantines)
            return f"an answer of a new node ({nodes}) could not be audited: {answer.outcome.result()}"
        return None

    def _note(self, answer: OfferedAnswer, verdict: AuditVerdict) -> None:
        answer.end(verdict)
        self.counters["seconds"] += verdict.seconds
        self.counters["audited"] += 1
        self.counters["tokens"] += sum(part.tokens for part in verdict.parts)
        self.counters["wrong"] += not all(map(is_clean, verdict.parts))
        for (node_id, _), part in zip(answer.parts, verdict.parts, strict=True):
            trust = self._trust[node_id]
            if answer.quarantines[node_id] == trust.quarantines and trust.note(part):
                self._quarantine(node_id, trust, f"wrong answers; in its last one {_describe(part)}")

    def _quarantine(self, node_id: str, trust: NodeTrust, why: str) -> None:
        length_s = trust.quarantine(time.monotonic(), _QUARANTINE_S)
        self.counters["quarantines"] += 1
        rollouts = dict.fromkeys(self._recent.pop(node_id, ()))
        self._tainted |= rollouts
        while len(self._tainted) > _MAX_TAINTED:
            del self._tainted[next(iter(self._tainted))]
        reason = f"quarantined for {length_s:.0f} s: {why}"
        text = f"node {node_id} is {reason}"
        lost = f"its {len(rollouts)} unaudited rollouts are dropped unless a batch has them"
        logger.warning("%s; %s", text, lost, extra=event("node", text=text))
        self._on_quarantine(node_id, reason)

    def metrics(self) -> dict[str, float]:
        """Return the numbers for metrics.jsonl, over the whole run."""
        names = ("answers", "chosen", "audited", "wrong", "quarantines", "tokens", "seconds")
        return {
            **{f"audit/{name}": self.counters[name] for name in names},
            "audit/failed": self.auditors.failed,
            "audit/queued": len(self.auditors.queue),
            "audit/auditors": len(self.auditors.connected),
        }


def _describe(verdict: PartVerdict) -> str:
    parts = [f"{len(verdict.wrong)} of {verdict.tokens} tokens are not what its seed draws"] if verdict.wrong else []
    parts += [verdict.fault] if verdict.fault is not None else []
    return f"{'; '.join(parts) or 'no fault'} (logprobs off by {verdict.gap_mean:.2g} nats on average)"
