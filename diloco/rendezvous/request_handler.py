"""What the rendezvous answers to each request. No I/O here: rendezvous.py receives and sends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from diloco.rendezvous.bodies import Bodies, StateTransfers
from diloco.rendezvous.peers import Base, largest_party
from diloco.rendezvous.rounds import Round, Rounds
from diloco.rendezvous.starting_state import Joins
from diloco.transport import messages

logger = logging.getLogger(__name__)
_MAX_RANKS = 4096
"""Of one peer; some requests loop over all of them."""


class RendezvousSettings(msgspec.Struct, frozen=True, kw_only=True):
    bind: str
    """tcp://ADDRESS:PORT; port 0 takes a free one."""
    run: str
    min_peers: int = 1
    """A round needs this many contributions."""
    start_peers: int = 1
    """The first round waits until this many peers are training."""
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


class RequestHandler:
    def __init__(
        self,
        settings: RendezvousSettings,
        header_key: bytes,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when something happened that requests may wait for."""
        self.settings = settings
        self._clock = clock
        self._on_change = on_change
        self.rounds = Rounds(beat_timeout_s=settings.beat_timeout_s, keep=settings.keep_rounds)
        self.transfers = StateTransfers(stall_s=2 * settings.beat_timeout_s)
        self.bodies = Bodies(
            run=settings.run, header_key=header_key, max_bytes=settings.max_bytes, rounds=self.rounds,
            transfers=self.transfers, clock=clock, on_change=on_change,
        )  # fmt: skip
        self.joins = Joins(
            rounds=self.rounds, transfers=self.transfers, expected=settings.start_peers, gather_s=settings.gather_s,
            listens_until=clock() + settings.listen_s,
        )  # fmt: skip
        self._unsettled_since = clock()

    def answer(self, request: messages.FromPeer) -> messages.ToPeer:
        """Answer one request; RoundNotReady asks the sender to come again.

        Raises WireErrors for a request that does not belong here.
        """
        if (sender := self._sender(request)) is not None:
            self.rounds.check_not_replaced(*sender)
        match request:
            case messages.PeerHello():
                return self._hello(request)
            case messages.Beat():
                return self._beat(request)
            case messages.DeltaOffer():
                return self.bodies.offer(request.header, request.instance)
            case messages.BodyChunk():
                return self.bodies.chunk(request)
            case messages.Get():
                return self.bodies.get(request)
            case messages.AskRound():
                return self._outcome(request)
            case messages.AskState():
                return self.joins.answer(request, self._clock())
            case messages.Unusable():
                return self._unusable(request)

    def _sender(self, request: messages.FromPeer) -> tuple[str, int] | None:
        """Return the peer and which start of it; None where it does not matter."""
        match request:
            case messages.DeltaOffer():
                return request.header.peer, request.instance
            case messages.BodyChunk():
                blob = self.bodies.find(request.name)
                return (blob.header.peer, request.instance) if blob is not None else None
            case messages.Get():
                return None
        return request.peer, request.instance

    def _hello(self, hello: messages.PeerHello) -> messages.ToPeer:
        if hello.protocol != messages.PROTOCOL:
            return messages.RequestRefused(
                error=f"peer {hello.peer} speaks {hello.protocol or 'an older protocol'}, this rendezvous "
                f"{messages.PROTOCOL}: use one release on all machines"
            )
        if hello.run != self.settings.run:
            return messages.RequestRefused(
                error=f"peer {hello.peer} joins run {hello.run!r}, this rendezvous serves {self.settings.run!r}: "
                "check diloco.run and diloco.rendezvous"
            )
        if not 0 <= hello.rank < hello.ranks <= _MAX_RANKS:
            return messages.RequestRefused(
                error=f"the hello of peer {hello.peer} is of rank {hello.rank} of {hello.ranks}, expected 1 to "
                f"{_MAX_RANKS} ranks and one of them"
            )
        self.bodies.check_room(hello, self._clock())
        waiting_for = self.rounds.admit(hello, self._clock())
        if waiting_for is not None:
            return messages.RoundNotReady(waiting_for=waiting_for)
        self._on_change()
        logger.info("peer %s rank %d sent a hello at outer step %d", hello.peer, hello.rank, hello.outer_step)
        return messages.PeerWelcome(beat_s=self.settings.beat_timeout_s / 5)

    def _beat(self, beat: messages.Beat) -> messages.ToPeer:
        now = self._clock()
        peer = self.rounds.peers.get(beat.peer)
        if peer is None or peer.instance != beat.instance or beat.rank not in peer.layouts:
            return messages.BeatReply(known=False, open_round=None, left_s=None, state_wanted=0)
        peer.note(beat.rank, messages.Position(beat.outer_step, beat.base_hash, beat.training), now)
        peer.inner_steps[beat.rank] = beat.inner_steps
        if peer.training:
            self.joins.note_training(peer.name)
        self._on_change()
        current = self.rounds.open_round()
        return messages.BeatReply(
            known=True,
            open_round=current.outer_step if current else None,
            left_s=self.rounds.left_s(current, now) if current else None,
            state_wanted=self.transfers.requested_from(beat.peer, beat.rank),
        )

    def _unusable(self, unusable: messages.Unusable) -> messages.ToPeer:
        source = self.transfers.refuse(unusable.serial)
        if source is not None:
            logger.warning(
                "the state of peer %s is dropped, peer %s reports: %s", source, unusable.peer, unusable.reason
            )
            self._on_change()
        return messages.Gone(reason="this state is no longer used")

    # -- rounds ----------------------------------------------------------------------------------------------------

    def close(self, members: dict[str, Base]) -> Round:
        """Close the open round with `members`, and drop what is too old for late and for joining peers."""
        closed = self.rounds.close(members, self._clock())
        self.transfers.expire(self.rounds.oldest)
        return closed

    def _outcome(self, ask: messages.AskRound) -> messages.ToPeer:
        closed, now = self.rounds.closed(ask.outer_step), self._clock()
        if closed is not None:
            if not _starts_from(ask, closed.base):
                return _differs(ask, closed.members)
            return messages.RoundOutcome(
                outer_step=ask.outer_step,
                headers=[closed.blobs[name, ask.rank].header for name in closed.members],
                newest=self.rounds.newest,
                digest=closed.digest,
            )
        if not self.rounds.accepts(ask.outer_step, now):
            return messages.Gone(reason=f"round {ask.outer_step} is over and its deltas are not kept any more")
        current = self.rounds.open_round()
        if current is not None and current.split and self.may_close(now):
            winners, others = self.rounds.parties(now)
            # A peer that took over the winners' model since asks from there; its earlier delta is still in the round.
            if ask.peer in others and _starts_from(ask, others[ask.peer]):
                return _differs(ask, sorted(winners))
        return messages.RoundNotReady(waiting_for=self._missing(ask.outer_step, now))

    def may_close(self, now: float) -> bool:
        """Return whether rounds may end: after a (re)start, the most advanced peers must have had time to be heard.

        Call it all the time: that time begins with the last call while rounds were settled.
        """
        if self.rounds.settled:
            self._unsettled_since = now
            return True
        waited_s, training = now - self._unsettled_since, self.rounds.training(now)
        if waited_s < self.settings.listen_s:
            return False
        if len(training) >= self.settings.start_peers:
            return True
        return waited_s >= self.settings.gather_s and any(peer.outer_step > 0 for peer in training)

    def _missing(self, outer_step: int, now: float) -> str:
        current, training = self.rounds.rounds.get(outer_step), self.rounds.training(now)
        contributors = current.contributors(self.rounds.peers) if current else {}
        missing = sorted(peer.name for peer in training if peer.name not in contributors and not peer.standing)
        short = self.settings.min_peers - len(largest_party(contributors)) - len(missing)
        waits = [f"the deltas of {', '.join(missing)}"] if missing else []
        waits += [f"{short} more peer(s) with the same global model (--min-peers)"] if short > 0 else []
        if not self.may_close(now):
            absent = self.settings.start_peers - len(training)
            waits += [f"{absent} more peer(s) to train (--start-peers)" if absent > 0 else "peers that may come yet"]
        return " and ".join(waits) or "the lighthouse's quorum"


def _starts_from(ask: messages.AskRound, base: Base) -> bool:
    return 0 <= ask.rank < len(base) and base[ask.rank] == ask.base_hash


def _differs(ask: messages.AskRound, members: Sequence[str]) -> messages.Gone:
    return messages.Gone(
        reason=f"the global model of peer {ask.peer} before outer step {ask.outer_step} is not that of "
        f"{', '.join(members)}"
    )
