"""The rendezvous of a joint run: relays deltas and states between clusters, and closes rounds.

    trainer rank (a, 0) ──┐   one CURVE connection each, outwards from the cluster: no cluster needs an open port
    trainer rank (a, 1) ──┼──> rendezvous ──> lighthouse (torchft, loopback): quorum of each round
    trainer rank (b, 0) ──┘        │
                                   └ rounds (who brought what, closed with whom), transfers (state for joiners)

Who waits on whom: a rank that asks for a round waits for the peers that are training, at most round_deadline_s after
the first delta; a joiner for one source's upload. Requests are answered at once or, with NotReady, after a second.
The rendezvous keeps nothing on disk. Restarted, it learns from the peers' next beats and offers where the run stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from composer_prime.errors import ChecksumError, ComposerError, DeadlineError
from composer_prime.wire.sockets import SecureServer, bind_router
from diloco.keys import JointKey
from diloco.membership import Lighthouse
from diloco.rounds import Blob, Rounds
from diloco.transfer import Transfers
from diloco.wire import (
    AskRound,
    AskState,
    Beat,
    BeatReply,
    Chunk,
    Closed,
    Current,
    FromPeer,
    Get,
    Gone,
    Header,
    Hello,
    NotReady,
    Offer,
    Outcome,
    Piece,
    Received,
    Refused,
    StateReady,
    ToPeer,
    Welcome,
    authenticate,
    encode,
    from_peer,
)

logger = logging.getLogger(__name__)
_TICK_S = 0.02
_LONG_POLL_S = 1.0
_QUORUM_TIMEOUT_S = 10.0
_MAX_PIECE_BYTES = 1 << 22


class RendezvousSettings(msgspec.Struct, frozen=True, kw_only=True):
    bind: str
    """tcp://ADDRESS:PORT; port 0 takes a free one."""
    run: str
    min_peers: int = 1
    """A round needs this many contributions."""
    start_peers: int = 1
    """The first round waits until so many peers are training."""
    beat_timeout_s: float = 10.0
    """A peer that is silent for longer is gone; beats come five times as often."""
    keep_rounds: int = 16
    """Closed rounds that late peers can catch up with."""
    max_blob_bytes: int = 1 << 36


