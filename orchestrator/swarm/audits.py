"""Answers that wait for an audit, and the link to the auditors.

    gateway: offer(answer) --chosen by the node's trust--> queue --AuditRequest--> auditor --AuditVerdict--> trust
                  |                                                                                           |
    rollout ends: cleared(rollout) waits for the audits of new nodes' answers        evidence -> quarantine --+
                                                                    (its unaudited recent rollouts are tainted)

Which answers are audited is drawn after they came, by the operating system's randomness: a node cannot know. A rollout
waits at most five minutes. Everything runs on one event loop.

Auditors may be too slow for all answers. Then rollouts are served by a rank that each draws when it begins, so some get
all of their verdicts in time. An auditor gets no more while it has held an answer for half of `timeout_s`, and drops an
answer when `timeout_s` is over. One that hangs costs what it holds: nobody waits for that in the end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from bisect import insort
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from composer_prime.config import Config
from composer_prime.monitor.events import event
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import (
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
    Status,
    ToAuditor,
)
from composer_prime.wire.sockets import NodeSocket
from composer_prime.wire.types import pack_ints
from orchestrator.event_loop import watched
from orchestrator.swarm.auditors import ConnectedAuditor, OfferedAnswer
from orchestrator.swarm.trust import NodeTrust, is_clean

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""How long a rollout waits for audits of new nodes' answers before it fails."""
_QUARANTINE_S = 600.0
"""How long a node gets no requests after a failed audit; doubles each time."""
_MAX_QUEUED = 4096
_MAX_QUEUED_BYTES = 512 << 20
"""Answers that wait for an auditor, and their bytes; beyond that, those of the lowest rank count as not audited."""
_MAX_AUDITORS = 2
"""Auditors that may get an answer, one after the other: it may be what ends them."""
_MAX_RECENT = 1024
"""Unaudited rollouts of a node that are remembered, for the case that it is quarantined."""
_MAX_TAINTED = 1 << 16


class ChunkSender(Protocol):
    """Sends chunks of weights to who asks for them."""

    def serve(self, account: bytes, identity: bytes, request: ChunkRequest, send: Callable[..., Any]) -> None: ...


class SampledAnswer(Protocol):
    """An answer as the gateway recorded it."""

    @property
    def prompt_ids(self) -> Any: ...

    @property
    def answer(self) -> Answer: ...

    @property
    def sampling(self) -> Any: ...


