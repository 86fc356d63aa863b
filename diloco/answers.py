"""What the rendezvous answers to each request, from its books. No I/O here: rendezvous.py sends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from composer_prime.errors import ChecksumError, RunMismatchError, WireError
from diloco.blob import Blob
from diloco.header import PROTOCOL, Header, authenticate
from diloco.joining import Joins
from diloco.layout import largest_body, layout_hash
from diloco.peer import Base, Peer, Position, largest_party
from diloco.rounds import Rounds
from diloco.transfer import Transfers
from diloco.wire import (
    AskRound,
    AskState,
    Beat,
    BeatReply,
    Chunk,
    Closed,
    FromPeer,
    Get,
    Gone,
    Hello,
    NotReady,
    Offer,
    Outcome,
    Piece,
    Received,
    Refused,
    ToPeer,
    Unusable,
    Welcome,
)

logger = logging.getLogger(__name__)
_MAX_PIECE_BYTES = 1 << 22
_MAX_RANKS = 4096
"""Of one peer; the books go through them all."""


class RendezvousSettings(msgspec.Struct, frozen=True, kw_only=True):
    bind: str
    """tcp://ADDRESS:PORT; port 0 takes a free one."""
    run: str
    min_peers: int = 1
    """A round needs this many contributions."""
    start_peers: int = 1
    """The first round waits until so many peers are training."""
    gather_s: float = 60.0
    """How long, after a restart of the rendezvous or of all peers, those that come first wait for start_peers."""
    beat_timeout_s: float = 10.0
    """A peer that is silent for longer is gone; beats come five times as often."""
    keep_rounds: int = 16
    """Closed rounds that late peers can catch up with, as far as max_bytes allows."""
    max_bytes: int = 16_000_000_000
    """Most bytes of deltas and of a state in memory."""

    @property
    def listen_s(self) -> float:
        """After its start: until then every peer that trains is heard, also if its last request was lost in between."""
        return 0.6 * self.beat_timeout_s


