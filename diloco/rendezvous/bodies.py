"""The bodies of deltas and states on their way through the rendezvous. No I/O here.

    Bodies             what may come in and what is handed out: the header, the size, the room are checked first
    StateTransfers     which training peer is asked for its state, for the peers that join

A source uploads its state once. The state stays for later joining peers while the rounds since then are
kept. A source that dies or makes no progress is replaced by another, as is one whose state is refused.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from composer_prime.errors import ChecksumError, RunMismatchError, WireError
from diloco.rendezvous.peers import Base, Peer
from diloco.rendezvous.rounds import Blob, Rounds
from diloco.transport import messages
from diloco.transport.connection import PIECE_BYTES

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StateTransfer:
    serial: int
    source: str
    ranks: int
    progress_at: float
    """When it last made progress."""
    blobs: dict[int, Blob] = field(default_factory=dict)
    """By rank."""

    @property
    def complete(self) -> bool:
        return len(self.blobs) == self.ranks and all(blob.complete for blob in self.blobs.values())

    @property
    def outer_step(self) -> int | None:
        """The outer step of all ranks' parts; None while they differ."""
        steps = {blob.header.outer_step for blob in self.blobs.values()}
        return steps.pop() if len(steps) == 1 else None

    @property
    def first_step(self) -> int | None:
        """The earliest outer step of a rank's part; None before the first is offered."""
        return min((blob.header.outer_step for blob in self.blobs.values()), default=None)

    @property
    def base(self) -> Base:
        return tuple(self.blobs[rank].header.base_hash for rank in sorted(self.blobs))

    def progress(self) -> str:
        size = sum(blob.header.size for blob in self.blobs.values())
        received = sum(blob.received for blob in self.blobs.values())
        return f"{received / 1e6:.1f} of {size / 1e6:.1f} MB of rank(s) {sorted(self.blobs)} are here"


