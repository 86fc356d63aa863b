"""What one trainer rank exchanges with the rendezvous. Runs in the event loop of the link's thread.

    Session     its standing: a hello, a beat every few seconds, a hello again when the rendezvous was restarted
    Exchange    what it gets from the others: results of rounds, and states to join with

What arrives is checked here: it was made with the run's key, and it is what was requested.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import DeadlineError, RunMismatchError, WireError
from diloco.transport.connection import Connection, RefusedError
from diloco.transport.messages import (
    PROTOCOL,
    AskRound,
    AskState,
    Beat,
    BeatReply,
    Current,
    Gone,
    Header,
    PeerHello,
    PeerWelcome,
    Position,
    RoundNotReady,
    RoundOutcome,
    StateReady,
    TensorLayout,
    authenticate,
    largest_body,
    layout_hash,
)

logger = logging.getLogger(__name__)
_BEAT_TIMEOUT_S = 3.0
"""A beat is not sent again: the next one is more up to date."""
_LOG_EVERY_S = 10.0
"""How often the log names what a join waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Which rank of which peer this is."""

    rank: int
    ranks: int
    instance: int
    """Random, the same on all ranks."""
    layout: list[TensorLayout]
    frozen: str
    """Digest of this rank's parameters that are not trained."""
    settings: dict[str, str]
    """What all peers must agree on."""


def agreed_settings(config: DilocoConfig) -> dict[str, str]:
    """Return what decides the global model, as text by `diloco.` key: the same for all peers."""
    unused = {"outer": {"muon_lr"}} if config.outer.type != "muon" else None
    included = {"fragments", "partition", "outer", "weighting", "guard"}
    values = config.model_dump(mode="json", include=included, exclude=unused)
    flat: dict[str, str] = {}
    for name, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"diloco.{name}.{key}".rstrip("."): str(each) for key, each in inner.items()}
    return flat


class Session:
    def __init__(self, config: DilocoConfig, member: Member) -> None:
        self._config = config
        self._member = member
        self.position = Position(0, "", False)
        self.status = BeatReply(known=True, open_round=None, left_s=None, state_wanted=0)
        """The last answer to a beat."""
        self.status_at = 0.0
        self.hellos = 0
        """How often the rendezvous was greeted: more than once when it was restarted."""
        self.failure: BaseException | None = None
        """Why the rendezvous refuses this peer."""
        self._beat_s = 2.0

    async def hello(self, connection: Connection) -> None:
        """Ask to be admitted. Raises DeadlineError after diloco.connect_timeout_s, or RefusedError."""
        config, member, timeout_s = self._config, self._member, self._config.connect_timeout_s
        began = time.monotonic()
        while True:
            position = self.position
            answer = await connection.call(
                PeerHello(
                    protocol=PROTOCOL, run=config.run, peer=config.peer_id, rank=member.rank, ranks=member.ranks,
                    instance=member.instance, layout=member.layout, frozen=member.frozen, settings=member.settings,
                    round_deadline_s=config.round_deadline_s, outer_step=position.outer_step,
                    base_hash=position.base_hash, training=position.training,
                ),
                timeout_s,
            )  # fmt: skip
            if isinstance(answer, PeerWelcome):
                self._beat_s, self.hellos = answer.beat_s, self.hellos + 1
                return
            waiting_for = answer.waiting_for if isinstance(answer, RoundNotReady) else type(answer).__name__
            if time.monotonic() - began > timeout_s:
                raise DeadlineError(f"the rendezvous did not admit peer {config.peer_id}: it waits for {waiting_for}")
            await asyncio.sleep(0.2)

    async def keep_beating(self, connection: Connection) -> None:
        """Beat until cancelled or refused. An outage is no failure: waiting for a round has a deadline of its own."""
        silent = False
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self.beat(connection)
                silent = False
            except WireError as error:  # RefusedError, or an answer of another release
                self.failure = RunMismatchError(str(error))
                logger.warning("%s", error)
                return
            except DeadlineError as error:
                if not silent:
                    logger.warning("%s", error)
                silent = True

    async def beat(self, connection: Connection) -> None:
        """Report where this rank stands. Raises DeadlineError or RefusedError."""
        position, member = self.position, self._member
        beat = Beat(
            peer=self._config.peer_id, rank=member.rank, instance=member.instance, outer_step=position.outer_step,
            base_hash=position.base_hash, training=position.training,
        )  # fmt: skip
        answer = await connection.call(beat, _BEAT_TIMEOUT_S)
        if not isinstance(answer, BeatReply):
            return
        if answer.known:
            self.status, self.status_at = answer, time.monotonic()
            return
        logger.info("the rendezvous does not know this peer (any more): sending a hello")
        await self.hello(connection)

    async def beat_early(self, connection: Connection) -> None:
        """Send a beat ahead of time; when it is lost the next one carries the same."""
        with contextlib.suppress(DeadlineError, RefusedError):
            await self.beat(connection)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A closed round, whole and checked."""

    outcome: RoundOutcome
    bodies: list[memoryview]
    """Of outcome.headers, in their order."""

    @property
    def digest(self) -> int:
        """60 bits of the outcome's digest, for ranks to compare."""
        return int(self.outcome.digest[:15] or "0", 16)


