"""What a trainer rank gets from the others, through the rendezvous: outcomes of rounds, and states to join with.

Runs in the event loop of the link's thread. What arrives is checked here: it was made with the run's key, and it is
what was asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer_prime.errors import RunMismatchError
from diloco.transport.connection import Connection
from diloco.transport.header import Header, authenticate
from diloco.transport.messages import (
    AskRound,
    AskState,
    Current,
    Gone,
    RoundNotReady,
    RoundOutcome,
    StateReady,
    largest_body,
    layout_hash,
)
from diloco.transport.session import Member

logger = logging.getLogger(__name__)
_SAY_S = 10.0
"""How often the log says what a join waits for."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A closed round, whole and checked."""

    outcome: RoundOutcome
    bodies: list[memoryview]
    """Of outcome.headers, in their order."""

    @property
    def digest(self) -> int:
        """60 bits of it, for ranks to compare."""
        return int(self.outcome.digest[:15] or "0", 16)


@dataclass(frozen=True, slots=True)
class MustRejoin:
    """The others went on without this peer, too far to catch up: it must join anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class JoinSource:
    """What to join with."""

    newest: int
    """The last closed round; -1 for none. Rounds from the state's outer step to this one are to be had."""
    header: Header | None = None
    """None: this rank's own state will do."""
    body: bytearray = field(default_factory=bytearray)

    @property
    def serial(self) -> int:
        """Of the state; 0 for one's own."""
        return self.header.serial if self.header is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A rank's part in a round."""

    outer_step: int
    base_hash: str
    header: Header | None = None
    body: memoryview | None = None
    """Without these two the rank only fetches what the others agreed on."""


class Exchange:
    def __init__(self, connection: Connection, key: bytes, run: str, peer: str, member: Member) -> None:
        """`key`: of the headers."""
        self._connection, self._key, self._run, self._peer, self._member = connection, key, run, peer, member
        self._layout_hash = layout_hash(member.layout)
        self.waiting_for = "the rendezvous' answer"
        self.upload_s = 0.0
        """What it took to bring the last delta."""

    async def take_part(self, part: Offered) -> RoundResult | MustRejoin:
        """Bring a delta, and fetch the outcome of its round. Raises WireErrors."""
        member = self._member
        ask = AskRound(
            peer=self._peer, rank=member.rank, instance=member.instance, outer_step=part.outer_step,
            base_hash=part.base_hash,
        )  # fmt: skip
        brought = False
        while True:
            if part.header is not None:
                began = time.monotonic()
                if await self._connection.upload(part.header, part.body, member.instance) and not brought:
                    brought, self.upload_s = True, time.monotonic() - began
            answer = await self._connection.call(ask)
            if isinstance(answer, RoundOutcome):
                self._check_outcome(answer, part)
                own = {part.header.checksum: part.body} if part.header is not None else {}
                bodies = await self._bodies(answer.headers, own)
                if bodies is not None:
                    return RoundResult(answer, bodies)
            if isinstance(answer, Gone):
                return MustRejoin(answer.reason)
            if isinstance(answer, RoundNotReady):
                self.waiting_for = answer.waiting_for

    def _check_outcome(self, outcome: RoundOutcome, part: Offered) -> None:
        """Raises WireErrors when a header is forged, of another run, or of another round."""
        for header in outcome.headers:
            authenticate(header, self._key, run=self._run)
            got = (header.kind, header.outer_step, header.rank, header.base_hash)
            if got != ("delta", part.outer_step, self._member.rank, part.base_hash):
                raise RunMismatchError(
                    f"the rendezvous counts {header.name} to outer step {part.outer_step} of rank {self._member.rank}: "
                    "a replayed or misplaced header is refused"
                )
            self._check_layout(header)
        peers = [header.peer for header in outcome.headers]
        if peers != sorted(set(peers)):
            raise RunMismatchError(f"round {part.outer_step} lists the peers {peers}, expected each once, in order")

    def _check_layout(self, header: Header) -> None:
        if header.layout_hash != self._layout_hash:
            raise RunMismatchError(
                f"{header.name} is of layout {header.layout_hash}, this rank has layout {self._layout_hash}: use the "
                "same model, sharding, adapters and diloco.fragments"
            )

    async def _bodies(self, headers: Sequence[Header], own: dict[str, memoryview]) -> list[memoryview] | None:
        """None when the rendezvous lost them meanwhile; of one larger than can be, nothing: no peer will decode it."""
        bodies = []
        for header in headers:
            body = own.get(header.checksum)
            if header.size > largest_body(self._member.layout, header.fragment):
                body = memoryview(b"")
            if body is None:
                fetched = await self._connection.download(header)
                if fetched is None:
                    return None
                body = memoryview(fetched)
            bodies.append(body)
        return bodies

    async def fetch_state(self, outer_step: int, base_hash: str, attempt: int) -> JoinSource:
        """A state to join with, or word that this rank's own will do. Waits until it is cancelled.

        Raises WireErrors when the state is not what was asked for.
        """
        ask = AskState(
            peer=self._peer, rank=self._member.rank, instance=self._member.instance, attempt=attempt,
            outer_step=outer_step, base_hash=base_hash,
        )  # fmt: skip
        said = time.monotonic()
        while True:
            answer = await self._connection.call(ask)
            if isinstance(answer, Current):
                return JoinSource(answer.newest)
            if isinstance(answer, StateReady):
                self._check_state(answer, outer_step)
                body = await self._connection.download(answer.header, progress=f"state of peer {answer.header.peer}")
                if body is not None:
                    return JoinSource(answer.newest, answer.header, body)
            self.waiting_for = answer.waiting_for if isinstance(answer, RoundNotReady) else self.waiting_for
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                logger.info("joining at outer step %d waits for %s", outer_step, self.waiting_for)
            await asyncio.sleep(0.05)

    def _check_state(self, ready: StateReady, outer_step: int) -> None:
        """Raises WireErrors when it is forged, of another run, kind, rank or layout, or would take this rank back."""
        header = ready.header
        authenticate(header, self._key, run=self._run)
        if header.kind != "state" or header.rank != self._member.rank:
            raise RunMismatchError(
                f"the rendezvous gives {header.name} as the state of rank {self._member.rank}: a misplaced header is "
                "refused"
            )
        self._check_layout(header)
        limit = largest_body(self._member.layout, None)
        if header.size > limit:
            raise RunMismatchError(f"{header.name} has {header.size} bytes, a state of this layout at most {limit}")
        reached = max(header.outer_step, ready.newest + 1)
        if reached < outer_step:
            raise RunMismatchError(
                f"{header.name} leads to outer step {reached}, this peer is at {outer_step}: a state that would take "
                "it back is refused"
            )
