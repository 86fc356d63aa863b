"""A trainer rank's link to the other clusters, in a thread of its own: training goes on while deltas travel.

    training thread                       link thread
    offer(header, body)  ───────────────> upload, request the result, fetch the others' bodies (session.py, Exchange)
    wait(timeout_s)      <─────────────── RoundResult | MustRejoin | nothing yet
    request_source       ───────────────> a state to join with
    join_source          <───────────────
                                          a beat every few seconds: alive, at which outer step (session.py, Session)

A lost connection or a restarted rendezvous is no failure: requests are repeated, uploads go on where they were.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import RunMismatchError
from diloco.transport.connection import Connection, RefusedError
from diloco.transport.keys import JointKey
from diloco.transport.messages import Header, Position, Unusable, body_checksum, layout_hash, seal_header
from diloco.transport.session import Exchange, JoinSource, Member, MustRejoin, RoundEntry, RoundResult, Session

logger = logging.getLogger(__name__)
T = TypeVar("T")
_FAREWELL_S = 4.0


class PeerLink:
    def __init__(self, config: DilocoConfig, key: JointKey, member: Member) -> None:
        self._config = config
        self._member = member
        self._client_keys = key.client()
        self._header_key = key.derive("headers")
        self._layout_hash = layout_hash(member.layout)
        self._session = Session(config, member)
        self._connection: Connection | None = None
        """This and the exchange are made in the link thread, where their event loop runs."""
        self._exchange: Exchange | None = None
        self._entry: RoundEntry | None = None
        self._round: concurrent.futures.Future[RoundResult | MustRejoin] | None = None
        self._round_hellos = 0
        """The session's hellos when the round was begun."""
        self._beating: asyncio.Task[None] | None = None
        self._source: concurrent.futures.Future[JoinSource] | None = None
        self._attempt = 0
        self._answered_request = 0
        """Serial of the last request for this peer's state that was served or refused."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-link", daemon=True)

    # -- training thread -----------------------------------------------------------------------------------------

    def start(self, outer_step: int, base_hash: str) -> None:
        """Connect and send a hello from that position.

        Raises DeadlineError when the rendezvous does not answer, RunMismatchError when it refuses this peer.
        """
        self._session.position = Position(outer_step, base_hash, False)
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

    def set_position(self, outer_step: int, base_hash: str, *, training: bool | None = None) -> None:
        """Set where this rank stands, for the next beat; while it is not training no round waits for it.

        `training` None leaves that as it was; a value is sent at once. Never waits.
        """
        before = self._session.position.training
        self._session.position = Position(outer_step, base_hash, before if training is None else training)
        if training is not None and self._connection is not None:
            self._submit(self._session.beat_early(self._connection))

    def header(self, kind: str, body: memoryview, outer_step: int, base_hash: str, **fields: Any) -> Header:
        """Return the header, not sealed yet, of a body that belongs to the global values with that hash."""
        return Header(
            kind=kind, run=self._config.run, peer=self._config.peer_id, rank=self._member.rank, size=len(body),
            outer_step=outer_step, base_hash=base_hash, layout_hash=self._layout_hash,
            checksum=body_checksum(body), **fields,
        )  # fmt: skip

    def seal(self, header: Header) -> Header:
        return seal_header(header, self._header_key)

    def offer(self, header: Header, body: memoryview) -> None:
        """Begin a round: bring a delta, then fetch the result; `body` must not change any more."""
        self._entry = RoundEntry(outer_step=header.outer_step, base_hash=header.base_hash, header=header, body=body)
        self.retry_round()

    def fetch(self, outer_step: int, base_hash: str) -> None:
        """Begin a round without a delta: only fetch the result."""
        self._entry = RoundEntry(outer_step=outer_step, base_hash=base_hash)
        self.retry_round()

    def retry_round(self) -> None:
        """Take part once more in the round that was begun, because not all ranks of this peer got the same result."""
        if self._round is not None:
            self._round.cancel()
        self._round_hellos = self._session.hellos
        self._round = self._submit(self._exchange.take_part(self._entry))

    def wait(self, timeout_s: float) -> RoundResult | MustRejoin | None:
        """Return the result of the round that was begun; None while there is none. Raises its errors (WireErrors)."""
        return self._result(self._round, timeout_s)

    @property
    def rendezvous_restarted(self) -> bool:
        """Whether the rendezvous was restarted since the round was begun, and so forgot how it ended."""
        return self._round_hellos != self._session.hellos

    def time_left_s(self, outer_step: int) -> float | None:
        """Return the seconds until a delta begun now misses this round's deadline, as of the last beat.

        None while the deadline does not run.
        """
        status = self._session.status
        if status.open_round != outer_step or status.left_s is None:
            return None
        return status.left_s - (time.monotonic() - self._session.status_at) - self._exchange.upload_s

    @property
    def state_request(self) -> int:
        """Serial of a request for this peer's state; 0 for none."""
        serial = self._session.status.state_wanted
        return serial if serial != self._answered_request else 0

    def serve_state(self, header: Header, body: memoryview) -> None:
        """Upload a copy of the state in the background; `body` must not change any more."""
        self._answered_request = header.serial
        upload = self._submit(self._connection.upload(self.seal(header), body, self._member.instance))
        upload.add_done_callback(_log_upload)

    def refuse_state(self, serial: int, reason: str) -> None:
        """Report that this state cannot be served or taken over: another source is asked. Never waits."""
        self._answered_request = serial
        unusable = Unusable(
            peer=self._config.peer_id, instance=self._member.instance, serial=serial, reason=reason
        )  # fmt: skip
        self._submit(self._connection.call(unusable))

    def request_source(self, outer_step: int, base_hash: str) -> None:
        """Ask which state to join with, being at `outer_step` with `base_hash`; all ranks of the peer must ask."""
        if self._source is not None:
            self._source.cancel()
        self._attempt += 1
        self._source = self._submit(self._exchange.fetch_source(outer_step, base_hash, self._attempt))

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
        connection = self._connection
        return (connection.bytes_sent, connection.bytes_received) if connection else (0, 0)

    def _result(self, future: concurrent.futures.Future[T] | None, timeout_s: float) -> T | None:
        if self._session.failure is not None:
            raise self._session.failure
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return future.result(timeout_s) if future is not None else None
        return None

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # -- link thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open(self) -> None:
        config, member = self._config, self._member
        identity = f"{config.peer_id}/{member.rank}/{member.instance}"  # a successor's answers are not this process's
        connection = Connection(config.rendezvous, self._client_keys, identity, config.rate_limit_mbit)
        self._connection = connection
        self._exchange = Exchange(connection, self._header_key, config.run, config.peer_id, member)
        await self._session.hello(connection)
        self._beating = asyncio.create_task(self._session.keep_beating(connection))

    async def _shut(self) -> None:
        if self._connection is None:
            return
        position = self._session.position
        if position.training:
            self._session.position = Position(position.outer_step, position.base_hash, False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._session.beat_early(self._connection), _FAREWELL_S / 2)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task is not self._connection.receiver:
                task.cancel()
        await self._connection.close()


def _log_upload(upload: concurrent.futures.Future[bool]) -> None:
    if upload.cancelled():
        return
    if (error := upload.exception()) is not None:
        logger.warning("the state could not be served: %s", error)
    elif not upload.result():
        logger.info("the state is not wanted any more")
