"""A trainer rank's link to the other clusters, in a thread of its own: training goes on while deltas travel.

    engine thread                         link thread
    begin(header, body)  ───────────────> upload, ask for the outcome, fetch the others' bodies
    wait(timeout_s)      <─────────────── Arrived | Left | nothing yet
                                          a beat every few seconds: alive, at which outer step

A lost connection or a restarted rendezvous is nothing special: requests are repeated, uploads go on where they were.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import DeadlineError, RunMismatchError
from diloco.connection import Connection, RefusedError
from diloco.keys import JointKey
from diloco.layout import TensorLayout
from diloco.wire import (
    AskRound,
    AskState,
    Beat,
    BeatReply,
    Current,
    Gone,
    Header,
    Hello,
    NotReady,
    Outcome,
    StateReady,
    Welcome,
    authenticate,
    sealed,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
_START_TIMEOUT_S = 30.0
_FAREWELL_S = 4.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """A closed round, whole and checked."""

    outcome: Outcome
    bodies: list[memoryview]
    """Of outcome.headers, in their order."""


@dataclass(frozen=True, slots=True)
class Left:
    """The others went on without this peer, too far to catch up: it must join anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """What to join with."""

    newest: int
    """The last closed round; -1 for none. Rounds from the state's outer step to this one are to be had."""
    header: Header | None = None
    """None: this rank's own state will do."""
    body: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Which rank of which peer this is."""

    rank: int
    ranks: int
    layout: list[TensorLayout]
    settings: dict[str, str]
    """What all peers must agree on."""


class Link:
    def __init__(self, config: DilocoConfig, key: JointKey, member: Member) -> None:
        self._config, self._member = config, member
        self._client, self._header_key = key.client(), key.derive("headers")
        self._instance = secrets.token_hex(8)
        self._position = (0, "", False)
        self._status = BeatReply(known=True, open_round=None, left_s=None, state_wanted=0)
        self._status_at = 0.0
        self._beat_s = 2.0
        self._round: concurrent.futures.Future[Arrived | Left] | None = None
        self._served = 0
        """Serial of the last request for this peer's state that was met."""
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-link", daemon=True)
        self._connection: Connection | None = None

    # -- engine thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect and say hello.

        Raises DeadlineError when the rendezvous does not answer, RunMismatchError when it refuses this peer.
        """
        self._thread.start()
        try:
            self._submit(self._open()).result()
        except RefusedError as error:
            raise RunMismatchError(str(error)) from None

    def close(self) -> None:
        """Tell the others not to wait, and stop. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self._submit(self._shut()).result(timeout=_FAREWELL_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)

    def position(self, outer_step: int, base_hash: str, *, training: bool | None = None) -> None:
        """Where this rank stands, for the next beat; while it is not training no round waits for it.

        None leaves that as it was; a change is told at once.
        """
        self._position = (outer_step, base_hash, self._position[2] if training is None else training)
        if training is not None:
            self._submit(self._beat()).result()

    def begin(
        self, outer_step: int, base_hash: str, header: Header | None = None, body: memoryview | None = None
    ) -> None:
        """Start on a round: bring `body` (None: only fetch what the others agreed on), then fetch the outcome."""
        self._round = self._submit(self._take_part(outer_step, base_hash, header, body))

    def wait(self, timeout_s: float) -> Arrived | Left | None:
        """How the round that was begun ended; None while it has not. Raises what went wrong, such as WireErrors."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._round.result(timeout_s) if self._round else None
        except concurrent.futures.TimeoutError:
            return None

    def left_s(self, outer_step: int) -> float | None:
        """Until the deadline of this round, if another peer has opened it; as of the last beat."""
        if self._status.open_round != outer_step or self._status.left_s is None:
            return None
        return self._status.left_s - (time.monotonic() - self._status_at)

    @property
    def state_wanted(self) -> int:
        """Serial of a request for this peer's state; 0 for none."""
        serial = self._status.state_wanted
        return serial if serial != self._served else 0

    def serve_state(self, header: Header, body: memoryview) -> None:
        """Upload a copy of the state in the background; `body` must not change any more."""
        self._served = header.serial
        upload = self._submit(self._connection.upload(sealed(header, self._header_key), body))
        upload.add_done_callback(_note_upload)

    def fetch_state(self, outer_step: int, base_hash: str, timeout_s: float) -> Found:
        """A state to join with, or word that this rank's own (at `outer_step`, with `base_hash`) will do.

        Raises DeadlineError after `timeout_s`.
        """
        return self._submit(self._fetch(outer_step, base_hash, timeout_s)).result()

    def seal(self, header: Header) -> Header:
        return sealed(header, self._header_key)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        connection = self._connection
        return (connection.bytes_sent, connection.bytes_received) if connection else (0, 0)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # -- link thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open(self) -> None:
        config = self._config
        identity = f"{config.peer_id}/{self._member.rank}"
        self._connection = Connection(config.rendezvous, self._client, identity, config.rate_limit_mbit)
        await self._hello(_START_TIMEOUT_S)
        self._beating = asyncio.create_task(self._keep_beating())

    async def _hello(self, timeout_s: float) -> None:
        config, member = self._config, self._member
        hello = Hello(
            run=config.run, peer=config.peer_id, rank=member.rank, ranks=member.ranks, instance=self._instance,
            layout=member.layout, settings=member.settings, round_deadline_s=config.round_deadline_s,
        )  # fmt: skip
        began = time.monotonic()
        while True:
            answer = await self._connection.call(hello, timeout_s)
            if isinstance(answer, Welcome):
                self._beat_s = answer.beat_s
                return
            waiting = answer.waiting_for if isinstance(answer, NotReady) else type(answer).__name__
            if time.monotonic() - began > timeout_s:
                raise DeadlineError(f"the rendezvous did not admit peer {config.peer_id}: it waits for {waiting}")
            await asyncio.sleep(0.2)

    async def _shut(self) -> None:
        if self._connection is None:
            return
        step, base_hash, training = self._position
        if training:
            self._position = (step, base_hash, False)
            with contextlib.suppress(RefusedError, DeadlineError, TimeoutError):
                await asyncio.wait_for(self._beat(), _FAREWELL_S / 2)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task is not self._connection._receiver:
                task.cancel()
        await self._connection.close()

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._beat()
            except (RefusedError, DeadlineError) as error:
                if isinstance(error, RefusedError):
                    self._failure = RunMismatchError(str(error))
                logger.warning("%s", error)

    async def _beat(self) -> None:
        step, base_hash, training = self._position
        beat = Beat(
            peer=self._config.peer_id, rank=self._member.rank, outer_step=step, base_hash=base_hash, training=training
        )
        answer = await self._connection.call(beat, _START_TIMEOUT_S)
        if not isinstance(answer, BeatReply):
            return
        if not answer.known:
            logger.info("the rendezvous was restarted: saying hello again")
            await self._hello(_START_TIMEOUT_S)
            return
        self._status, self._status_at = answer, time.monotonic()

    async def _take_part(
        self, outer_step: int, base_hash: str, header: Header | None, body: memoryview | None
    ) -> Arrived | Left:
        ask = AskRound(
            peer=self._config.peer_id, rank=self._member.rank, outer_step=outer_step, base_hash=base_hash
        )
        while True:
            if header is not None:
                await self._connection.upload(header, body)
            answer = await self._connection.call(ask)
            if isinstance(answer, Outcome):
                self._check(answer, outer_step, base_hash)
                own = {header.checksum: body} if header is not None else {}
                arrived = await self._bodies(answer, own)
                if arrived is not None:
                    return arrived
            if isinstance(answer, Gone):
                return Left(answer.reason)

    def _check(self, outcome: Outcome, outer_step: int, base_hash: str) -> None:
        """Raises WireErrors when a header is forged, of another run, or of another round."""
        for header in outcome.headers:
            authenticate(header, self._header_key, run=self._config.run)
            got = (header.kind, header.outer_step, header.rank, header.base_hash)
            if got != ("delta", outer_step, self._member.rank, base_hash):
                raise RunMismatchError(
                    f"the rendezvous counts {header.name} to outer step {outer_step} of rank {self._member.rank}: a "
                    "replayed or misplaced header is refused"
                )
        peers = [header.peer for header in outcome.headers]
        if peers != sorted(set(peers)):
            raise RunMismatchError(f"outer step {outer_step} lists the peers {peers}, expected each once, in order")

    async def _bodies(self, outcome: Outcome, own: dict[str, memoryview]) -> Arrived | None:
        """None when the rendezvous lost them meanwhile."""
        bodies = []
        for header in outcome.headers:
            body = own.get(header.checksum)
            if body is None:
                fetched = await self._connection.download(header)
                if fetched is None:
                    return None
                body = memoryview(fetched)
            bodies.append(body)
        return Arrived(outcome, bodies)

    async def _fetch(self, outer_step: int, base_hash: str, timeout_s: float) -> Found:
        ask = AskState(
            peer=self._config.peer_id, rank=self._member.rank, outer_step=outer_step, base_hash=base_hash
        )
        began, waiting = time.monotonic(), "an answer"
        while (left := timeout_s - (time.monotonic() - began)) > 0:
            answer = await self._connection.call(ask, left)
            if isinstance(answer, Current):
                return Found(answer.newest)
            if isinstance(answer, StateReady):
                authenticate(answer.header, self._header_key, run=self._config.run)
                body = await self._connection.download(answer.header, progress=f"state of peer {answer.header.peer}")
                if body is not None:
                    return Found(answer.newest, answer.header, body)
            waiting = answer.waiting_for if isinstance(answer, NotReady) else waiting
            await asyncio.sleep(0.05)
        raise DeadlineError(f"no state to join with within {timeout_s:g} s: the rendezvous waits for {waiting}")


def _note_upload(upload: concurrent.futures.Future[bool]) -> None:
    if upload.cancelled():
        return
    if (error := upload.exception()) is not None:
        logger.warning("the state could not be served: %s", error)
    elif not upload.result():
        logger.info("the state is not wanted any more")