class Audits:
    """Serves auditors from `start` to `close`."""

    def __init__(
        self,
        config: Config,
        *,
        keys: RunKeys,
        run_id: str,
        store: WeightStore,
        chunks: ChunkSender,
        trust: Mapping[str, NodeTrust],
        on_quarantine: Callable[[str, str], None] = lambda node_id, reason: None,
        chance: Callable[[], float] = random.SystemRandom().random,
        clock: Callable[[], float] = time.monotonic,
        max_queued_bytes: int = _MAX_QUEUED_BYTES,
    ) -> None:
        """`trust` holds every node's, by id. `chance()` returns a number in [0, 1) that no node can know.
        `clock()` returns seconds, by which auditors are slow, silent or paused.

        Raises ConfigError when the trainer's key, the only one that is admitted, is missing.
        """
        self.counters: Counter[str] = Counter()
        self._config = config.orchestrator.audit
        self._keys = keys
        self._run_id = run_id
        self._store = store
        self._chunks = chunks
        self._trust = trust
        self._heartbeat_s = config.inference.heartbeat_s
        self._lost_after_s = config.inference.lost_after_s
        self._on_quarantine = on_quarantine
        self._chance = chance
        self._clock = clock
        self._max_queued_bytes = max_queued_bytes
        self._seconds = 0.0
        self._open: dict[str, list[OfferedAnswer]] = {}
        """By rollout that has not ended."""
        self._queue: list[OfferedAnswer] = []
        """By rank, the highest last."""
        self._recent: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_MAX_RECENT))
        """Rollouts with an answer that was not audited, by node."""
        self._tainted: OrderedDict[str, None] = OrderedDict()
        self._auditors: dict[bytes, ConnectedAuditor] = {}
        self._socket = NodeSocket(
            keys, config.model.max_context, frozenset([keys.curve("trainer").public]).__contains__
        )
        self._decoder = msgspec.msgpack.Decoder(FromAuditor)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def endpoint(self) -> str:
        """Return the address as it is bound."""
        return self._socket.endpoint

    def start(self, on_error: Callable[[BaseException], None]) -> None:
        """Raise PortInUseError when another process holds the address, ConfigError when a key is missing."""
        self._socket.bind(self._config.address)
        self._tasks = [watched(self._receive(), on_error), watched(self._tick(), on_error)]

    async def close(self, *, finished: bool = False) -> None:
        """Stop serving. With `finished`, auditors learn that the run is over and leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for identity in self._auditors if finished else ():
            self._send(identity, Dismissed(reason="the run is finished", finish_first=True))
        await self._socket.close()

    # -- answers -------------------------------------------------------------------------------------------------

    def offer(self, record: SampledAnswer, rollout_id: str) -> None:
        """Take note of an answer that was recorded for an open rollout, and have it audited if it is chosen."""
        parts = tuple(record.answer.sampled_by)
        nodes = {node_id: self._trust[node_id] for node_id, _ in parts}
        others = self._open.setdefault(rollout_id, [])
        answer = OfferedAnswer(
            parts=parts,
            rollout_id=rollout_id,
            quarantines={node_id: trust.quarantines for node_id, trust in nodes.items()},
            is_awaited=any(trust.is_new for trust in nodes.values()),
            rank=others[0].rank if others else random.random(),
        )
        others.append(answer)
        self.counters["answers"] += 1
        share = max(trust.share(self._config.floor) for trust in nodes.values())
        if share < 1.0 and self._chance() >= share:
            return
        self.counters["chosen"] += 1
        answer.request = AuditRequest(
            audit=self.counters["chosen"],
            prompt_ids=pack_ints(record.prompt_ids),
            sampling=record.sampling,
            tolerance=self._config.tolerance,
            timeout_s=TIMEOUT_S,
            **msgspec.structs.asdict(record.answer),
        )
        self._enqueue(answer)
        self._place()

    def _enqueue(self, answer: OfferedAnswer) -> None:
        insort(self._queue, answer, key=lambda one: one.rank)
        num_bytes = sum(one.num_bytes for one in self._queue)
        while num_bytes > self._max_queued_bytes or len(self._queue) > _MAX_QUEUED:
            error = f"{len(self._queue)} answers of {num_bytes / 1e6:.1f} MB wait for an auditor"
            num_bytes -= self._queue[0].num_bytes
            self._fail(self._queue.pop(0), f"{error}: start more (inference audit)")

    async def cleared(self, rollout_id: str) -> str | None:
        """Return why a rollout that has ended must not be used; None when nothing speaks against it.

        Waits for the audits of new nodes' answers, at most TIMEOUT_S.
        """
        answers = self._open.pop(rollout_id, [])
        if late := await self._wait([answer for answer in answers if answer.is_awaited]):
            return self._too_late(late)
        if objection := next(filter(None, map(self._objection, answers)), None):
            return objection
        for node_id in {name for answer in answers if answer.verdict is None for name in answer.quarantines}:
            self._recent[node_id].append(rollout_id)
        return None

    async def _wait(self, answers: list[OfferedAnswer]) -> list[OfferedAnswer]:
        """Wait for audits. Return the answers that got none in time; they are given up, also when this is cancelled."""
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    for answer in answers:
                        await answer.done.wait()
            finally:
                self._give_up(answer for answer in answers if not answer.done.is_set())
        return [answer for answer in answers if not answer.done.is_set()]

    def forget(self, rollout_id: str) -> None:
        """Forget a rollout whose answers will not be used."""
        self._give_up(self._open.pop(rollout_id, []))

    def _give_up(self, answers: Iterable[OfferedAnswer]) -> None:
        """Remove answers that are no longer awaited from the queue. Verdicts under way count for the node."""
        for answer in answers:
            answer.is_unwanted = True
        self._queue = [answer for answer in self._queue if not answer.is_unwanted]

    def _fail(self, answer: OfferedAnswer, error: str) -> None:
        self.counters["failed"] += 1
        answer.end(None, error)

    def is_tainted(self, rollout_ids: Iterable[str]) -> bool:
        """Tell whether a node that is now quarantined sampled one of these rollouts, and it was not audited."""
        return bool(self._tainted) and any(name in self._tainted for name in rollout_ids)

    def _too_late(self, answers: list[OfferedAnswer]) -> str:
        nodes = sorted({node_id for answer in answers for node_id in answer.quarantines})
        connected = f"{len(self._auditors)} auditors are connected" if self._auditors else "no auditor is connected"
        return (
            f"waited {TIMEOUT_S:g} s for the audit of {len(answers)} "
            f"answers of new nodes ({', '.join(nodes[:5])}); {connected} (inference audit), "
            f"{len(self._queue)} answers are queued"
        )

    def _objection(self, answer: OfferedAnswer) -> str | None:
        if answer.verdict is not None:
            found = zip(answer.parts, answer.verdict.parts, strict=True)
            faults = [f"node {node_id}: {_describe(part)}" for (node_id, _), part in found if not is_clean(part)]
            return "; ".join(faults) or None
        for node_id, quarantines in answer.quarantines.items():
            if self._trust[node_id].quarantines != quarantines:
                return f"node {node_id} was quarantined, and this answer of it was not audited"
        if answer.is_awaited and answer.error is not None:
            return f"an answer of a new node ({answer.nodes}) could not be audited: {answer.error}"
        return None

    def _note(self, answer: OfferedAnswer, verdict: AuditVerdict) -> None:
        answer.end(verdict)
        self._seconds += verdict.seconds
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
        rollouts = set(self._recent.pop(node_id, ()))
        for name in rollouts:
            self._tainted[name] = None
        while len(self._tainted) > _MAX_TAINTED:
            self._tainted.popitem(last=False)
        reason = f"quarantined for {length_s:.0f} s: {why}"
        logger.warning(
            "node %s is %s; its %d unaudited rollouts are dropped unless a batch has them",
            node_id,
            reason,
            len(rollouts),
            extra=event("node", text=f"node {node_id} is {reason}"),
        )
        self._on_quarantine(node_id, reason)

    # -- auditors ------------------------------------------------------------------------------------------------

    def publish(self, signed: bytes) -> None:
        """Tell the auditors of a new version."""
        for identity in self._auditors:
            self._send(identity, self._welcome_with(signed))

    def _place(self) -> None:
        """Hand waiting answers to auditors with room, the highest rank first."""
        while self._queue and (identity := self._with_room()) is not None:
            answer = self._queue.pop()
            if not self._hand(answer, identity):
                self._enqueue(answer)

    def _with_room(self) -> bytes | None:
        """Return the auditor that uses the least of its places; None when none has room."""
        now = self._clock()
        since = now - TIMEOUT_S / 2
        free = [(len(one.held) / one.places, key) for key, one in self._auditors.items() if one.has_room(now, since)]
        return min(free)[1] if free else None

    def _hand(self, answer: OfferedAnswer, identity: bytes) -> bool:
        """Return False when the auditor turns out to be gone. Then it never had the answer."""
        assert answer.request is not None
        if not self._send(identity, answer.request):
            self._lose(identity, "unreachable")
            return False
        answer.handed += 1
        self._auditors[identity].held[answer.request.audit] = answer, self._clock()
        return True

    def _lose(self, identity: bytes, reason: str) -> None:
        auditor = self._auditors.pop(identity)
        logger.warning("auditor %s is gone (%s); it held %d answers", auditor.name, reason, len(auditor.held))
        for answer, _ in auditor.held.values():
            self._pass_on(answer, f"{answer.handed} auditors were lost with it, the last one {auditor.name} ({reason})")
            if answer.error is not None:
                logger.warning("an answer of node %s is not audited: %s", answer.nodes, answer.error)

    def _pass_on(self, answer: OfferedAnswer, error: str, *, retry: bool = True) -> None:
        """Queue an answer anew that an auditor did not end. Without `retry` it fails."""
        if not retry or answer.handed >= _MAX_AUDITORS:
            self._fail(answer, error)
        elif not answer.is_unwanted:
            self._enqueue(answer)

    def _give_up_overdue(self, auditor: ConnectedAuditor, now: float) -> None:
        """Expect no more what an auditor should have ended, or dropped, long ago."""
        for number, (answer, since) in list(auditor.held.items()):
            if (held_s := now - since) >= TIMEOUT_S + self._lost_after_s:
                del auditor.held[number]
                error = f"auditor {auditor.name} gave no verdict on an answer of {answer.nodes} for {held_s:.0f} s"
                logger.warning("%s: see its log for a hanging engine", error)
                self._fail(answer, error)

    async def _receive(self) -> None:
        while True:
            received = await self._socket.receive()
            try:
                if received.num_frames != 1:
                    raise msgspec.DecodeError(f"{received.num_frames} frames, expected 1")
                message = self._decoder.decode(received.first)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                logger.warning("dropped a message to the audit listener: %s (use one release everywhere)", error)
                continue
            self._handle(received.identity, message)

    def _handle(self, identity: bytes, message: FromAuditor) -> None:
        auditor = self._auditors.get(identity)
        if auditor is not None:
            auditor.last_heard = self._clock()
        match message:
            case NodeHello():
                self._welcome(identity, message)
            case ChunkRequest():
                self._chunks.serve(identity, identity, message, self._socket.send_large)
            case _ if auditor is None:
                self._send(identity, Heard(known=False))
            case AuditVerdict():
                if (held := auditor.held.pop(message.audit, None)) is not None:
                    answer, _ = held
                    if message.error is None and len(message.parts) != len(answer.parts):
                        error = f"its verdict has {len(message.parts)} parts, the answer {len(answer.parts)}"
                        message = AuditVerdict(audit=message.audit, error=f"{error}: use one release", retryable=True)
                    if message.retryable:
                        auditor.paused_until = auditor.last_heard + self._heartbeat_s
                    self._take(auditor, answer, message)
            case Status():
                self._send(identity, Heard())
            case Goodbye(reason=reason):
                self._lose(identity, f"said goodbye: {reason[:200]}")
        self._place()

    def _take(self, auditor: ConnectedAuditor, answer: OfferedAnswer, outcome: AuditVerdict) -> None:
        if outcome.error is not None:
            logger.warning("auditor %s cannot check an answer of %s: %s", auditor.name, answer.nodes, outcome.error)
            self._pass_on(answer, outcome.error, retry=outcome.retryable and len(self._auditors) > 1)
        else:
            self._note(answer, outcome)

    def _welcome(self, identity: bytes, hello: NodeHello) -> None:
        if hello.run_id not in (None, self._run_id):
            reason = f"the auditor served run {hello.run_id!r}, this is run {self._run_id!r}: restart it"
            self._send(identity, Dismissed(reason=reason, may_return=True))
            return
        if identity in self._auditors:
            self._lose(identity, "said hello again")
        self._auditors[identity] = ConnectedAuditor(
            name=hello.node_id, places=max(1, hello.max_concurrent), last_heard=self._clock()
        )
        logger.info("auditor %s attached", hello.node_id)
        kept = []
        for version in self._store.versions():
            with suppress(FileNotFoundError):  # The trainer prunes meanwhile.
                kept.append(self._store.manifest(version))
        for signed in [*kept[-1:], *kept[:-1]] or [b""]:
            self._send(identity, self._welcome_with(signed))

    def _welcome_with(self, signed: bytes) -> NodeWelcome:
        return NodeWelcome(
            run_id=self._run_id,
            manifest=signed,
            verify_key=self._keys.verifier().public_bytes_raw(),
            heartbeat_s=self._heartbeat_s,
        )

    def _send(self, identity: bytes, message: ToAuditor) -> bool:
        """Return False when the connection is gone."""
        any_message: Any = message  # The socket's type has only what nodes get: no AuditRequest.
        return self._socket.send(identity, any_message)

    async def _tick(self) -> None:
        """Look for auditors that are silent, or take too long."""
        interval_s = min(self._heartbeat_s / 2, 1.0)
        last = self._clock()
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            # After a stall of this process, messages wait in the socket: read them before an auditor counts as lost.
            stalled, last = now - last > self._lost_after_s / 2, now
            if stalled:
                continue
            for identity in list(self._auditors):
                auditor = self._auditors[identity]
                silent_s = now - auditor.last_heard
                if silent_s > self._lost_after_s:
                    self._lose(identity, f"silent for {silent_s:.1f} s")
                else:
                    self._give_up_overdue(auditor, now)
            self._place()

    # -- state ---------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return the numbers for metrics.jsonl; counts and seconds are over the whole run."""
        now = time.monotonic()
        states = Counter(trust.state(now) for trust in self._trust.values())
        names = ("answers", "chosen", "audited", "wrong", "failed", "quarantines", "tokens")
        return {
            **{f"audit/{name}": self.counters[name] for name in names},
            "audit/seconds": self._seconds,
            "audit/queued": len(self._queue),
            "audit/auditors": len(self._auditors),
            "audit/nodes_new": states["new"],
            "audit/nodes_quarantined": states["quarantined"],
        }


def _describe(verdict: PartVerdict) -> str:
    parts = [f"{len(verdict.wrong)} of {verdict.tokens} tokens are not what its seed draws"] if verdict.wrong else []
    parts += [verdict.fault] if verdict.fault is not None else []
    return f"{'; '.join(parts) or 'no fault'} (logprobs off by {verdict.gap_mean:.2g} nats on average)"
