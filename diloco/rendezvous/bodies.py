"""The bodies of deltas and states on their way through the rendezvous: what may come in, and what is handed out.

No I/O here. What is sent is checked before a byte of it is kept: its header, whether a round or a joiner wants it, its
size, and whether there is room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from composer_prime.errors import ChecksumError, RunMismatchError, WireError
from diloco.rendezvous.peer import Peer, Position
from diloco.rendezvous.rounds import RendezvousSettings, Rounds
from diloco.rendezvous.transfer import Blob, Transfers
from diloco.transport.header import Header, authenticate
from diloco.transport.messages import (
    BodyChunk,
    Get,
    Gone,
    Piece,
    Received,
    RequestRefused,
    RoundClosed,
    ToPeer,
    largest_body,
    layout_hash,
)

logger = logging.getLogger(__name__)
_MAX_PIECE_BYTES = 1 << 22


class Bodies:
    def __init__(
        self,
        settings: RendezvousSettings,
        header_key: bytes,
        rounds: Rounds,
        transfers: Transfers,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when one is whole."""
        self._settings, self._header_key, self._rounds, self._transfers = settings, header_key, rounds, transfers
        self._clock, self._changed = clock, changed

    def offer(self, header: Header, instance: int) -> ToPeer:
        """From which byte on a body may come. Raises WireErrors for one that does not belong here."""
        authenticate(header, self._header_key, run=self._settings.run)
        now = self._clock()
        peer = self._rounds.peers.get(header.peer)
        if peer is None or peer.instance != instance or header.rank not in peer.layouts:
            return Gone(reason="say hello first")
        self._check(header, peer)
        peer.heard[header.rank] = now
        if header.kind == "state":
            return self._offered_state(header, now)
        if self._rounds.closed(header.outer_step):
            return RoundClosed(outer_step=header.outer_step)
        if not self._rounds.accepts(header.outer_step, now):
            return Gone(
                reason=f"peer {header.peer} brings a delta of outer step {header.outer_step}, the others are at "
                f"{self._rounds.front(now)}"
            )
        # Fresher than the last beat.
        peer.note(header.rank, Position(header.outer_step, header.base_hash, peer.positions[header.rank].training), now)
        self._make_room(header)
        blob = self._rounds.delta(header)
        if blob.complete:
            self._rounds.note_whole(header.outer_step, now)
        return Received(name=header.name, size=blob.received)

    def chunk(self, chunk: BodyChunk) -> ToPeer:
        """Keep some bytes of a body that was offered; how many are there."""
        blob = self.find(chunk.name)
        peer = self._rounds.peers.get(blob.header.peer) if blob is not None else None
        if blob is None or peer is None or peer.instance != chunk.instance:
            return Gone(reason=f"nothing called {chunk.name} is expected")
        peer.heard[blob.header.rank] = self._clock()
        try:
            blob.add(chunk.offset, chunk.data)
        except ChecksumError as error:
            logger.warning("%s", error)
            return RequestRefused(error=str(error))
        if blob.header.kind == "state" and self._transfers.current:
            self._transfers.current.progress_at = self._clock()
        if blob.complete:
            if blob.header.kind == "delta":
                self._rounds.note_whole(blob.header.outer_step, self._clock())
            self._changed()
        return Received(name=chunk.name, size=blob.received)

    def find(self, name: str) -> Blob | None:
        """By `Header.name`; None where it is not kept."""
        kind, _, rest = name.partition("/")
        number, _, owner = rest.partition("/")
        peer, _, rank = owner.rpartition("/")
        if not (number.isdecimal() and rank.isdecimal()):
            return None
        if kind == "state":
            current = self._transfers.current
            wanted = current is not None and current.serial == int(number) and current.source == peer
            return current.blobs.get(int(rank)) if current and wanted else None
        found = self._rounds.rounds.get(int(number))
        return found.blobs.get((peer, int(rank))) if found else None

    def get(self, get: Get) -> ToPeer:
        """Some bytes of a body that is whole."""
        blob = self.find(get.name)
        if blob is None or not blob.complete:
            return Gone(reason=f"{get.name} is not kept any more")
        length = max(0, min(get.length, _MAX_PIECE_BYTES))
        return Piece(name=get.name, offset=get.offset, data=bytes(blob.data[get.offset : get.offset + length]))

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
        if self._transfers.wanted(header.peer) == header.serial:
            self._make_room(header)
        blob = self._transfers.state(header, now)
        return Received(name=header.name, size=blob.received) if blob else Gone(reason="this state is not wanted")

    def _make_room(self, header: Header) -> None:
        """Drop the oldest rounds for a body that is to come. Raises WireError when it does not fit all the same."""
        known = self.find(header.name)
        if known is not None and known.header.checksum == header.checksum:
            return
        limit = self._settings.max_bytes
        while self._rounds.held + self._transfers.held + header.size > limit and self._rounds.drop_oldest():
            newest = self._rounds.newest
            self._transfers.outgrow(self._rounds.oldest, -1 if newest is None else newest, self._clock())
        held = self._rounds.held + self._transfers.held
        if held + header.size > limit:
            raise WireError(
                f"{header.name} has {header.size / 1e9:.3g} GB, and what is under way holds {held / 1e9:.3g} of the "
                f"rendezvous' {limit / 1e9:.3g} GB: start `diloco lighthouse` with a larger --memory-gb"
            )