class Answers:
    def __init__(
        self,
        settings: RendezvousSettings,
        header_key: bytes,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when something happened that requests may wait for."""
        self.settings, self._header_key, self._clock, self._changed = settings, header_key, clock, changed
        self.rounds = Rounds(beat_timeout_s=settings.beat_timeout_s, keep=settings.keep_rounds)
        self.transfers = Transfers(stall_s=2 * settings.beat_timeout_s)
        self.joins = Joins(
            self.rounds, self.transfers, expected=settings.start_peers, gather_s=settings.gather_s,
            listens_until=clock() + settings.listen_s,
        )  # fmt: skip
        self._unsettled_since = clock()

    def to(self, request: FromPeer) -> ToPeer:
        """Raises WireErrors for a request that does not belong here. NotReady asks the sender to come again."""
        if (speaker := self._speaker(request)) is not None:
            self.rounds.check_not_succeeded(*speaker)
        match request:
            case Hello():
                return self._hello(request)
            case Beat():
                return self._beat(request)
            case Offer():
                return self._offer(request.header, request.instance)
            case Chunk():
                return self._chunk(request)
            case Get():
                return self._get(request)
            case AskRound():
                return self._outcome(request)
            case AskState():
                return self.joins.answer(request, self._clock())
            case Unusable():
                return self._unusable(request)

    def _speaker(self, request: FromPeer) -> tuple[str, int] | None:
        """The peer, and which start of it; None where it does not matter."""
        match request:
            case Hello() | Beat() | AskRound() | AskState() | Unusable():
                return request.peer, request.instance
            case Offer():
                return request.header.peer, request.instance
            case Chunk() if (blob := self._find(request.name)) is not None:
                return blob.header.peer, request.instance
        return None

    def _hello(self, hello: Hello) -> ToPeer:
        if hello.protocol != PROTOCOL:
            told = str(hello.protocol) if hello.protocol else "an older protocol"
            return Refused(
                error=f"peer {hello.peer} speaks {told}, this rendezvous {PROTOCOL}: use one release on all machines"
            )
        if hello.run != self.settings.run:
            return Refused(
                error=f"peer {hello.peer} joins run {hello.run!r}, this rendezvous serves {self.settings.run!r}: "
                "check diloco.run and diloco.rendezvous"
            )
        if not 0 <= hello.rank < hello.ranks <= _MAX_RANKS:
            told = f"rank {hello.rank} of {hello.ranks}, expected 1 to {_MAX_RANKS} ranks and one of them"
            return Refused(error=f"peer {hello.peer} says hello as {told}")
        waiting = self.rounds.admit(hello, self._clock())
        if waiting is not None:
            return NotReady(waiting_for=waiting)
        self._compare_models(hello.peer, hello.rank)
        self._changed()
        logger.info("peer %s rank %d said hello at outer step %d", hello.peer, hello.rank, hello.outer_step)
        return Welcome(beat_s=self.settings.beat_timeout_s / 5)

    def _beat(self, beat: Beat) -> ToPeer:
        now = self._clock()
        peer = self.rounds.peers.get(beat.peer)
        if peer is None or peer.instance != beat.instance or beat.rank not in peer.layouts:
            return BeatReply(known=False, open_round=None, left_s=None, state_wanted=0)
        peer.note(beat.rank, Position(beat.outer_step, beat.base_hash, beat.training), now)
        if peer.training:
            self.joins.trains(peer.name)
        self._compare_models(peer.name, beat.rank)
        self._changed()
        current = self.rounds.open_round()
        return BeatReply(
            known=True,
            open_round=current.outer_step if current else None,
            left_s=self.rounds.left_s(current, now) if current else None,
            state_wanted=self.transfers.wanted(beat.peer),
        )

    def _compare_models(self, peer: str, rank: int) -> None:
        """Say so when a peer that has begun holds another global model than the others at its outer step."""
        where = self.rounds.peers[peer].positions[rank]
        if where.training or where.outer_step > 0:
            difference = self.rounds.agreement.difference(peer, rank, where)
            if difference:
                logger.error("%s", difference)

    # -- bodies ----------------------------------------------------------------------------------------------------

    def _offer(self, header: Header, instance: int) -> ToPeer:
        authenticate(header, self._header_key, run=self.settings.run)
        now = self._clock()
        peer = self.rounds.peers.get(header.peer)
        if peer is None or peer.instance != instance or header.rank not in peer.layouts:
            return Gone(reason="say hello first")
        self._check(header, peer)
        peer.heard[header.rank] = now
        if header.kind == "state":
            return self._offered_state(header, now)
        if self.rounds.closed(header.outer_step):
            return Closed(outer_step=header.outer_step)
        if not self.rounds.accepts(header.outer_step, now):
            return Gone(
                reason=f"peer {header.peer} brings a delta of outer step {header.outer_step}, the others are at "
                f"{self.rounds.front(now)}"
            )
        # Fresher than the last beat.
        peer.note(header.rank, Position(header.outer_step, header.base_hash, peer.positions[header.rank].training), now)
        self._make_room(header)
        blob = self.rounds.delta(header)
        if blob.complete:
            self.rounds.note_whole(header.outer_step, now)
        return Received(name=header.name, size=blob.received)

    def _check(self, header: Header, peer: Peer) -> None:
        if header.kind not in ("delta", "state") or header.outer_step < 0 or header.size < 0:
            raise WireError(
                f"{header.name} of outer step {header.outer_step} with {header.size} bytes is neither a delta nor a "
                "state"
            )
        expected = layout_hash(peer.layouts[header.rank])
        if header.layout_hash != expected:
            raise RunMismatchError(
                f"{header.name} is of layout {header.layout_hash}, but peer {peer.name} said hello with {expected}"
            )
        limit = largest_body(peer.layouts[header.rank], None if header.kind == "state" else header.fragment)
        if header.size > limit:
            raise WireError(f"{header.name} has {header.size} bytes, a {header.kind} of its layout at most {limit}")

    def _offered_state(self, header: Header, now: float) -> ToPeer:
        if self.transfers.wanted(header.peer) == header.serial:
            self._make_room(header)
        blob = self.transfers.state(header, now)
        return Received(name=header.name, size=blob.received) if blob else Gone(reason="this state is not wanted")

    def _make_room(self, header: Header) -> None:
        """Drop the oldest rounds for a body that is to come. Raises WireError when it does not fit all the same."""
        known = self._find(header.name)
        if known is not None and known.header.checksum == header.checksum:
            return
        limit = self.settings.max_bytes
        while self.rounds.held + self.transfers.held + header.size > limit and self.rounds.drop_oldest():
            self.transfers.expire(self.rounds.oldest)
        held = self.rounds.held + self.transfers.held
        if held + header.size > limit:
            raise WireError(
                f"{header.name} has {header.size / 1e9:.3g} GB, and what is under way holds {held / 1e9:.3g} of the "
                f"rendezvous' {limit / 1e9:.3g} GB: start `diloco lighthouse` with a larger --memory-gb"
            )

    def _chunk(self, chunk: Chunk) -> ToPeer:
        blob = self._find(chunk.name)
        peer = self.rounds.peers.get(blob.header.peer) if blob is not None else None
        if blob is None or peer is None or peer.instance != chunk.instance:
            return Gone(reason=f"nothing called {chunk.name} is expected")
        peer.heard[blob.header.rank] = self._clock()
        try:
            blob.add(chunk.offset, chunk.data)
        except ChecksumError as error:
            logger.warning("%s", error)
            return Refused(error=str(error))
        if blob.header.kind == "state" and self.transfers.current:
            self.transfers.current.progress_at = self._clock()
        if blob.complete:
            if blob.header.kind == "delta":
                self.rounds.note_whole(blob.header.outer_step, self._clock())
            self._changed()
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

    def _unusable(self, said: Unusable) -> ToPeer:
        source = self.transfers.refuse(said.serial)
        if source is not None:
            logger.warning("the state of peer %s is dropped, for peer %s says: %s", source, said.peer, said.reason)
            self._changed()
        return Gone(reason="this state is given to nobody")

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _outcome(self, ask: AskRound) -> ToPeer:
        found, now = self.rounds.closed(ask.outer_step), self._clock()
        if found is not None:
            if not _starts_from(ask, found.base):
                return _differs(ask, found.members)
            return Outcome(
                outer_step=ask.outer_step,
                quorum_id=found.quorum_id or 0,
                headers=[found.blobs[name, ask.rank].header for name in found.members],
                newest=self.rounds.newest if self.rounds.newest is not None else ask.outer_step,
                digest=found.digest,
            )
        if not self.rounds.accepts(ask.outer_step, now):
            return Gone(reason=f"round {ask.outer_step} is over and its deltas are not kept any more")
        current = self.rounds.open_round()
        if current is not None and current.split and self.begun(now):
            winners, others = self.rounds.parties(now)
            # Who has taken over the winners' model since asks from there, with its earlier delta still in the books.
            if ask.peer in others and _starts_from(ask, others[ask.peer]):
                return _differs(ask, sorted(winners))
        return NotReady(waiting_for=self._missing(ask.outer_step, now))

    def begun(self, now: float) -> bool:
        """Whether rounds may end: after a start or restart, the most advanced peers have had a chance to be heard.

        To be asked all the time: that chance begins with the last answer while rounds were settled.
        """
        if self.rounds.settled:
            self._unsettled_since = now
            return True
        waited, training = now - self._unsettled_since, self.rounds.awaited(now)
        if waited < self.settings.listen_s:
            return False
        if len(training) >= self.settings.start_peers:
            return True
        return waited >= self.settings.gather_s and any(peer.outer_step > 0 for peer in training)

    def _missing(self, outer_step: int, now: float) -> str:
        current, training = self.rounds.rounds.get(outer_step), self.rounds.awaited(now)
        brought = current.contributors(self.rounds.peers) if current else {}
        missing = sorted(peer.name for peer in training if peer.name not in brought)
        short = self.settings.min_peers - len(largest_party(brought)) - len(missing)
        waits = [f"the deltas of {', '.join(missing)}"] if missing else []
        waits += [f"{short} more peer(s) with the same global model (--min-peers)"] if short > 0 else []
        if not self.begun(now):
            absent = self.settings.start_peers - len(training)
            waits += [f"{absent} more peer(s) to train (--start-peers)" if absent > 0 else "peers that may come yet"]
        return " and ".join(waits) or "the lighthouse's quorum"


def _starts_from(ask: AskRound, base: Base) -> bool:
    return 0 <= ask.rank < len(base) and base[ask.rank] == ask.base_hash


def _differs(ask: AskRound, members: Sequence[str]) -> Gone:
    return Gone(
        reason=f"the global model of peer {ask.peer} before outer step {ask.outer_step} is not that of "
        f"{', '.join(members)}"
    )
