"""What the rendezvous answers to each request. No I/O here.

Header, size and room are checked before any byte of a body is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from composer_prime.errors import RunMismatchError, WireError
from diloco.rendezvous.rounds import Base, Blob, RendezvousSettings, Round, Rounds, largest_party
from diloco.rendezvous.starting_state import Joins
from diloco.transport import messages
from diloco.transport.connection import PIECE_BYTES

logger = logging.getLogger(__name__)
_MAX_RANKS = 4096


class RequestHandler:
    def __init__(
        self, settings: RendezvousSettings, header_key: bytes, clock: Callable[[], float], on_change: Callable[[], None]
    ) -> None:
        self.settings = settings
        self._header_key = header_key
        self._clock = clock
        self._on_change = on_change
        self.rounds = Rounds(settings)
        self.joins = Joins(self.rounds, settings, clock())
        self._unsettled_since = clock()
        self._short_since: float | None = None
        """Since when offers find no room."""

    def answer(self, request: messages.FromPeer) -> messages.ToPeer:
        """Answer one request. Raises WireErrors."""
        match request:
            case messages.PeerHello():
                return self._hello(request)
            case messages.Beat():
                return self._beat(request)
            case messages.DeltaOffer():
                return self._offer(request.header, request.instance)
            case messages.Piece():
                return self._piece(request)
            case messages.Get():
                return self._get(request)
            case messages.AskRound():
                return self._outcome(request)
            case messages.AskState():
                return self.joins.answer(request, self._clock())

    # -- peers -----------------------------------------------------------------------------------------------------

    def _hello(self, hello: messages.PeerHello) -> messages.ToPeer:
        self.rounds.check_not_replaced(hello.peer, hello.instance)
        if hello.protocol != messages.PROTOCOL:
            raise RunMismatchError(
                f"peer {hello.peer} speaks {hello.protocol}, this rendezvous {messages.PROTOCOL}: use one release on "
                "all machines"
            )
        if hello.run != self.settings.run:
            raise RunMismatchError(
                f"peer {hello.peer} joins run {hello.run!r}, this rendezvous serves {self.settings.run!r}: "
                "check diloco.run and diloco.rendezvous"
            )
        if not 0 <= hello.rank < hello.ranks <= _MAX_RANKS:
            raise WireError(
                f"the hello of peer {hello.peer} is of rank {hello.rank} of {hello.ranks}, expected 1 to "
                f"{_MAX_RANKS} ranks and one of them"
            )
        self._check_room(hello, self._clock())
        waiting_for = self.rounds.admit(hello, self._clock())
        if waiting_for is not None:
            return messages.RoundNotReady(waiting_for=waiting_for)
        self._on_change()
        logger.info("peer %s rank %d sent a hello at outer step %d", hello.peer, hello.rank, hello.outer_step)
        return messages.BeatReply(beat_s=self.settings.beat_s)

    def _check_room(self, hello: messages.PeerHello, now: float) -> None:
        """Raises WireError when the deltas of all peers do not fit in memory."""
        needed = {peer.name: peer.delta_bytes for peer in self.rounds.alive(now)}
        needed[hello.peer] = hello.ranks * hello.delta_bytes
        if (total := sum(needed.values())) > (limit := self.settings.max_bytes):
            raise WireError(
                f"the deltas of the peers {', '.join(sorted(needed))} take up to {total / 1e9:.3g} GB, more than the "
                f"rendezvous' {limit / 1e9:.3g} GB: start `diloco rendezvous` with a larger --memory-gb, or "
                "raise diloco.fragments"
            )

    def _beat(self, beat: messages.Beat) -> messages.ToPeer:
        now = self._clock()
        report = self.rounds.report(beat.peer, beat.rank, beat.instance, now)
        if report is None:
            return messages.Gone(reason="send a hello first")
        report.note(beat.outer_step, beat.base_hash, now, training=beat.training)
        report.inner_steps = beat.inner_steps
        if self.rounds.peers[beat.peer].training:
            self.joins.note_training(beat.peer)
        self._on_change()
        current = self.rounds.open_round()
        return messages.BeatReply(
            beat_s=self.settings.beat_s,
            open_round=current.outer_step if current else None,
            left_s=self.rounds.left_s(current, now) if current else None,
            state_wanted=self.joins.requested_from(beat.peer, beat.rank),
        )

    # -- bodies ----------------------------------------------------------------------------------------------------

    def _offer(self, header: messages.BlobHeader, instance: int) -> messages.ToPeer:
        messages.authenticate(header, self._header_key, run=self.settings.run)
        now = self._clock()
        report = self.rounds.report(header.peer, header.rank, instance, now)
        if report is None:
            return messages.Gone(reason="send a hello first")
        _check_header(header, report.hello)
        if isinstance(header, messages.StateHeader):
            return self._offer_state(header, now)
        if self.rounds.closed(header.outer_step):
            return messages.Gone(reason=f"round {header.outer_step} is closed")
        if not self.rounds.accepts(header.outer_step, now):
            return messages.Gone(
                reason=f"peer {header.peer} brings a delta of outer step {header.outer_step}, the others are at "
                f"{self.rounds.front(now)}"
            )
        report.note(header.outer_step, header.base_hash, now)  # more recent than the last beat
        if (wait := self._make_room(header, now)) is not None:
            return wait
        blob = self.rounds.delta(header)
        if blob.complete:
            self.rounds.note_whole(header.outer_step, now)
        return messages.Received(size=blob.received)

    def _offer_state(self, header: messages.StateHeader, now: float) -> messages.ToPeer:
        wanted = self.joins.requested_from(header.peer) == header.serial
        if wanted and (wait := self._make_room(header, now)) is not None:
            return wait
        blob = self.joins.state(header, now)
        if blob is None:
            return messages.Gone(reason="this state is not wanted")
        return messages.Received(size=blob.received)

    def _piece(self, piece: messages.Piece) -> messages.ToPeer:
        blob, now = self._find(piece.name), self._clock()
        report = blob and self.rounds.report(blob.header.peer, blob.header.rank, piece.instance, now)
        if blob is None or report is None:
            return messages.Gone(reason=f"nothing called {piece.name} is expected")
        blob.add(piece.offset, piece.data)
        if isinstance(blob.header, messages.StateHeader) and self.joins.current:
            self.joins.current.progress_at = now
        if blob.complete:
            if isinstance(blob.header, messages.DeltaHeader):
                self.rounds.note_whole(blob.header.outer_step, now)
            self._on_change()
        return messages.Received(size=blob.received)

    def _get(self, get: messages.Get) -> messages.ToPeer:
        blob = self._find(get.name)
        if blob is None or not blob.complete:
            return messages.Gone(reason=f"{get.name} is not kept any more")
        end = get.offset + min(get.length, PIECE_BYTES)
        return messages.Piece(name=get.name, offset=get.offset, data=bytes(blob.data[get.offset : end]))

    def _find(self, name: str) -> Blob | None:
        return next((blob for blob in self._blobs() if blob.name == name), None)

    def _blobs(self) -> list[Blob]:
        holders = [*self.rounds.rounds.values(), *([self.joins.current] if self.joins.current else [])]
        return [blob for holder in holders for blob in holder.blobs.values()]

    @property
    def held_bytes(self) -> int:
        return sum(len(blob.data) for blob in self._blobs())

    def _make_room(self, header: messages.BlobHeader, now: float) -> messages.RoundNotReady | None:
        """Drop the oldest rounds, for a delta also the state; else return an answer. Raises WireError."""
        known, limit = self._find(header.name), self.settings.max_bytes
        if known is not None and known.header.checksum == header.checksum:
            return None
        if header.size > limit:
            raise WireError(
                f"{header.name} has {header.size / 1e9:.3g} GB, more than the rendezvous' {limit / 1e9:.3g} GB: start "
                "`diloco rendezvous` with a larger --memory-gb"
            )
        short_s = now - self._short_since if self._short_since is not None else 0.0
        while (held := self.held_bytes) + header.size > limit:
            if self.rounds.drop_oldest(now, short_s):
                self.joins.expire(self.rounds.oldest)
            elif isinstance(header, messages.DeltaHeader) and self.joins.current is not None:
                self.joins.crowd_out(self.joins.current)
            else:
                self._short_since = now if self._short_since is None else self._short_since
                return messages.RoundNotReady(
                    waiting_for=f"room for the {header.size / 1e9:.3g} GB of {header.name}: what is under way holds "
                    f"{held / 1e9:.3g} of the rendezvous' {limit / 1e9:.3g} GB (--memory-gb)"
                )
        self._short_since = None
        return None

    # -- rounds ----------------------------------------------------------------------------------------------------

    def close(self, members: dict[str, Base]) -> Round:
        closed = self.rounds.close(members, self._clock())
        self.joins.expire(self.rounds.oldest)
        return closed

    def _outcome(self, ask: messages.AskRound) -> messages.ToPeer:
        self.rounds.check_not_replaced(ask.peer, ask.instance)
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
            # One that took over the winners' model since is no loser, though its earlier delta is here.
            if ask.peer in others and _starts_from(ask, others[ask.peer]):
                return _differs(ask, sorted(winners))
        return messages.RoundNotReady(waiting_for=self._missing(ask.outer_step, now))

    def may_close(self, now: float) -> bool:
        """Return whether rounds may end: after a (re)start peers must have had time to be heard.

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
        if short > 0:
            waits.append(f"{short} more peer(s) with the same global model (--min-peers)")
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


def _check_header(header: messages.BlobHeader, hello: messages.PeerHello) -> None:
    expected = messages.layout_hash(hello.layout)
    if header.layout_hash != expected:
        raise RunMismatchError(
            f"{header.name} is of layout {header.layout_hash}, but the hello of peer {hello.peer} was of {expected}"
        )
    limit = messages.largest_body(hello.layout, header)
    if header.size > limit:
        kind = header.name.partition("/")[0]
        raise WireError(f"{header.name} has {header.size} bytes, a {kind} of its layout at most {limit}")
