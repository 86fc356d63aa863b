"""Which peer's state a joining peer gets, as the rendezvous sees it. No I/O here.

A source uploads its state once, whoever asks for it: it stays for later joiners for as long as the rounds since then
are kept. A source that dies or makes no progress is replaced by another, as is one whose state is refused. Where the
rounds since then outgrow the memory before anybody could take them, it is asked again only after as long a pause.

A body on its way into the rendezvous, piece by piece. No I/O here.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.rendezvous.peer import Base, Peer
from diloco.transport.header import Header, RunningChecksum, check_body


@dataclass(slots=True)
class Blob:
    """Complete once all bytes are there and their hash is right.

    The hash is taken as the pieces come, for hashing a large body at once would hold up everybody's beats.
    """

    header: Header
    data: bytearray = field(init=False)
    received: int = 0
    complete: bool = False
    _checksum: RunningChecksum = field(default_factory=RunningChecksum)

    def __post_init__(self) -> None:
        """Raises ChecksumError when the header announces an empty body with another hash than that of nothing."""
        self.data = bytearray(self.header.size)
        self._finish()

    def add(self, offset: int, data: bytes) -> None:
        """Bytes that do not continue what is there are dropped: the sender learns from the answer where to go on.

        Raises ChecksumError when the last byte is there and the hash is wrong; the blob is then empty again.
        """
        if self.complete or offset != self.received or offset + len(data) > self.header.size:
            return
        self.data[offset : offset + len(data)] = data
        self._checksum.update(data)
        self.received += len(data)
        self._finish()

    def _finish(self) -> None:
        if self.received < self.header.size:
            return
        found, self._checksum = self._checksum.hexdigest(), RunningChecksum()
        try:
            check_body(self.header, len(self.data), found)
        except Exception:
            self.received = 0
            raise
        self.complete = True


@dataclass(slots=True)
class Transfer:
    serial: int
    source: str
    ranks: int
    began: float
    progress_at: float
    """When it last made progress."""
    blobs: dict[int, Blob] = field(default_factory=dict)
    """By rank."""

    @property
    def complete(self) -> bool:
        return len(self.blobs) == self.ranks and all(blob.complete for blob in self.blobs.values())

    @property
    def outer_step(self) -> int | None:
        steps = {blob.header.outer_step for blob in self.blobs.values()}
        return steps.pop() if len(steps) == 1 else None

    @property
    def first_step(self) -> int | None:
        """The earliest outer step of a rank's part; None before the first is offered."""
        return min((blob.header.outer_step for blob in self.blobs.values()), default=None)

    def progress(self, newest: int, now: float) -> str:
        """How far it is, how long that took, and how many rounds up to `newest` were closed meanwhile."""
        if (step := self.first_step) is None:
            return f"none of it is here after {now - self.began:.0f} s"
        size = sum(blob.header.size for blob in self.blobs.values())
        received = sum(blob.received for blob in self.blobs.values())
        took_s = (self.progress_at if self.complete else now) - self.began
        part = f"{received / 1e6:.1f} of {size / 1e6:.1f} MB of rank(s) {sorted(self.blobs)}"
        said = f"{part} are here after {took_s:.0f} s"
        if (rounds := newest + 1 - step) > 0:
            said += f", in which {rounds} round(s) were closed, one in {(now - self.began) / rounds:.2g} s"
        return said

    @property
    def base(self) -> Base:
        return tuple(self.blobs[rank].header.base_hash for rank in sorted(self.blobs))


class Transfers:
    def __init__(self, stall_s: float) -> None:
        """`stall_s`: a source without progress for this long is given up."""
        self.current: Transfer | None = None
        self._stall_s = stall_s
        self._serial = secrets.randbits(48)  # ranks that were answered before and after a restart must notice
        self._failures: Counter[str] = Counter()
        self._rests_until: dict[str, float] = {}
        """By source: until then it is not asked."""
        self.outgrown = ""
        """What became of the last state that was given up for want of memory; empty for none."""

    def request(self, sources: Sequence[Peer], oldest_useful: int, now: float) -> Transfer | None:
        """The transfer under way or at hand, or a new one from one of `sources`; None where none may be asked.

        `oldest_useful`: a state of an earlier outer step cannot be caught up from.
        """
        if self.current is not None and self._useful(self.current, sources, oldest_useful, now):
            return self.current
        if self.current is not None and not self.current.complete:
            self._failures[self.current.source] += 1
        self.current = None
        ready = [peer for peer in sources if self._rests_until.get(peer.name, now) <= now]
        if ready:
            source = min(ready, key=lambda peer: (self._failures[peer.name], peer.name))
            self._serial += 1
            self.current = Transfer(self._serial, source.name, source.ranks, now, now)
        return self.current

    def refuse(self, serial: int) -> str | None:
        """Let go of this state, as its source's failure; the source, or None when the state is not at hand any more."""
        current = self.current
        if current is None or current.serial != serial:
            return None
        self._failures[current.source] += 1
        self.drop()
        return current.source

    def drop(self) -> None:
        """Let go of the state at hand or under way, which is of a time that is void."""
        self.current = None

    def expire(self, oldest_useful: int) -> None:
        """Let go of a state, under way or at hand, that nobody can catch up from any more."""
        step = self.current.first_step if self.current is not None else None
        if step is not None and step < oldest_useful:
            self.drop()

    def outgrow(self, oldest_useful: int, newest: int, now: float) -> None:
        """Let go of a state, under way or at hand, when the rounds since, up to `newest`, do not all fit in memory."""
        current = self.current
        if current is None or (step := current.first_step) is None or step >= oldest_useful:
            return
        took_s = (current.progress_at if current.complete else now) - current.began
        self._rests_until[current.source] = current.began + 2 * took_s
        if not current.complete:
            self._failures[current.source] += 1
        self.outgrown = f"that of peer {current.source} was given up: {current.progress(newest, now)}"
        self.drop()

    @property
    def held(self) -> int:
        """Bytes in memory."""
        return sum(len(blob.data) for blob in self.current.blobs.values()) if self.current is not None else 0

    def _useful(self, transfer: Transfer, sources: Sequence[Peer], oldest_useful: int, now: float) -> bool:
        if transfer.complete:
            return transfer.outer_step is not None and transfer.outer_step >= oldest_useful
        alive = any(peer.name == transfer.source for peer in sources)
        return alive and now - transfer.progress_at <= self._stall_s

    def wanted(self, peer: str) -> int:
        """The serial that this peer is asked to serve; 0 for none."""
        current = self.current
        return current.serial if current is not None and current.source == peer and not current.complete else 0

    def state(self, header: Header, now: float) -> Blob | None:
        """The blob of a state that was asked for; None for any other."""
        current = self.current
        if current is None or header.serial != current.serial or header.peer != current.source:
            return None
        if header.rank >= current.ranks:
            return None
        blob = current.blobs.get(header.rank)
        if blob is None or blob.header.checksum != header.checksum:
            blob = current.blobs[header.rank] = Blob(header)
        current.progress_at = now
        return blob