class StateTransfers:
    def __init__(self, stall_s: float) -> None:
        """`stall_s`: a source without progress for this long is given up."""
        self.current: StateTransfer | None = None
        """Under way or complete."""
        self._stall_s = stall_s
        self._serial = secrets.randbits(48)  # ranks that got answers before and after a restart must notice
        self._failures: Counter[str] = Counter()

    def request(self, sources: Sequence[Peer], oldest_useful: int, now: float) -> StateTransfer | None:
        """Return the current transfer, or a new one from one of `sources`; None without a useful source.

        `oldest_useful`: a state of an earlier outer step is of no use, because the rounds since are not kept.
        """
        if self.current is not None and self._useful(self.current, sources, oldest_useful, now):
            return self.current
        if self.current is not None and not self.current.complete:
            self._failures[self.current.source] += 1
        self.current = None
        if sources:
            source = min(sources, key=lambda peer: (self._failures[peer.name], peer.name))
            self._serial += 1
            self.current = StateTransfer(self._serial, source.name, source.ranks, now)
        return self.current

    def _useful(self, transfer: StateTransfer, sources: Sequence[Peer], oldest_useful: int, now: float) -> bool:
        if transfer.complete:
            return transfer.outer_step is not None and transfer.outer_step >= oldest_useful
        alive = any(peer.name == transfer.source for peer in sources)
        return alive and now - transfer.progress_at <= self._stall_s

    def requested_from(self, peer: str, rank: int | None = None) -> int:
        """Return the serial of the state that this peer, or this rank of it, must serve; 0 for none."""
        current = self.current
        if current is None or current.source != peer or current.complete:
            return 0
        blob = current.blobs.get(rank) if rank is not None else None
        return 0 if blob is not None and blob.complete else current.serial

    def state(self, header: messages.Header, now: float) -> Blob | None:
        """Return the blob of a state that was requested; None for any other."""
        current = self.current
        if current is None or header.serial != current.serial or header.peer != current.source:
            return None
        if header.rank >= current.ranks:
            return None
        others = {rank: blob.header.outer_step for rank, blob in current.blobs.items() if rank != header.rank}
        if max(others.values(), default=-1) > header.outer_step:  # its rank will serve a newer one
            return None
        for rank in [rank for rank, step in others.items() if step < header.outer_step]:
            del current.blobs[rank]
        blob = current.blobs.get(header.rank)
        if blob is None or blob.header.checksum != header.checksum:
            blob = current.blobs[header.rank] = Blob(header)
        current.progress_at = now
        return blob

    def refuse(self, serial: int) -> str | None:
        """Drop this state as a failure of its source; return the source, None when the state is not here any more."""
        current = self.current
        if current is None or current.serial != serial:
            return None
        self._failures[current.source] += 1
        self.drop()
        return current.source

    def drop(self) -> None:
        """Drop the current state, which is of a void part of the run."""
        self.current = None

    def expire(self, oldest_useful: int) -> None:
        """Drop the current state when no peer can catch up from it any more."""
        current = self.current
        if current is None or (step := current.first_step) is None or step >= oldest_useful:
            return
        if not current.complete:
            self._failures[current.source] += 1
            logger.warning(
                "the state of peer %s is given up: %s, and the rounds since it are gone. If a peer still joins, start "
                "`diloco rendezvous` with a larger --memory-gb, or raise diloco.sync_every, or the source's "
                "diloco.rate_limit_mbit", current.source, current.progress(),
            )  # fmt: skip
        self.drop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    run: str
    header_key: bytes
    max_bytes: int
    """Most bytes of all bodies."""
    rounds: Rounds
    transfers: StateTransfers
    clock: Callable[[], float]
    on_change: Callable[[], None]
    """Called when a body is whole."""
    _short_since: list[float] = field(default_factory=list)
    """When an offer first found no room since one last did; empty while there is room."""

    def offer(self, header: messages.Header, instance: int) -> messages.ToPeer:
        """Answer from which byte a body may be sent, or that there is no room yet.

        Raises WireErrors for one that does not belong here.
        """
        messages.authenticate(header, self.header_key, run=self.run)
        now = self.clock()
        peer = self.rounds.peers.get(header.peer)
        if peer is None or peer.instance != instance or header.rank not in peer.layouts:
            return messages.Gone(reason="send a hello first")
        _check_header(header, peer)
        peer.heard[header.rank] = now
        if header.kind == "state":
            return self._offer_state(header, now)
        if self.rounds.closed(header.outer_step):
            return messages.RoundClosed(outer_step=header.outer_step)
        if not self.rounds.accepts(header.outer_step, now):
            return messages.Gone(
                reason=f"peer {header.peer} brings a delta of outer step {header.outer_step}, the others are at "
                f"{self.rounds.front(now)}"
            )
        # More recent than the last beat.
        peer.note(
            header.rank,
            messages.Position(header.outer_step, header.base_hash, peer.positions[header.rank].training),
            now,
        )
        if (wait := self._make_room(header, now)) is not None:
            return wait
        blob = self.rounds.delta(header)
        if blob.complete:
            self.rounds.note_whole(header.outer_step, now)
        return messages.Received(name=header.name, size=blob.received)

    def _offer_state(self, header: messages.Header, now: float) -> messages.ToPeer:
        wanted = self.transfers.requested_from(header.peer) == header.serial
        if wanted and (wait := self._make_room(header, now)) is not None:
            return wait
        blob = self.transfers.state(header, now)
        if blob is None:
            return messages.Gone(reason="this state is not wanted")
        return messages.Received(name=header.name, size=blob.received)

    def chunk(self, chunk: messages.BodyChunk) -> messages.ToPeer:
        """Keep some bytes of a body that was offered; answer how many are here."""
        blob = self.find(chunk.name)
        peer = self.rounds.peers.get(blob.header.peer) if blob is not None else None
        if blob is None or peer is None or peer.instance != chunk.instance:
            return messages.Gone(reason=f"nothing called {chunk.name} is expected")
        peer.heard[blob.header.rank] = self.clock()
        try:
            blob.add(chunk.offset, chunk.data)
        except ChecksumError as error:
            logger.warning("%s", error)
            return messages.RequestRefused(error=str(error))
        if blob.header.kind == "state" and self.transfers.current:
            self.transfers.current.progress_at = self.clock()
        if blob.complete:
            if blob.header.kind == "delta":
                self.rounds.note_whole(blob.header.outer_step, self.clock())
            self.on_change()
        return messages.Received(name=chunk.name, size=blob.received)

    def get(self, get: messages.Get) -> messages.ToPeer:
        """Answer with some bytes of a body that is whole."""
        blob = self.find(get.name)
        if blob is None or not blob.complete:
            return messages.Gone(reason=f"{get.name} is not kept any more")
        length = max(0, min(get.length, PIECE_BYTES))
        return messages.Piece(name=get.name, offset=get.offset, data=bytes(blob.data[get.offset : get.offset + length]))

    def find(self, name: str) -> Blob | None:
        """Return a body by its `Header.name`; None where it is not kept."""
        kind, _, rest = name.partition("/")
        number, _, owner = rest.partition("/")
        peer, _, rank = owner.rpartition("/")
        if not (number.isdecimal() and rank.isdecimal()):
            return None
        if kind == "state":
            current = self.transfers.current
            matches = current is not None and current.serial == int(number) and current.source == peer
            return current.blobs.get(int(rank)) if current and matches else None
        kept = self.rounds.rounds.get(int(number))
        return kept.blobs.get((peer, int(rank))) if kept else None

    def _make_room(self, header: messages.Header, now: float) -> messages.RoundNotReady | None:
        """Drop the oldest rounds for a body that is to come, and for a delta also the state.

        Return an answer to wait while it does not fit yet. Raises WireError when it would not fit even alone.
        """
        known, limit, short = self.find(header.name), self.max_bytes, self._short_since
        if known is not None and known.header.checksum == header.checksum:
            return None
        if header.size > limit:
            raise WireError(
                f"{header.name} has {header.size / 1e9:.3g} GB, more than the rendezvous' {limit / 1e9:.3g} GB: start "
                "`diloco rendezvous` with a larger --memory-gb"
            )
        short_s = now - short[0] if short else 0.0
        while self.held_bytes + header.size > limit:
            if self.rounds.drop_oldest(now, short_s):
                self.transfers.expire(self.rounds.oldest)
            elif header.kind == "delta" and self.transfers.current is not None:
                logger.warning(
                    "the state of peer %s makes room for deltas: start `diloco rendezvous` with a larger --memory-gb",
                    self.transfers.current.source,
                )
                self.transfers.drop()
            else:
                short[:] = short or [now]
                return messages.RoundNotReady(
                    waiting_for=f"room for the {header.size / 1e9:.3g} GB of {header.name}: what is under way holds "
                    f"{self.held_bytes / 1e9:.3g} of the rendezvous' {limit / 1e9:.3g} GB (--memory-gb)"
                )
        short.clear()
        return None

    def check_room(self, hello: messages.PeerHello, now: float) -> None:
        """Raises WireError when the deltas of the peers that are here and of this one do not fit in memory at once."""
        others = {peer.name: peer.ranks * max(peer.delta_bytes.values()) for peer in self.rounds.alive(now)}
        needed = others | {hello.peer: hello.ranks * hello.delta_bytes}
        if (total := sum(needed.values())) > self.max_bytes:
            raise WireError(
                f"the deltas of the peers {', '.join(sorted(needed))} take up to {total / 1e9:.3g} GB, more than the "
                f"rendezvous' {self.max_bytes / 1e9:.3g} GB: start `diloco rendezvous` with a larger --memory-gb, or "
                "raise diloco.fragments"
            )

    @property
    def held_bytes(self) -> int:
        """Bytes of all deltas and of the state, whole or not."""
        holders = [*self.rounds.rounds.values(), *([self.transfers.current] if self.transfers.current else [])]
        return sum(len(blob.data) for holder in holders for blob in holder.blobs.values())


def _check_header(header: messages.Header, peer: Peer) -> None:
    """Raises WireErrors when the header is neither a delta's nor a state's, or does not fit the peer's layout."""
    if header.kind not in ("delta", "state") or header.outer_step < 0 or header.size < 0:
        raise WireError(
            f"{header.name} of outer step {header.outer_step} with {header.size} bytes is neither a delta nor a state"
        )
    expected = messages.layout_hash(peer.layouts[header.rank])
    if header.layout_hash != expected:
        raise RunMismatchError(
            f"{header.name} is of layout {header.layout_hash}, but the hello of peer {peer.name} was of {expected}"
        )
    limit = messages.largest_body(peer.layouts[header.rank], None if header.kind == "state" else header.fragment)
    if header.size > limit:
        raise WireError(f"{header.name} has {header.size} bytes, a {header.kind} of its layout at most {limit}")
