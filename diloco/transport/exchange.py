"""What one trainer rank gets from the others: results of rounds, and states to join with.

Runs in the event loop of the link's thread. What arrives is checked here: it was made with the run's key, and it is
what was requested.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer_prime.errors import RunMismatchError
from diloco.transport import messages
from diloco.transport.connection import Connection

logger = logging.getLogger(__name__)
_NOTHING = memoryview(b"")
_LOG_EVERY_S = 10.0
"""How often the log names what a join waits for."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A closed round, whole and checked."""

    outcome: messages.RoundOutcome
    bodies: list[memoryview]
    """Of outcome.headers, in their order."""


@dataclass(frozen=True, slots=True)
class MustRejoin:
    """The others continued without this peer, too far for it to catch up: it must rejoin."""

    reason: str


@dataclass(frozen=True, slots=True)
class JoinSource:
    """The state to join with."""

    newest: int
    """The last closed round; -1 for none. Rounds from the state's outer step to this one are kept."""
    header: messages.Header | None = None
    """None: this rank's own state will do."""
    body: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Exchange:
    connection: Connection
    header_key: bytes
    hello: messages.PeerHello
    """Which rank asks; where it stood at its start."""
    waiting_for: str = "the rendezvous' answer"
    upload_s: float = 0.0
    """How long the upload of the last delta took."""

    async def take_part(
        self, outer_step: int, base_hash: str, header: messages.Header | None = None, body: memoryview = _NOTHING
    ) -> RoundResult | MustRejoin:
        """Bring a delta, if given, and fetch the result of its round. Raises WireErrors."""
        hello = self.hello
        ask = messages.AskRound(
            peer=hello.peer, rank=hello.rank, instance=hello.instance, outer_step=outer_step, base_hash=base_hash
        )
        began = time.monotonic()
        while True:
            if header is not None:
                uploaded = await self.connection.upload(header, body, hello.instance, self._note_wait)
                if uploaded and began:
                    began, self.upload_s = 0.0, time.monotonic() - began
            match await self.connection.call(ask):
                case messages.RoundOutcome() as outcome:
                    self._check_outcome(outcome, outer_step, base_hash)
                    own = {header.checksum: body} if header is not None else {}
                    if (bodies := await self._bodies(outcome.headers, own)) is not None:
                        return RoundResult(outcome, bodies)
                case messages.Gone(reason=reason):
                    return MustRejoin(reason)
                case messages.RoundNotReady(waiting_for=waiting_for):
                    self.waiting_for = waiting_for

    def _note_wait(self, waiting_for: str) -> None:
        self.waiting_for = waiting_for

    def _check_outcome(self, outcome: messages.RoundOutcome, outer_step: int, base_hash: str) -> None:
        """Raises WireErrors when a header is forged, of another run, or of another round."""
        for header in outcome.headers:
            messages.authenticate(header, self.header_key, run=self.hello.run)
            identity = (header.kind, header.outer_step, header.rank, header.base_hash)
            if identity != ("delta", outer_step, self.hello.rank, base_hash):
                raise RunMismatchError(
                    f"the rendezvous counts {header.name} to outer step {outer_step} of rank {self.hello.rank}: a "
                    "replayed or misplaced header is refused"
                )
            self._check_layout(header)
        peers = [header.peer for header in outcome.headers]
        if peers != sorted(set(peers)):
            raise RunMismatchError(f"round {outer_step} lists the peers {peers}, expected each once, in order")

    def _check_layout(self, header: messages.Header) -> None:
        if header.layout_hash != (own := messages.layout_hash(self.hello.layout)):
            raise RunMismatchError(
                f"{header.name} is of layout {header.layout_hash}, this rank has layout {own}: use the same model, "
                "sharding, adapters and diloco.fragments"
            )

    async def _bodies(self, headers: Sequence[messages.Header], own: dict[str, memoryview]) -> list[memoryview] | None:
        """Return the bodies of `headers`; None when the rendezvous lost them meanwhile.

        A body that is larger than it can be is left empty: then no peer decodes it.
        """
        bodies = []
        for header in headers:
            body = own.get(header.checksum)
            if header.size > messages.largest_body(self.hello.layout, header.fragment):
                body = _NOTHING
            if body is None:
                fetched = await self.connection.download(header)
                if fetched is None:
                    return None
                body = memoryview(fetched)
            bodies.append(body)
        return bodies

    async def fetch_source(self, outer_step: int, base_hash: str, attempt: int) -> JoinSource:
        """Return a state to join with, or that this rank's own will do. Waits until it is cancelled.

        Raises WireErrors when the state is not the one that was requested.
        """
        hello = self.hello
        ask = messages.AskState(
            peer=hello.peer, rank=hello.rank, instance=hello.instance, attempt=attempt, outer_step=outer_step,
            base_hash=base_hash,
        )  # fmt: skip
        logged_at = time.monotonic()
        while True:
            answer = await self.connection.call(ask)
            if isinstance(answer, messages.Current):
                return JoinSource(answer.newest)
            if isinstance(answer, messages.StateReady):
                self._check_state(answer, outer_step)
                body = await self.connection.download(answer.header, progress=f"state of peer {answer.header.peer}")
                if body is not None:
                    return JoinSource(answer.newest, answer.header, body)
            self.waiting_for = answer.waiting_for if isinstance(answer, messages.RoundNotReady) else self.waiting_for
            if time.monotonic() - logged_at > _LOG_EVERY_S:
                logged_at = time.monotonic()
                logger.info("joining at outer step %d waits for %s", outer_step, self.waiting_for)
            await asyncio.sleep(0.05)

    def _check_state(self, ready: messages.StateReady, outer_step: int) -> None:
        """Raises WireErrors when it is forged, of another run, kind, rank or layout, or would take this rank back."""
        header = ready.header
        messages.authenticate(header, self.header_key, run=self.hello.run)
        if header.kind != "state" or header.rank != self.hello.rank:
            raise RunMismatchError(
                f"the rendezvous gives {header.name} as the state of rank {self.hello.rank}: a misplaced header is "
                "refused"
            )
        self._check_layout(header)
        limit = messages.largest_body(self.hello.layout, None)
        if header.size > limit:
            raise RunMismatchError(f"{header.name} has {header.size} bytes, a state of this layout at most {limit}")
        reached = max(header.outer_step, ready.newest + 1)
        if reached < outer_step:
            raise RunMismatchError(
                f"{header.name} leads to outer step {reached}, this peer is at {outer_step}: a state that would take "
                "it back is refused"
            )
