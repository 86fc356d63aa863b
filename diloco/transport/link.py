"""A trainer rank's link to the other clusters, in a thread of its own: training goes on while deltas travel.

    engine thread                         link thread
    offer(header, body)  ───────────────> upload, ask for the outcome, fetch the others' bodies (exchange.py)
    wait(timeout_s)      <─────────────── Arrived | Left | nothing yet
    seek, found          <──────────────> a state to join with
                                          a beat every few seconds: alive, at which outer step (session.py)

A lost connection or a restarted rendezvous is nothing special: requests are repeated, uploads go on where they were.
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
from diloco.rendezvous.peer import Position
from diloco.transport.connection import Connection, RefusedError
from diloco.transport.exchange import Exchange, JoinSource, MustRejoin, Offered, RoundResult
from diloco.transport.header import Header, body_checksum, seal_header
from diloco.transport.keys import JointKey
from diloco.transport.messages import Unusable, layout_hash
from diloco.transport.session import Member, Session

logger = logging.getLogger(__name__)
T = TypeVar("T")
_FAREWELL_S = 4.0


class PeerLink:
    def __init__(self, config: DilocoConfig, key: JointKey, member: Member) -> None:
        self._config, self._member = config, member
        self._client, self._header_key = key.client(), key.derive("headers")
        self._layout_hash = layout_hash(member.layout)
        self._session = Session(config, member)
        self._connection: Connection | None = None
        self._exchange: Exchange | None = None
        self._part: Offered | None = None
        self._round: concurrent.futures.Future[RoundResult | MustRejoin] | None = None
        self._hellos = 0
        """Of the session, when the round was begun."""
        self._beating: asyncio.Task[None] | None = None
        self._join: concurrent.futures.Future[JoinSource] | None = None
        self._attempt = 0
        self._served = 0
        """Serial of the last request for this peer's state that was met."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-link", daemon=True)

    # -- engine thread -------------------------------------------------------------------------------------------

    def start(self, outer_step: int, base_hash: str) -> None:
        """Connect and say hello as one that stands there.

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

    def position(self, outer_step: int, base_hash: str, *, training: bool | None = None) -> None:
        """Where this rank stands, for the next beat; while it is not training no round waits for it.

        None leaves that as it was; a change is told at once. Never waits.
        """
        before = self._session.position.training
        self._session.position = Position(outer_step, base_hash, before if training is None else training)
        if training is not None and self._connection is not None:
            self._submit(self._session.tell(self._connection))

    def header(self, kind: str, body: memoryview, outer_step: int, base_hash: str, **facts: Any) -> Header:
        """Of a body that belongs to the global values with that hash; not sealed yet. `facts`: more of its fields."""
        return Header(
            kind=kind, run=self._config.run, peer=self._config.peer_id, rank=self._member.rank, size=len(body),
            outer_step=outer_step, base_hash=base_hash, layout_hash=self._layout_hash,
            checksum=body_checksum(body), **facts,
        )  # fmt: skip

    def offer(self, header: Header, body: memoryview) -> None:
        """Start on a round: bring a delta, then fetch the outcome; `body` must not change any more."""
        self._part = Offered(outer_step=header.outer_step, base_hash=header.base_hash, header=header, body=body)
        self.repeat()

    def fetch(self, outer_step: int, base_hash: str) -> None:
        """Start on a round without a delta: only fetch what the others agreed on."""
        self._part = Offered(outer_step=outer_step, base_hash=base_hash)
        self.repeat()

    def repeat(self) -> None:
        """Take part once more in the round that was begun, for not all ranks of this peer were told the same."""
        if self._round is not None:
            self._round.cancel()
        self._hellos = self._session.hellos
        self._round = self._submit(self._exchange.take_part(self._part))

    def wait(self, timeout_s: float) -> RoundResult | MustRejoin | None:
        """How the round that was begun ended; None while it has not. Raises what went wrong, such as WireErrors."""
        if self._session.failure is not None:
            raise self._session.failure
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return self._round.result(timeout_s) if self._round is not None else None
        return None

    @property
    def outdated(self) -> bool:
        """Whether the rendezvous was restarted since the round was begun, and cannot tell others how it ended."""
        return self._hellos != self._session.hellos

    def left_s(self, outer_step: int) -> float | None:
        """Until a delta that is begun now would miss the deadline of this round, if that runs; as of the last beat."""
        status = self._session.status
        if status.open_round != outer_step or status.left_s is None:
            return None
        return status.left_s - (time.monotonic() - self._session.status_at) - self._exchange.upload_s

    @property
    def state_wanted(self) -> int:
        """Serial of a request for this peer's state; 0 for none."""
        serial = self._session.status.state_wanted
        return serial if serial != self._served else 0

    def serve_state(self, header: Header, body: memoryview) -> None:
        """Upload a copy of the state in the background; `body` must not change any more."""
        self._served = header.serial
        upload = self._submit(
            self._connection.upload(seal_header(header, self._header_key), body, self._member.instance)
        )
        upload.add_done_callback(_note_upload)

    def refuse_state(self, serial: int, reason: str) -> None:
        """Have another source asked, for this state can not be served, or not be taken over. Never waits."""
        self._served = serial
        said = Unusable(
            peer=self._config.peer_id, instance=self._member.instance, serial=serial, reason=reason
        )  # fmt: skip
        self._submit(self._connection.call(said))

    def seek(self, outer_step: int, base_hash: str) -> None:
        """Ask for what to join with, being at `outer_step` with `base_hash`; all ranks of the peer must ask."""
        if self._join is not None:
            self._join.cancel()
        self._attempt += 1
        self._join = self._submit(self._exchange.fetch_state(outer_step, base_hash, self._attempt))

    def found(self, timeout_s: float) -> JoinSource | None:
        """What to join with; None while it is not known. Raises what went wrong, such as WireErrors."""
        if self._session.failure is not None:
            raise self._session.failure
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return self._join.result(timeout_s) if self._join is not None else None
        return None

    def sought(self) -> None:
        """What was found is with the caller now: let go of it."""
        self._join = None

    @property
    def waiting_for(self) -> str:
        """What the rendezvous said last when there was no answer yet."""
        return self._exchange.waiting_for if self._exchange is not None else "a connection"

    def seal(self, header: Header) -> Header:
        return seal_header(header, self._header_key)

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
        config, member = self._config, self._member
        identity = f"{config.peer_id}/{member.rank}/{member.instance}"  # a successor's answers are not this process's
        connection = Connection(config.rendezvous, self._client, identity, config.rate_limit_mbit)
        self._connection = connection
        self._exchange = Exchange(connection, self._header_key, config.run, config.peer_id, member)
        await self._session.hello(connection)
        self._beating = asyncio.create_task(self._session.keep_beating(connection))

    async def _shut(self) -> None:
        if self._connection is None:
            return
        where = self._session.position
        if where.training:
            self._session.position = Position(where.outer_step, where.base_hash, False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._session.tell(self._connection), _FAREWELL_S / 2)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task is not self._connection._receiver:
                task.cancel()
        await self._connection.close()


def _note_upload(upload: concurrent.futures.Future[bool]) -> None:
    if upload.cancelled():
        return
    if (error := upload.exception()) is not None:
        logger.warning("the state could not be served: %s", error)
    elif not upload.result():
        logger.info("the state is not wanted any more")
