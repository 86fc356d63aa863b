"""A trainer rank's link to the other clusters, in a thread: training continues while deltas travel.

    training thread: PeerLink             link thread: Exchange
    offer(header, body)  ───────────────> upload, request the result, fetch the others' bodies
    wait(timeout_s)      <─────────────── RoundResult | Gone (rejoin) | nothing yet
    request_source       ───────────────> a state to join with
    join_source          <───────────────
                                          a beat every few seconds; the state of this rank for a joining peer

A lost connection or a restarted rendezvous is not a failure: requests are repeated.
What arrives was made with the run's key, and is what was requested.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import DeadlineError, RunMismatchError, WireError
from diloco.transport import messages
from diloco.transport.connection import Connection, RefusedError
from diloco.transport.messages import Gone, JointKey, RoundNotReady, StartingState

logger = logging.getLogger(__name__)
T = TypeVar("T")
_NOTHING = memoryview(b"")
_LOG_EVERY_S = 10.0
_CONNECT_TIMEOUT_S = 60.0
_FAREWELL_S = 4.0
_BEAT_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A closed round, whole and checked."""

    outcome: messages.RoundOutcome
    bodies: list[memoryview]
    """Of outcome.headers, in their order."""


class PeerLink:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._entry: tuple[Any, ...] = ()
        self._round: concurrent.futures.Future[RoundResult | Gone] | None = None
        self._round_hellos = 0
        self._beating: concurrent.futures.Future[None] | None = None
        """Ends when the rendezvous refuses this peer."""
        self._source: concurrent.futures.Future[tuple[StartingState, bytearray]] | None = None
        self._attempt = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diloco-link", daemon=True)

    def start(self, outer_step: int, base_hash: str) -> None:
        """Connect. Raises DeadlineError, or RunMismatchError when this peer is refused."""
        self.set_position(outer_step, base_hash)
        self._thread.start()
        try:
            self._submit(self._exchange.open()).result()
        except RefusedError as error:
            raise RunMismatchError(str(error)) from None
        self._beating = self._submit(self._exchange.keep_beating())

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self._submit(self._exchange.close()).result(timeout=_FAREWELL_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    def set_position(self, outer_step: int, base_hash: str, *, training: bool | None = None) -> None:
        """Set where this rank stands, for the next beat; no round waits for it while it is not training.

        A value of `training` is sent at once. Never waits.
        """
        before = self._exchange.hello
        self._exchange.hello = replace(
            before,
            outer_step=outer_step,
            base_hash=base_hash,
            training=before.training if training is None else training,
        )
        if training is not None and self._beating is not None:
            self._submit(self._exchange.beat_early())

    def note_step(self) -> None:
        self._exchange.inner_steps += 1

    def delta_header(self, body: memoryview, outer_step: int, base_hash: str, **facts: Any) -> messages.DeltaHeader:
        return self._exchange.sealed(messages.DeltaHeader, body, outer_step, base_hash, **facts)

    def offer(self, header: messages.DeltaHeader, body: memoryview) -> None:
        """Begin a round with a delta; `body` must not change any more."""
        self._entry = (header.outer_step, header.base_hash, header, body)
        self.retry_round()

    def fetch(self, outer_step: int, base_hash: str) -> None:
        """Begin a round without a delta: only fetch the result."""
        self._entry = (outer_step, base_hash)
        self.retry_round()

    def retry_round(self) -> None:
        if self._round is not None:
            self._round.cancel()
        self._round_hellos = self._exchange.hellos
        self._round = self._submit(self._exchange.take_part(*self._entry))

    def wait(self, timeout_s: float) -> RoundResult | Gone | None:
        """Return the result of the current round if it is known. Raises WireErrors."""
        return self._result(self._round, timeout_s)

    @property
    def rendezvous_restarted(self) -> bool:
        """The rendezvous was restarted since the current round began."""
        return self._round_hellos != self._exchange.hellos

    def time_left_s(self, outer_step: int) -> float | None:
        """Return the seconds until a delta begun now misses this round's deadline; None when that does not run."""
        exchange, status = self._exchange, self._exchange.status
        if status is None or status.open_round != outer_step or status.left_s is None:
            return None
        return status.left_s - (time.monotonic() - exchange.status_at) - exchange.upload_s

    def request_source(self, outer_step: int, base_hash: str, *, refused: int = 0, reason: str = "") -> None:
        """Ask which state to join with; all ranks of the peer must.

        `refused`: serial of a state that cannot be taken over, for that `reason`.
        """
        if self._source is not None:
            self._source.cancel()
        self._attempt += 1
        hello = self._exchange.hello
        ask = messages.AskState(
            peer=hello.peer, rank=hello.rank, instance=hello.instance, attempt=self._attempt, outer_step=outer_step,
            base_hash=base_hash, refused=refused, reason=reason,
        )  # fmt: skip
        if reason:
            self._exchange.waiting_for = f"another state, because {reason}"
        self._source = self._submit(self._exchange.fetch_source(ask))

    def join_source(self, timeout_s: float) -> tuple[StartingState, bytearray] | None:
        """Return the state to join with and its body, if known. Raises WireErrors."""
        return self._result(self._source, timeout_s)

    def release_source(self) -> None:
        self._source = None

    @property
    def waiting_for(self) -> str:
        return self._exchange.waiting_for

    @property
    def traffic(self) -> tuple[int, int]:
        connection = self._exchange.connection
        return (connection.bytes_sent, connection.bytes_received) if connection is not None else (0, 0)

    def _result(self, future: concurrent.futures.Future[T] | None, timeout_s: float) -> T | None:
        if self._beating is not None and self._beating.done():
            self._beating.result()
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return future.result(timeout_s) if future is not None else None
        return None

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class Exchange:
    """What one rank tells the rendezvous and gets from it, in the link's thread."""

    def __init__(
        self,
        config: DilocoConfig,
        key: JointKey,
        hello: messages.PeerHello,
        state_to_serve: Callable[[], tuple[memoryview, int, str]],
    ) -> None:
        """`state_to_serve` returns a copy of the state, its outer step and hash, in another thread."""
        self._config = config
        self._key = key
        self._state_to_serve = state_to_serve
        self.hello = hello
        """Which rank this is, and where it stands now."""
        self.inner_steps = 0
        self.connection: Connection | None = None
        """Since `open`, which its event loop runs."""
        self.hellos = 0
        self.status: messages.BeatReply | None = None
        self.status_at = 0.0
        self.waiting_for = "the rendezvous' answer"
        self.upload_s = 0.0
        """How long the upload of the last delta took."""

    async def open(self) -> None:
        config, hello = self._config, self.hello
        identity = f"{hello.peer}/{hello.rank}/{hello.instance}"  # a successor's answers are not this process's
        self.connection = Connection(config.rendezvous, self._key.client(), identity, config.rate_limit_mbit)
        await self._greet()

    async def close(self) -> None:
        if self.connection is None:
            return
        if self.hello.training:
            self.hello = replace(self.hello, training=False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.beat_early(), _FAREWELL_S / 2)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task is not self.connection.receiver:
                task.cancel()
        await self.connection.close()

    @property
    def _live(self) -> Connection:
        assert self.connection is not None  # since `open`
        return self.connection

    # -- beats -----------------------------------------------------------------------------------------------------

    async def _greet(self) -> None:
        """Ask to be admitted. Raises DeadlineError or RefusedError."""
        timeout_s, began = _CONNECT_TIMEOUT_S, time.monotonic()
        text = "no answer from %s yet: is `diloco rendezvous` running there, with the key of diloco.key_file?"
        late = asyncio.get_running_loop().call_later(_BEAT_TIMEOUT_S, logger.warning, text, self._config.rendezvous)
        while True:
            answer = await self._live.call(self.hello, timeout_s)
            late.cancel()
            if isinstance(answer, messages.BeatReply):
                self.status, self.status_at, self.hellos = answer, time.monotonic(), self.hellos + 1
                return
            waiting_for = answer.waiting_for if isinstance(answer, RoundNotReady) else type(answer).__name__
            if time.monotonic() - began > timeout_s:
                raise DeadlineError(f"the rendezvous did not admit peer {self.hello.peer}: it waits for {waiting_for}")
            await asyncio.sleep(0.2)

    async def keep_beating(self) -> None:
        """Beat, and serve the state when it is wanted. Raises RunMismatchError when refused."""
        serving: asyncio.Task[bool] | None = None
        silent, last = False, 0
        while self.status is not None:
            await asyncio.sleep(self.status.beat_s)
            try:
                await self._beat()
                silent = False
            except WireError as error:  # RefusedError, or an answer of another release
                logger.warning("%s", error)
                raise RunMismatchError(str(error)) from None
            except DeadlineError as error:
                if not silent:
                    logger.warning("%s", error)
                silent = True
                continue
            wanted = self.status.state_wanted
            failed = serving is not None and serving.done() and not serving.result() and wanted == last
            if wanted and not failed and (serving is None or serving.done()):
                last, serving = wanted, asyncio.create_task(self._serve_state(wanted))

    async def _beat(self) -> None:
        hello = self.hello
        beat = messages.Beat(
            peer=hello.peer, rank=hello.rank, instance=hello.instance, outer_step=hello.outer_step,
            base_hash=hello.base_hash, training=hello.training, inner_steps=self.inner_steps,
        )  # fmt: skip
        answer = await self._live.call(beat, _BEAT_TIMEOUT_S)
        if isinstance(answer, messages.BeatReply):
            self.status, self.status_at = answer, time.monotonic()
        else:
            logger.info("the rendezvous does not know this peer (any more): sending a hello")
            await self._greet()

    async def beat_early(self) -> None:
        with contextlib.suppress(DeadlineError, RefusedError):
            await self._beat()

    async def _serve_state(self, serial: int) -> bool:
        """Upload the global state for a joining peer. Return False when that failed."""
        try:
            header, body = await asyncio.to_thread(self._state_blob, serial)
            logger.info("serving the global state of outer step %d (%.1f MB)", header.outer_step, len(body) / 1e6)
            if not await self._live.upload(header, body, self.hello.instance):
                logger.info("the state is not wanted any more")
        except (WireError, DeadlineError, OSError, MemoryError) as error:
            logger.warning("the state could not be served: %s", error)
            return False
        return True

    def _state_blob(self, serial: int) -> tuple[messages.StateHeader, memoryview]:
        body, outer_step, base_hash = self._state_to_serve()
        return self.sealed(messages.StateHeader, body, outer_step, base_hash, serial=serial), body

    def sealed(self, kind: type[Any], body: memoryview, outer_step: int, base_hash: str, **facts: Any) -> Any:
        header = kind(
            run=self.hello.run, peer=self.hello.peer, rank=self.hello.rank, size=len(body), outer_step=outer_step,
            base_hash=base_hash, layout_hash=messages.layout_hash(self.hello.layout),
            checksum=messages.body_checksum(body), **facts,
        )  # fmt: skip
        return messages.seal_header(header, self._key.derive("headers"))

    # -- rounds ----------------------------------------------------------------------------------------------------

    async def take_part(
        self, outer_step: int, base_hash: str, header: messages.DeltaHeader | None = None, body: memoryview = _NOTHING
    ) -> RoundResult | Gone:
        """Bring a delta, if given, and fetch the result of its round. Raises WireErrors."""
        hello = self.hello
        ask = messages.AskRound(
            peer=hello.peer, rank=hello.rank, instance=hello.instance, outer_step=outer_step, base_hash=base_hash
        )
        began = time.monotonic()
        while True:
            if header is not None:
                uploaded = await self._live.upload(header, body, hello.instance, self._note_wait)
                if uploaded and began:
                    began, self.upload_s = 0.0, time.monotonic() - began
            match await self._live.call(ask):
                case messages.RoundOutcome() as outcome:
                    self._check_outcome(outcome, outer_step, base_hash)
                    own = {header.checksum: body} if header is not None else {}
                    if (bodies := await self._bodies(outcome.headers, own)) is not None:
                        return RoundResult(outcome, bodies)
                case Gone() as gone:
                    return gone
                case RoundNotReady(waiting_for=waiting_for):
                    self._note_wait(waiting_for)

    def _note_wait(self, waiting_for: str) -> None:
        self.waiting_for = waiting_for

    def _check_outcome(self, outcome: messages.RoundOutcome, outer_step: int, base_hash: str) -> None:
        for header in outcome.headers:
            self._check_header(header)
            if (header.outer_step, header.base_hash) != (outer_step, base_hash):
                raise RunMismatchError(
                    f"the rendezvous counts {header.name} to outer step {outer_step}: a replayed header is refused"
                )
        peers = [header.peer for header in outcome.headers]
        if peers != sorted(set(peers)):
            raise RunMismatchError(f"round {outer_step} lists the peers {peers}, expected each once, in order")

    def _check_header(self, header: messages.BlobHeader) -> None:
        messages.authenticate(header, self._key.derive("headers"), run=self.hello.run)
        if header.rank != self.hello.rank:
            raise RunMismatchError(
                f"the rendezvous gives {header.name} to rank {self.hello.rank}: a misplaced header is refused"
            )
        if header.layout_hash != (own := messages.layout_hash(self.hello.layout)):
            raise RunMismatchError(
                f"{header.name} is of layout {header.layout_hash}, this rank has layout {own}: use the same model, "
                "sharding, adapters and diloco.fragments"
            )

    async def _bodies(
        self, headers: Sequence[messages.DeltaHeader], own: dict[str, memoryview]
    ) -> list[memoryview] | None:
        """Return the bodies; None when the rendezvous lost them. A too large one is empty."""
        bodies = []
        for header in headers:
            body = own.get(header.checksum)
            if header.size > messages.largest_body(self.hello.layout, header):
                body = _NOTHING
            if body is None:
                fetched = await self._live.download(header)
                if fetched is None:
                    return None
                body = memoryview(fetched)
            bodies.append(body)
        return bodies

    # -- joining ---------------------------------------------------------------------------------------------------

    async def fetch_source(self, ask: messages.AskState) -> tuple[StartingState, bytearray]:
        """Return which state to join with, and its body. Raises WireErrors."""
        logged_at = time.monotonic()
        while True:
            answer = await self._live.call(ask)
            if isinstance(answer, StartingState):
                if answer.header is None:
                    return answer, bytearray()
                self._check_state(answer.header, answer.newest, ask.outer_step)
                body = await self._live.download(answer.header, progress=f"state of peer {answer.header.peer}")
                if body is not None:
                    return answer, body
            elif isinstance(answer, RoundNotReady):
                self._note_wait(answer.waiting_for)
            if time.monotonic() - logged_at > _LOG_EVERY_S:
                logged_at = time.monotonic()
                logger.info("joining at outer step %d waits for %s", ask.outer_step, self.waiting_for)
            await asyncio.sleep(0.05)

    def _check_state(self, header: messages.StateHeader, newest: int, outer_step: int) -> None:
        self._check_header(header)
        limit = messages.largest_body(self.hello.layout, header)
        if header.size > limit:
            raise RunMismatchError(f"{header.name} has {header.size} bytes, a state of this layout at most {limit}")
        reached = max(header.outer_step, newest + 1)
        if reached < outer_step:
            raise RunMismatchError(
                f"{header.name} leads to outer step {reached}, this peer is at {outer_step}: a state that would take "
                "it back is refused"
            )
