"""The auditors that are connected, and the answers that wait for them.

    Audits --check(answer)--> queue --AuditRequest--> auditor --AuditVerdict--> on_verdict(answer, verdict)

Auditors may be too slow for all answers. Then rollouts are served by a rank that each draws when it begins, so some get
all of their verdicts in time. An auditor gets no more while it has held an answer for half of `TIMEOUT_S`, and drops an
answer when `TIMEOUT_S` is over. One that hangs costs what it holds: nobody waits for that in the end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import (
    PROTOCOL,
    AuditRequest,
    AuditVerdict,
    ChunkRequest,
    Dismissed,
    FromAuditor,
    Goodbye,
    Heard,
    NodeHello,
    NodeWelcome,
    Status,
)
from composer_prime.wire.sockets import NodeSocket
from orchestrator.event_loop import watched

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""How long a rollout waits for audits of new nodes' answers before it fails."""
_MAX_QUEUED = 4096
MAX_QUEUED_BYTES = 512 << 20
"""Answers that wait for an auditor, and their bytes; beyond that, those of the lowest rank count as not audited."""
_MAX_AUDITORS = 2
"""Auditors that may get an answer, one after the other: it may be what ends them."""


@dataclass(slots=True, kw_only=True, eq=False)
class OfferedAnswer:
    """One answer of a node, from its arrival until its rollout ends, or its audit does."""

    parts: tuple[tuple[str, int], ...]
    """Its nodes in order, each with the number of tokens that it sampled; mostly one."""
    quarantines: dict[str, int]
    """Of each of its nodes when the answer came."""
    is_awaited: bool
    """Whether its rollout waits for the audit."""
    rank: float
    """Random, and the same for all answers of a rollout. The highest is audited first."""
    request: AuditRequest | None = None
    """None when it is not audited, or was."""
    verdict: AuditVerdict | None = None
    error: str | None = None
    """Why it could not be audited."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    handed: int = 0
    """Auditors that got it."""
    is_unwanted: bool = False
    """Whether its rollout is given up. Then it is not queued."""

    @property
    def nodes(self) -> str:
        """Its nodes, for messages."""
        return ", ".join(dict.fromkeys(node_id for node_id, _ in self.parts))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its request."""
        one = self.request
        return 0 if one is None else len(one.prompt_ids) + len(one.token_ids) + len(one.logprobs)

    def end(self, verdict: AuditVerdict | None, error: str | None = None) -> None:
        self.verdict, self.error, self.request = verdict, error, None
        self.done.set()


@dataclass(slots=True, kw_only=True, eq=False)
class ConnectedAuditor:
    name: str
    places: int
    last_heard: float
    held: dict[int, tuple[OfferedAnswer, float]] = field(default_factory=dict)
    """What it works on by audit number, and when it got that, monotonic seconds."""
    paused_until: float = -math.inf
    """After it could not check what another one may, monotonic seconds."""

    def has_room(self, now: float, since: float) -> bool:
        """Tell whether it has a free place, holds nothing from before `since`, and is not paused."""
        is_late = any(begun <= since for _, begun in self.held.values())
        return len(self.held) < self.places and now >= self.paused_until and not is_late


