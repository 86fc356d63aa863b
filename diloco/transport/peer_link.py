"""A trainer rank's link to the other clusters, in a thread of its own: training continues while deltas travel.

    training thread                       link thread
    offer(header, body)  ───────────────> upload, request the result, fetch the others' bodies (exchange.py)
    wait(timeout_s)      <─────────────── RoundResult | MustRejoin | nothing yet
    request_source       ───────────────> a state to join with
    join_source          <───────────────
                                          a beat every few seconds: alive, at which outer and inner step; the state
                                          of this rank for a joining peer

A lost connection or a restarted rendezvous is not a failure: requests are repeated, and uploads continue where they
were.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from msgspec import structs

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import DeadlineError, RunMismatchError, WireError
from diloco.transport import messages
from diloco.transport.connection import Connection, RefusedError
from diloco.transport.exchange import Exchange, JoinSource, MustRejoin, RoundResult
from diloco.transport.peer_keys import JointKey

logger = logging.getLogger(__name__)
T = TypeVar("T")
_CONNECT_TIMEOUT_S = 60.0
"""How long the rendezvous may take to answer and admit this peer when training starts."""
_FAREWELL_S = 4.0
_BEAT_TIMEOUT_S = 3.0
"""A beat is not sent again: the next one is more up to date."""


class PeerLink:
    def __init__(
        self,
        config: DilocoConfig,
        key: JointKey,
        hello: messages.PeerHello,
        state_to_serve: Callable[[], tuple[memoryview, int, str]],
    ) -> None:
        """`state_to_serve` returns a copy of the state, its outer step and hash; it is called in another thread."""
        self._config = config
        self._hello = hello
        """Which rank this is, and where it stands now."""
        self._client_keys = key.client()
        self._header_key = key.derive("headers")
        self._layout_hash = messages.layout_hash(hello.layout)
        self._exchange: Exchange | None = None
        """It and its connection are made in the link thread, where their event loop runs."""
        self._entry: tuple[Any, ...] = ()
        """The arguments of Exchange.take_part for the current round."""
        self._round: concurrent.futures.Future[RoundResult | MustRejoin] | None = None
        self._hellos = 0
        """How often the rendezvous admitted this rank: more than once when it was restarted."""
        self._round_hellos = 0
        """`_hellos` when the current round began."""
        self._status = messages.BeatReply(known=True, open_round=None, left_s=None, state_wanted=0)
        """The last answer to a beat."""
        self._status_at = 0.0
        self._failure: BaseException | None = None
        """Why the rendezvous refuses this peer."""
        self._beat_s = 2.0
        self._beating: asyncio.Task[None] | None = None
        self._source: concurrent.futures.Future[JoinSource] | None = None
        self._attempt = 0
        self._state_to_serve = state_to_serve
        self._serving: asyncio.Task[None] | None = None
        self._unserved = 0
        """Serial of a request for this rank's state that failed."""
        self._inner_steps = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diloco-link", daemon=True)

    # -- training thread -----------------------------------------------------------------------------------------

    def start(self, outer_step: int, base_hash: str) -> None:
        """Connect and send a hello from that position.

        Raises DeadlineError when the rendezvous does not answer, RunMismatchError when it refuses this peer.
        """
        self.set_position(outer_step, base_hash)
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
        if not self._thread.is_alive():
            self._loop.close()

    def set_position(self, outer_step: int, base_hash: str, *, training: bool | None = None) -> None:
        """Set where this rank stands, for the next beat; while it is not training no round waits for it.

        `training` None leaves that as it was; a value is sent at once. Never waits.
        """
        before = self._hello.training
        self._hello = structs.replace(
            self._hello, outer_step=outer_step, base_hash=base_hash, training=before if training is None else training
        )
        if training is not None and self._exchange is not None:
            self._submit(self._beat_early())

    def note_step(self) -> None:
        """Count an inner step: a peer whose beats show none is not waited for."""
        self._inner_steps += 1

    def header(self, kind: str, body: memoryview, outer_step: int, base_hash: str, **fields: Any) -> messages.Header:
        """Return the header, not sealed yet, of a body that belongs to the global values with that hash."""
        return messages.Header(
            kind=kind, run=self._hello.run, peer=self._hello.peer, rank=self._hello.rank, size=len(body),
            outer_step=outer_step, base_hash=base_hash, layout_hash=self._layout_hash,
            checksum=messages.body_checksum(body), **fields,
        )  # fmt: skip

    def seal(self, header: messages.Header) -> messages.Header:
        return messages.seal_header(header, self._header_key)

    def offer(self, header: messages.Header, body: memoryview) -> None:
        """Begin a round: bring a delta, then fetch the result; `body` must not change any more."""
        self._entry = (header.outer_step, header.base_hash, header, body)
        self.retry_round()

    def fetch(self, outer_step: int, base_hash: str) -> None:
        """Begin a round without a delta: only fetch the result."""
        self._entry = (outer_step, base_hash)
        self.retry_round()

    def retry_round(self) -> None:
        """Take part once more in the current round, because the ranks of this peer got different results."""
        if self._round is not None:
            self._round.cancel()
        self._round_hellos = self._hellos
        self._round = self._submit(self._live.take_part(*self._entry))

    def wait(self, timeout_s: float) -> RoundResult | MustRejoin | None:
        """Return the result of the current round; None until it is known. Raises its errors (WireErrors)."""
        return self._result(self._round, timeout_s)

    @property
    def rendezvous_restarted(self) -> bool:
        """Tell whether the rendezvous was restarted since the current round began, and so forgot how it ended."""
        return self._round_hellos != self._hellos

    def time_left_s(self, outer_step: int) -> float | None:
        """Return the seconds until a delta begun now misses this round's deadline, as of the last beat.

        None while the deadline does not run.
        """
        status = self._status
        if status.open_round != outer_step or status.left_s is None:
            return None
        return status.left_s - (time.monotonic() - self._status_at) - self._live.upload_s

    def refuse_state(self, serial: int, reason: str) -> None:
        """Report that this state cannot be taken over: another source is asked. Never waits."""
        self._live.waiting_for = f"another state, because {reason}"
        hello = self._hello
        unusable = messages.Unusable(peer=hello.peer, instance=hello.instance, serial=serial, reason=reason)
        self._submit(self._live.connection.call(unusable))

    def request_source(self, outer_step: int, base_hash: str) -> None:
        """Ask which state to join with, being at `outer_step` with `base_hash`; all ranks of the peer must ask."""
        if self._source is not None:
            self._source.cancel()
        self._attempt += 1
        self._source = self._submit(self._live.fetch_source(outer_step, base_hash, self._attempt))

    def join_source(self, timeout_s: float) -> JoinSource | None:
        """Return the state to join with; None while it is not known. Raises its errors (WireErrors)."""
        return self._result(self._source, timeout_s)

    def release_source(self) -> None:
        """Drop the link's reference to the state, which is as large as the model."""
        self._source = None

    @property
    def waiting_for(self) -> str:
        """What the rendezvous last reported that it waits for."""
        return self._exchange.waiting_for if self._exchange is not None else "a connection"

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        if self._exchange is None:
            return 0, 0
        return self._exchange.connection.bytes_sent, self._exchange.connection.bytes_received

    @property
    def _live(self) -> Exchange:
        assert self._exchange is not None  # since `start`
        return self._exchange

    def _result(self, future: concurrent.futures.Future[T] | None, timeout_s: float) -> T | None:
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return future.result(timeout_s) if future is not None else None
        return None

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # -- link thread ---------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        config, hello = self._config, self._hello
        identity = f"{hello.peer}/{hello.rank}/{hello.instance}"  # a successor's answers are not this process's
        connection = Connection(config.rendezvous, self._client_keys, identity, config.rate_limit_mbit)
        self._exchange = Exchange(connection, self._header_key, hello)
        await self._greet()
        self._beating = asyncio.create_task(self._keep_beating())

    async def _shut(self) -> None:
        if self._exchange is None:
            return
        if self._hello.training:
            self._hello = structs.replace(self._hello, training=False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beat_early(), _FAREWELL_S / 2)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task is not self._exchange.connection.receiver:
                task.cancel()
        await self._exchange.connection.close()

    async def _greet(self) -> None:
        """Ask to be admitted. Raises DeadlineError after _CONNECT_TIMEOUT_S, or RefusedError."""
        timeout_s, began = _CONNECT_TIMEOUT_S, time.monotonic()
        while True:
            answer = await self._live.connection.call(self._hello, timeout_s)
            if isinstance(answer, messages.PeerWelcome):
                self._beat_s, self._hellos = answer.beat_s, self._hellos + 1
                return
            waiting_for = answer.waiting_for if isinstance(answer, messages.RoundNotReady) else type(answer).__name__
            if time.monotonic() - began > timeout_s:
                raise DeadlineError(f"the rendezvous did not admit peer {self._hello.peer}: it waits for {waiting_for}")
            await asyncio.sleep(0.2)

    async def _keep_beating(self) -> None:
        """Beat until cancelled or refused. An outage is no failure: waiting for a round has a deadline of its own."""
        silent = False
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._beat()
                silent = False
            except WireError as error:  # RefusedError, or an answer of another release
                self._failure = RunMismatchError(str(error))
                logger.warning("%s", error)
                return
            except DeadlineError as error:
                if not silent:
                    logger.warning("%s", error)
                silent = True

    async def _beat(self) -> None:
        """Report where this rank stands. Raises DeadlineError or RefusedError."""
        hello = self._hello
        beat = messages.Beat(
            peer=hello.peer, rank=hello.rank, instance=hello.instance, outer_step=hello.outer_step,
            base_hash=hello.base_hash, training=hello.training, inner_steps=self._inner_steps,
        )  # fmt: skip
        answer = await self._live.connection.call(beat, _BEAT_TIMEOUT_S)
        if isinstance(answer, messages.BeatReply) and answer.known:
            self._status, self._status_at = answer, time.monotonic()
            idle = self._serving is None or self._serving.done()
            if idle and answer.state_wanted not in (0, self._unserved):
                self._serving = asyncio.create_task(self._serve_state(answer.state_wanted))
        elif isinstance(answer, messages.BeatReply):
            logger.info("the rendezvous does not know this peer (any more): sending a hello")
            await self._greet()

    async def _serve_state(self, serial: int) -> None:
        """Copy the global state and upload it for a joining peer, whatever the training thread waits for.

        The ranks of a peer serve on their own: what is of an earlier outer step than another rank's is asked for again.
        """
        try:
            header, body = await asyncio.to_thread(self._state_blob, serial)
            logger.info("serving the global state of outer step %d (%.1f MB)", header.outer_step, len(body) / 1e6)
            if not await self._live.connection.upload(self.seal(header), body, self._hello.instance):
                logger.info("the state is not wanted any more")
        except (WireError, DeadlineError) as error:
            self._unserved = serial
            logger.warning("the state could not be served: %s", error)

    def _state_blob(self, serial: int) -> tuple[messages.Header, memoryview]:
        body, outer_step, base_hash = self._state_to_serve()
        return self.header("state", body, outer_step, base_hash, serial=serial), body

    async def _beat_early(self) -> None:
        """Send a beat ahead of time; when it is lost the next one carries the same."""
        with contextlib.suppress(DeadlineError, RefusedError):
            await self._beat()