@dataclass(frozen=True, slots=True)
class MustRejoin:
    """The others went on without this peer, too far to catch up: it must join anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class JoinSource:
    """The state to join with."""

    newest: int
    """The last closed round; -1 for none. Rounds from the state's outer step to this one are kept."""
    header: Header | None = None
    """None: this rank's own state will do."""
    body: bytearray = field(default_factory=bytearray)

    @property
    def serial(self) -> int:
        """Serial of the state; 0 for this rank's own."""
        return self.header.serial if self.header is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEntry:
    """A rank's part in a round. Without header and body the rank only fetches the result."""

    outer_step: int
    base_hash: str
    header: Header | None = None
    body: memoryview | None = None


@dataclass(slots=True)
class Exchange:
    connection: Connection
    header_key: bytes
    run: str
    peer: str
    member: Member
    waiting_for: str = "the rendezvous' answer"
    upload_s: float = 0.0
    """How long the upload of the last delta took."""
    layout_hash: str = field(init=False)

    def __post_init__(self) -> None:
        self.layout_hash = layout_hash(self.member.layout)

    async def take_part(self, entry: RoundEntry) -> RoundResult | MustRejoin:
        """Bring a delta, and fetch the result of its round. Raises WireErrors."""
        member = self.member
        ask = AskRound(
            peer=self.peer, rank=member.rank, instance=member.instance, outer_step=entry.outer_step,
            base_hash=entry.base_hash,
        )  # fmt: skip
        uploaded = False
        while True:
            if entry.header is not None:
                began = time.monotonic()
                if await self.connection.upload(entry.header, entry.body, member.instance) and not uploaded:
                    uploaded, self.upload_s = True, time.monotonic() - began
            answer = await self.connection.call(ask)
            if isinstance(answer, RoundOutcome):
                self._check_outcome(answer, entry)
                own = {entry.header.checksum: entry.body} if entry.header is not None else {}
                bodies = await self._bodies(answer.headers, own)
                if bodies is not None:
                    return RoundResult(answer, bodies)
            if isinstance(answer, Gone):
                return MustRejoin(answer.reason)
            if isinstance(answer, RoundNotReady):
                self.waiting_for = answer.waiting_for

    def _check_outcome(self, outcome: RoundOutcome, entry: RoundEntry) -> None:
        """Raises WireErrors when a header is forged, of another run, or of another round."""
        for header in outcome.headers:
            authenticate(header, self.header_key, run=self.run)
            identity = (header.kind, header.outer_step, header.rank, header.base_hash)
            if identity != ("delta", entry.outer_step, self.member.rank, entry.base_hash):
                raise RunMismatchError(
                    f"the rendezvous counts {header.name} to outer step {entry.outer_step} of rank "
                    f"{self.member.rank}: a replayed or misplaced header is refused"
                )
            self._check_layout(header)
        peers = [header.peer for header in outcome.headers]
        if peers != sorted(set(peers)):
            raise RunMismatchError(f"round {entry.outer_step} lists the peers {peers}, expected each once, in order")

    def _check_layout(self, header: Header) -> None:
        if header.layout_hash != self.layout_hash:
            raise RunMismatchError(
                f"{header.name} is of layout {header.layout_hash}, this rank has layout {self.layout_hash}: use the "
                "same model, sharding, adapters and diloco.fragments"
            )

    async def _bodies(self, headers: Sequence[Header], own: dict[str, memoryview]) -> list[memoryview] | None:
        """Return the bodies of `headers`; None when the rendezvous lost them meanwhile.

        A body that is larger than it can be is left empty: then no peer decodes it.
        """
        bodies = []
        for header in headers:
            body = own.get(header.checksum)
            if header.size > largest_body(self.member.layout, header.fragment):
                body = memoryview(b"")
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
        ask = AskState(
            peer=self.peer, rank=self.member.rank, instance=self.member.instance, attempt=attempt,
            outer_step=outer_step, base_hash=base_hash,
        )  # fmt: skip
        logged_at = time.monotonic()
        while True:
            answer = await self.connection.call(ask)
            if isinstance(answer, Current):
                return JoinSource(answer.newest)
            if isinstance(answer, StateReady):
                self._check_state(answer, outer_step)
                body = await self.connection.download(answer.header, progress=f"state of peer {answer.header.peer}")
                if body is not None:
                    return JoinSource(answer.newest, answer.header, body)
            self.waiting_for = answer.waiting_for if isinstance(answer, RoundNotReady) else self.waiting_for
            if time.monotonic() - logged_at > _LOG_EVERY_S:
                logged_at = time.monotonic()
                logger.info("joining at outer step %d waits for %s", outer_step, self.waiting_for)
            await asyncio.sleep(0.05)

    def _check_state(self, ready: StateReady, outer_step: int) -> None:
        """Raises WireErrors when it is forged, of another run, kind, rank or layout, or would take this rank back."""
        header = ready.header
        authenticate(header, self.header_key, run=self.run)
        if header.kind != "state" or header.rank != self.member.rank:
            raise RunMismatchError(
                f"the rendezvous gives {header.name} as the state of rank {self.member.rank}: a misplaced header is "
                "refused"
            )
        self._check_layout(header)
        limit = largest_body(self.member.layout, None)
        if header.size > limit:
            raise RunMismatchError(f"{header.name} has {header.size} bytes, a state of this layout at most {limit}")
        reached = max(header.outer_step, ready.newest + 1)
        if reached < outer_step:
            raise RunMismatchError(
                f"{header.name} leads to outer step {reached}, this peer is at {outer_step}: a state that would take "
                "it back is refused"
            )
