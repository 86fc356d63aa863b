"""What the rendezvous answers to each request, from its books. No I/O here: rendezvous.py sends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from diloco.rendezvous.bodies import Bodies
from diloco.rendezvous.joining import Joins
from diloco.rendezvous.peer import Base, Position, largest_party
from diloco.rendezvous.rounds import RendezvousSettings, Round, Rounds
from diloco.rendezvous.transfer import Transfers
from diloco.transport.header import PROTOCOL
from diloco.transport.messages import (
    AskRound,
    AskState,
    Beat,
    BeatReply,
    BodyChunk,
    DeltaOffer,
    FromPeer,
    Get,
    Gone,
    PeerHello,
    PeerWelcome,
    RequestRefused,
    RoundNotReady,
    RoundOutcome,
    ToPeer,
    Unusable,
)

logger = logging.getLogger(__name__)
_MAX_RANKS = 4096
"""Of one peer; the books go through them all."""


class RequestHandler:
    def __init__(
        self,
        settings: RendezvousSettings,
        header_key: bytes,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when something happened that requests may wait for."""
        self.settings, self._clock, self._changed = settings, clock, changed
        self.rounds = Rounds(beat_timeout_s=settings.beat_timeout_s, keep=settings.keep_rounds)
        self.transfers = Transfers(stall_s=2 * settings.beat_timeout_s)
        self.joins = Joins(
            self.rounds, self.transfers, expected=settings.start_peers, gather_s=settings.gather_s,
            listens_until=clock() + settings.listen_s,
        )  # fmt: skip
        self._bodies = Bodies(settings, header_key, self.rounds, self.transfers, clock=clock, changed=changed)
        self._unsettled_since = clock()

    def to(self, request: FromPeer) -> ToPeer:
        """Raises WireErrors for a request that does not belong here. NotReady asks the sender to come again."""
        if (speaker := self._speaker(request)) is not None:
            self.rounds.check_not_succeeded(*speaker)
        match request:
            case PeerHello():
                return self._hello(request)
            case Beat():
                return self._beat(request)
            case DeltaOffer():
                return self._bodies.offer(request.header, request.instance)
            case BodyChunk():
                return self._bodies.chunk(request)
            case Get():
                return self._bodies.get(request)
            case AskRound():
                return self._outcome(request)
            case AskState():
                return self.joins.answer(request, self._clock())
            case Unusable():
                return self._unusable(request)

    def _speaker(self, request: FromPeer) -> tuple[str, int] | None:
        """The peer, and which start of it; None where it does not matter."""
        match request:
            case PeerHello() | Beat() | AskRound() | AskState() | Unusable():
                return request.peer, request.instance
            case DeltaOffer():
                return request.header.peer, request.instance
            case BodyChunk() if (blob := self._bodies.find(request.name)) is not None:
                return blob.header.peer, request.instance
        return None

    def _hello(self, hello: PeerHello) -> ToPeer:
        if hello.protocol != PROTOCOL:
            told = str(hello.protocol) if hello.protocol else "an older protocol"
            return RequestRefused(
                error=f"peer {hello.peer} speaks {told}, this rendezvous {PROTOCOL}: use one release on all machines"
            )
        if hello.run != self.settings.run:
            return RequestRefused(
                error=f"peer {hello.peer} joins run {hello.run!r}, this rendezvous serves {self.settings.run!r}: "
                "check diloco.run and diloco.rendezvous"
            )
        if not 0 <= hello.rank < hello.ranks <= _MAX_RANKS:
            told = f"rank {hello.rank} of {hello.ranks}, expected 1 to {_MAX_RANKS} ranks and one of them"
            return RequestRefused(error=f"peer {hello.peer} says hello as {told}")
        waiting = self.rounds.admit(hello, self._clock())
        if waiting is not None:
            return RoundNotReady(waiting_for=waiting)
        self._compare_models(hello.peer, hello.rank)
        self._changed()
        logger.info("peer %s rank %d said hello at outer step %d", hello.peer, hello.rank, hello.outer_step)
        return PeerWelcome(beat_s=self.settings.beat_timeout_s / 5)

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

    def _unusable(self, said: Unusable) -> ToPeer:
        source = self.transfers.refuse(said.serial)
        if source is not None:
            logger.warning("the state of peer %s is dropped, for peer %s says: %s", source, said.peer, said.reason)
            self._changed()
        return Gone(reason="this state is given to nobody")

    # -- rounds ----------------------------------------------------------------------------------------------------

    def close(self, members: dict[str, Base], quorum_id: int) -> Round:
        """Close the open round with `members`, and let go of what is too old for late peers and for joiners."""
        closed = self.rounds.close(members, quorum_id, self.joins.needed_from(self._clock()))
        self.transfers.expire(self.rounds.oldest)
        return closed

    def _outcome(self, ask: AskRound) -> ToPeer:
        found, now = self.rounds.closed(ask.outer_step), self._clock()
        if found is not None:
            if not _starts_from(ask, found.base):
                return _differs(ask, found.members)
            return RoundOutcome(
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
        return RoundNotReady(waiting_for=self._missing(ask.outer_step, now))

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