class Auditors:
    """Serves auditors from `start` to `close`."""

    def __init__(
        self,
        config: Config,
        keys: RunKeys,
        welcome: NodeWelcome,
        store: WeightStore,
        serve_chunk: Callable[[bytes, bytes, ChunkRequest, Callable[..., Any]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        """`welcome`: goes to each with the versions of `store`. `clock()` returns seconds, by which auditors are slow,
        silent or paused.

        Raises ConfigError when the trainer's key, the only one that is admitted, is missing.
        """
        self.failed = 0
        """Answers that could not be audited."""
        self._welcome = welcome
        self._store = store
        self._serve_chunk = serve_chunk
        self._lost_after_s = config.inference.lost_after_s
        self._clock = clock
        self._max_queued_bytes = max_queued_bytes
        self._queue: list[OfferedAnswer] = []
        """By rank, the highest last."""
        self._connected: dict[bytes, ConnectedAuditor] = {}
        self._socket = NodeSocket(
            keys, config.model.max_context, frozenset([keys.curve("trainer").public]).__contains__
        )
        self._on_verdict: Callable[[OfferedAnswer, AuditVerdict], None]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def endpoint(self) -> str:
        """Return the address as it is bound."""
        return self._socket.endpoint

    @property
    def connected(self) -> int:
        return len(self._connected)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def start(
        self,
        address: str,
        on_verdict: Callable[[OfferedAnswer, AuditVerdict], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Raise PortInUseError when another process holds the address, ConfigError when a key is missing."""
        self._on_verdict = on_verdict
        self._socket.bind(address)
        self._tasks = [watched(self._receive(), on_error), watched(self._tick(), on_error)]

    async def close(self, *, finished: bool) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for identity in self._connected if finished else ():
            self._socket.send(identity, Dismissed(reason="the run is finished", finish_first=True))
        await self._socket.close()

    # -- answers -------------------------------------------------------------------------------------------------

    def check(self, answer: OfferedAnswer) -> None:
        """Have an answer with a request checked as soon as an auditor has room."""
        self._enqueue(answer)
        self._place()

    def _enqueue(self, answer: OfferedAnswer) -> None:
        insort(self._queue, answer, key=lambda one: one.rank)
        num_bytes = sum(one.num_bytes for one in self._queue)
        while num_bytes > self._max_queued_bytes or len(self._queue) > _MAX_QUEUED:
            error = f"{len(self._queue)} answers of {num_bytes / 1e6:.1f} MB wait for an auditor"
            num_bytes -= self._queue[0].num_bytes
            self._fail(self._queue.pop(0), f"{error}: start more (inference audit)")

    def give_up(self, answers: Iterable[OfferedAnswer]) -> None:
        """Remove answers that are no longer awaited from the queue. Verdicts under way count for the node."""
        for answer in answers:
            answer.is_unwanted = True
        self._queue = [answer for answer in self._queue if not answer.is_unwanted]

    def _fail(self, answer: OfferedAnswer, error: str) -> None:
        self.failed += 1
        answer.end(None, error)

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
        free = [(len(one.held) / one.places, key) for key, one in self._connected.items() if one.has_room(now, since)]
        return min(free)[1] if free else None

    def _hand(self, answer: OfferedAnswer, identity: bytes) -> bool:
        """Return False when the auditor turns out to be gone. Then it never had the answer."""
        assert answer.request is not None
        if not self._socket.send(identity, answer.request):
            self._lose(identity, "unreachable")
            return False
        answer.handed += 1
        self._connected[identity].held[answer.request.audit] = answer, self._clock()
        return True

    def _lose(self, identity: bytes, reason: str) -> None:
        auditor = self._connected.pop(identity)
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

    # -- auditors ------------------------------------------------------------------------------------------------

    def publish(self, signed: bytes) -> None:
        """Tell the auditors of a new version."""
        for identity in self._connected:
            self._announce(identity, signed)

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromAuditor)
        while True:
            received = await self._socket.receive()
            try:
                if received.num_frames != 1:
                    raise msgspec.DecodeError(f"{received.num_frames} frames, expected 1")
                message = decoder.decode(received.first)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                logger.warning("dropped a message to the audit listener: %s (use one release everywhere)", error)
                continue
            self._handle(received.identity, message)

    def _handle(self, identity: bytes, message: FromAuditor) -> None:
        auditor = self._connected.get(identity)
        if auditor is not None:
            auditor.last_heard = self._clock()
        match message:
            case NodeHello():
                self._hello(identity, message)
            case ChunkRequest():
                self._serve_chunk(identity, identity, message, self._socket.send_large)
            case _ if auditor is None:
                self._socket.send(identity, Heard(known=False))
            case AuditVerdict():
                if (held := auditor.held.pop(message.audit, None)) is not None:
                    answer, _ = held
                    if message.error is None and len(message.parts) != len(answer.parts):
                        error = f"its verdict has {len(message.parts)} parts, the answer {len(answer.parts)}"
                        message = AuditVerdict(audit=message.audit, error=f"{error}: use one release", retryable=True)
                    if message.retryable:
                        auditor.paused_until = auditor.last_heard + self._welcome.heartbeat_s
                    self._take(auditor, answer, message)
            case Status():
                self._socket.send(identity, Heard())
            case Goodbye(reason=reason):
                self._lose(identity, f"said goodbye: {reason[:200]}")
        self._place()

    def _take(self, auditor: ConnectedAuditor, answer: OfferedAnswer, outcome: AuditVerdict) -> None:
        if outcome.error is not None:
            logger.warning("auditor %s cannot check an answer of %s: %s", auditor.name, answer.nodes, outcome.error)
            self._pass_on(answer, outcome.error, retry=outcome.retryable and len(self._connected) > 1)
        else:
            self._on_verdict(answer, outcome)

    def _hello(self, identity: bytes, hello: NodeHello) -> None:
        if hello.protocol != PROTOCOL:
            reason = f"the auditor speaks protocol {hello.protocol}, this run {PROTOCOL}: use one release everywhere"
            self._socket.send(identity, Dismissed(reason=reason, may_return=False))
            return
        if hello.run_id not in (None, self._welcome.run_id):
            reason = f"the auditor served run {hello.run_id!r}, this is run {self._welcome.run_id!r}: restart it"
            self._socket.send(identity, Dismissed(reason=reason, may_return=True))
            return
        if identity in self._connected:
            self._lose(identity, "said hello again")
        self._connected[identity] = ConnectedAuditor(
            name=hello.node_id, places=max(1, hello.max_concurrent), last_heard=self._clock()
        )
        logger.info("auditor %s attached", hello.node_id)
        kept = []
        for version in self._store.versions():
            with suppress(FileNotFoundError):  # The trainer prunes meanwhile.
                kept.append(self._store.manifest(version))
        newest = kept.pop() if kept else b""
        self._socket.send(identity, msgspec.structs.replace(self._welcome, manifest=newest))
        for signed in kept:
            self._announce(identity, signed)

    def _announce(self, identity: bytes, signed: bytes) -> None:
        self._socket.send(identity, msgspec.structs.replace(self._welcome, manifest=signed, is_news=True))

    async def _tick(self) -> None:
        """Look for auditors that are silent, or take too long."""
        interval_s = min(self._welcome.heartbeat_s / 2, 1.0)
        last = self._clock()
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            # After a stall of this process, messages wait in the socket: read them before an auditor counts as lost.
            stalled, last = now - last > self._lost_after_s / 2, now
            if stalled:
                continue
            for identity in list(self._connected):
                auditor = self._connected[identity]
                silent_s = now - auditor.last_heard
                if silent_s > self._lost_after_s:
                    self._lose(identity, f"silent for {silent_s:.1f} s")
                else:
                    self._give_up_overdue(auditor, now)
            self._place()