class Rendezvous:
    """`async with Rendezvous(settings, key) as server: await server.serve()`."""

    def __init__(
        self, settings: RendezvousSettings, key: JointKey, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises PortInUseError, or ConfigError when torchft is not installed."""
        self.settings, self._clock = settings, clock
        self._header_key = key.derive("headers")
        self.lighthouse = Lighthouse(settings.min_peers)
        self._server: SecureServer = bind_router(settings.bind, key.server(), [key.client().own.public])
        self.endpoint = self._server.endpoint
        self.rounds = Rounds(beat_timeout_s=settings.beat_timeout_s, keep=settings.keep_rounds)
        self.transfers = Transfers(stall_s=2 * settings.beat_timeout_s)
        self._started = clock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Rendezvous:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        self._server.close()
        await asyncio.to_thread(self.lighthouse.close)

    async def serve(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._close_rounds())
            group.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            self._take(await self._server.socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        identity, number, raw = frames
        answer = self._answer(raw)
        if isinstance(answer, AskRound | AskState):
            self._keep(asyncio.create_task(self._answer_later(identity, number, answer)))
        else:
            self._keep(asyncio.create_task(self._send(identity, number, answer)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer(self, raw: bytes) -> ToPeer | AskRound | AskState:
        """The answer, or the request itself when its answer takes waiting."""
        try:
            request = from_peer(raw)
            if isinstance(request, AskRound | AskState):
                return request
            return self._handle(request)
        except ComposerError as error:
            logger.warning("refused: %s", error)
            return Refused(error=str(error))
        except Exception as error:  # one peer's odd request must not end the rendezvous for the others
            logger.exception("a request could not be handled")
            return Refused(error=f"the rendezvous could not handle this request ({type(error).__name__})")

    async def _send(self, identity: bytes, number: bytes, answer: ToPeer) -> None:
        # A peer that went away meanwhile has no route: its request is answered when it asks again.
        with contextlib.suppress(zmq.ZMQError):
            await self._server.socket.send_multipart([identity, number, encode(answer)])

    async def _answer_later(self, identity: bytes, number: bytes, request: AskRound | AskState) -> None:
        deadline = self._clock() + _LONG_POLL_S
        respond = self._outcome if isinstance(request, AskRound) else self._state
        while isinstance(answer := respond(request), NotReady) and (left := deadline - self._clock()) > 0:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
        await self._send(identity, number, answer)

    def _pulse(self) -> None:
        """Wake every request that waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    # -- requests ------------------------------------------------------------------------------------------------

    def _handle(self, request: FromPeer) -> ToPeer:
        match request:
            case Hello():
                return self._hello(request)
            case Beat():
                return self._beat(request)
            case Offer():
                return self._offer(request.header)
            case Chunk():
                return self._chunk(request)
            case Get():
                return self._get(request)
        raise AssertionError(request)

    def _hello(self, hello: Hello) -> ToPeer:
        if hello.run != self.settings.run:
            return Refused(
                error=f"peer {hello.peer} joins run {hello.run!r}, this rendezvous serves {self.settings.run!r}: "
                "check diloco.run and diloco.rendezvous"
            )
        if not 0 <= hello.rank < hello.ranks:
            return Refused(error=f"peer {hello.peer} says hello as rank {hello.rank} of {hello.ranks}")
        waiting = self.rounds.admit(hello, self._clock())
        if waiting is not None:
            return NotReady(waiting_for=waiting)
        logger.info("peer %s rank %d said hello", hello.peer, hello.rank)
        return Welcome(beat_s=self.settings.beat_timeout_s / 5)

    def _beat(self, beat: Beat) -> ToPeer:
        now = self._clock()
        peer = self.rounds.peers.get(beat.peer)
        if peer is None or beat.rank not in peer.layouts:
            return BeatReply(known=False, open_round=None, left_s=None, state_wanted=0)
        peer.heard[beat.rank] = now
        peer.beats[beat.rank] = beat
        current = self.rounds.open_round()
        return BeatReply(
            known=True,
            open_round=current.outer_step if current else None,
            left_s=self.rounds.left_s(current, now) if current else None,
            state_wanted=self.transfers.wanted(beat.peer),
        )

    def _offer(self, header: Header) -> ToPeer:
        authenticate(header, self._header_key, run=self.settings.run)
        now = self._clock()
        peer = self.rounds.peers.get(header.peer)
        if peer is None or header.rank not in peer.layouts:
            return Gone(reason="say hello first")
        if header.kind not in ("delta", "state") or header.outer_step < 0:
            return Refused(error=f"{header.name} of outer step {header.outer_step} is neither a delta nor a state")
        peer.heard[header.rank] = now
        if header.kind == "delta" and (beat := peer.beats.get(header.rank)):  # fresher than the last beat
            peer.beats[header.rank] = msgspec.structs.replace(
                beat, outer_step=header.outer_step, base_hash=header.base_hash
            )
        if not 0 <= header.size <= self.settings.max_blob_bytes:
            limit = self.settings.max_blob_bytes
            return Refused(error=f"{header.name} has {header.size} bytes, this rendezvous takes at most {limit}")
        if header.kind == "state":
            blob = self.transfers.state(header, now)
            return Received(name=header.name, size=blob.received) if blob else Gone(reason="this state is not wanted")
        if self.rounds.closed(header.outer_step):
            return Closed(outer_step=header.outer_step)
        if not self.rounds.accepts(header.outer_step, now):
            return Gone(
                reason=f"peer {header.peer} brings a delta of outer step {header.outer_step}, the others are at "
                f"{self.rounds.newest}"
            )
        return Received(name=header.name, size=self.rounds.delta(header, now).received)

    def _chunk(self, chunk: Chunk) -> ToPeer:
        blob = self._find(chunk.name)
        if blob is None:
            return Gone(reason=f"nothing called {chunk.name} is expected")
        if peer := self.rounds.peers.get(blob.header.peer):
            peer.heard[blob.header.rank] = self._clock()
        try:
            blob.add(chunk.offset, chunk.data)
        except ChecksumError as error:
            logger.warning("%s", error)
            return Refused(error=str(error))
        if blob.header.kind == "state" and self.transfers.current:
            self.transfers.current.progress_at = self._clock()
        if blob.complete:
            self._pulse()
        return Received(name=chunk.name, size=blob.received)

    def _find(self, name: str) -> Blob | None:
        kind, _, rest = name.partition("/")
        number, _, owner = rest.partition("/")
        peer, _, rank = owner.rpartition("/")
        if not (number.isdecimal() and rank.isdecimal()):
            return None
        if kind == "state":
            current = self.transfers.current
            wanted = current is not None and current.serial == int(number) and current.source == peer
            return current.blobs.get(int(rank)) if current and wanted else None
        found = self.rounds.rounds.get(int(number))
        return found.blobs.get((peer, int(rank))) if found else None

    def _get(self, get: Get) -> ToPeer:
        blob = self._find(get.name)
        if blob is None or not blob.complete:
            return Gone(reason=f"{get.name} is not kept any more")
        length = max(0, min(get.length, _MAX_PIECE_BYTES))
        return Piece(name=get.name, offset=get.offset, data=bytes(blob.data[get.offset : get.offset + length]))

    # -- answers that may take waiting ---------------------------------------------------------------------------

    def _outcome(self, ask: AskRound) -> ToPeer:
        found = self.rounds.closed(ask.outer_step)
        if found is not None:
            if ask.rank >= len(found.base) or found.base[ask.rank] != ask.base_hash:
                return Gone(
                    reason=f"the global model of peer {ask.peer} before outer step {ask.outer_step} is not that of "
                    f"{', '.join(found.members)}"
                )
            headers = [found.blobs[name, ask.rank].header for name in found.members]
            newest = self.rounds.newest if self.rounds.newest is not None else ask.outer_step
            return Outcome(
                outer_step=ask.outer_step, quorum_id=found.quorum_id or 0, headers=headers, newest=newest
            )
        if not self.rounds.accepts(ask.outer_step, self._clock()):
            return Gone(reason=f"round {ask.outer_step} is over and its deltas are not kept any more")
        return NotReady(waiting_for=self._missing(ask.outer_step))

    def _missing(self, outer_step: int) -> str:
        current = self.rounds.rounds.get(outer_step)
        brought = current.contributors(self.rounds.peers) if current else {}
        missing = [peer.name for peer in self.rounds.awaited(self._clock()) if peer.name not in brought]
        text = f"the deltas of {', '.join(sorted(missing))}" if missing else "the lighthouse's quorum"
        short = self.settings.min_peers - len(brought)
        return text + (f"; {short} more peer(s) must take part (--min-peers)" if short > len(missing) else "")

    def _state(self, ask: AskState) -> ToPeer:
        now = self._clock()
        peer = self.rounds.peers.get(ask.peer)
        if peer is None:
            return Gone(reason="say hello first")
        newest = -1 if self.rounds.newest is None else self.rounds.newest
        leaders = self.rounds.party(now, but=ask.peer)
        replayable = self.rounds.closed(ask.outer_step)
        held = any(
            each.outer_step == ask.outer_step and ask.rank < len(each.base) and each.base[ask.rank] == ask.base_hash
            for each in leaders
        )
        if held or (replayable and ask.rank < len(replayable.base) and replayable.base[ask.rank] == ask.base_hash):
            return Current(newest=newest)
        if not leaders and (self.transfers.current is None or not self.transfers.current.complete):
            others = [each.name for each in self.rounds.alive(now) if each.name != ask.peer and not each.beats]
            if now - self._started < self.settings.beat_timeout_s and others:
                return NotReady(waiting_for=f"the first beat of {', '.join(others)}")
            if not self.rounds.accepts(ask.outer_step, now):
                return NotReady(waiting_for=f"the rounds up to {newest} to be forgotten, whose peers have left")
            return Current(newest=newest)
        oldest = min((step for step in self.rounds.rounds), default=0)
        transfer = self.transfers.request(leaders, oldest, now)
        if transfer is None:
            return Current(newest=newest)
        if not transfer.complete:
            return NotReady(waiting_for=f"the state of peer {transfer.source}")
        if transfer.outer_step is None:  # its ranks answered at different steps
            self.transfers.current = None
            return NotReady(waiting_for="a state that is of one outer step on all ranks")
        return StateReady(header=transfer.blobs[ask.rank].header, newest=newest)

    # -- closing rounds ------------------------------------------------------------------------------------------

    async def _close_rounds(self) -> None:
        while True:
            now = self._clock()
            if self.rounds.forget(now):
                logger.warning("every peer went back behind the rounds that are kept: they are dropped")
            members = self.rounds.closable(now, self.settings.min_peers)
            if members is not None and self._begun(now):
                await self._close(dict(members))
            await asyncio.sleep(_TICK_S)

    def _begun(self, now: float) -> bool:
        """After a (re)start, first the most advanced peers must have had a chance to be heard."""
        if self.rounds.newest is not None:
            return True
        heard = now - self._started >= self.settings.beat_timeout_s / 2
        return heard and len(self.rounds.awaited(now)) >= self.settings.start_peers

    async def _close(self, members: dict[str, tuple[str, ...]]) -> None:
        current = self.rounds.open_round()
        assert current is not None
        step = current.outer_step
        try:
            quorum = await asyncio.to_thread(self.lighthouse.quorum, list(members), step, _QUORUM_TIMEOUT_S)
        except DeadlineError as error:
            logger.warning("round %d stays open: %s", step, error)
            return
        if self.rounds.open_round() is not current:
            return
        # A member whose process was replaced while the lighthouse deliberated has no contribution any more.
        whole = current.contributors(self.rounds.peers)
        still = {name: base for name, base in members.items() if name in quorum.peers and whole.get(name) == base}
        if len(still) < self.settings.min_peers:
            return
        late = sorted(peer.name for peer in self.rounds.awaited(self._clock()) if peer.name not in still)
        closed = self.rounds.close(still, quorum.id)
        self.transfers.expire(min(self.rounds.rounds))
        logger.info(
            "round %d closed with %s (quorum %d)%s", step, ", ".join(closed.members), quorum.id,
            f"; without {', '.join(late)}" if late else "",
        )  # fmt: skip
        self._pulse()
