"""The rendezvous' books: which peers there are, what has arrived, when a round closes and with whom. No I/O here.

A round is one outer step. It opens with the first delta that arrives for it and closes when every peer that is alive
and training has brought its own, or at the deadline, with those that have. What it closed with never changes: every
peer applies exactly these deltas, also one that comes late, whose own is then not among them.

Peers that start a round from different global values cannot average. The larger party stays (of equal ones the one with
the first peer by name); the others join anew with its state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from composer_prime.errors import RunMismatchError
from diloco.layout import TensorLayout, difference
from diloco.wire import Beat, Header, Hello, check_body

Base = tuple[str, ...]
"""Hash of the global values of each rank."""


@dataclass(slots=True)
class Blob:
    """A body on its way in; complete once all bytes are there and their hash is right."""

    header: Header
    data: bytearray
    received: int = 0
    complete: bool = False

    def add(self, offset: int, data: bytes) -> None:
        """Bytes that do not continue what is there are dropped: the sender learns from the answer where to go on.

        Raises ChecksumError when the last byte is there and the hash is wrong; the blob is then empty again.
        """
        if self.complete or offset != self.received or offset + len(data) > self.header.size:
            return
        self.data[offset : offset + len(data)] = data
        self.received += len(data)
        self.finish()

    def finish(self) -> None:
        if self.received == self.header.size:
            try:
                check_body(self.header, self.data)
            except Exception:
                self.received = 0
                raise
            self.complete = True


@dataclass(slots=True)
class Peer:
    name: str
    ranks: int
    settings: dict[str, str]
    deadline_s: float
    instances: dict[int, str] = field(default_factory=dict)
    """Which process is which rank."""
    layouts: dict[int, list[TensorLayout]] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    """When each rank last said something."""
    beats: dict[int, Beat] = field(default_factory=dict)

    def alive(self, now: float, timeout_s: float) -> bool:
        """A peer with a silent rank is no peer."""
        return len(self.heard) == self.ranks and all(now - at <= timeout_s for at in self.heard.values())

    @property
    def training(self) -> bool:
        return len(self.beats) == self.ranks and all(beat.training for beat in self.beats.values())

    @property
    def outer_step(self) -> int:
        return min((beat.outer_step for beat in self.beats.values()), default=-1)

    @property
    def base(self) -> Base:
        return tuple(self.beats[rank].base_hash for rank in sorted(self.beats))


@dataclass(slots=True)
class Round:
    outer_step: int
    opened: float
    blobs: dict[tuple[str, int], Blob] = field(default_factory=dict)
    """By peer and rank."""
    quorum_id: int | None = None
    """None while it is open."""
    members: tuple[str, ...] = ()
    base: Base = ()

    def contributors(self, peers: dict[str, Peer]) -> dict[str, Base]:
        """Peers whose ranks have all delivered, and what they started from."""
        whole: dict[str, Base] = {}
        for name, peer in peers.items():
            parts = [self.blobs.get((name, rank)) for rank in range(peer.ranks)]
            if all(part is not None and part.complete for part in parts):
                whole[name] = tuple(part.header.base_hash for part in parts if part is not None)
        return whole


class Rounds:
    def __init__(self, *, beat_timeout_s: float, keep: int) -> None:
        """`keep`: closed rounds whose deltas stay to be had by those that come late."""
        self.peers: dict[str, Peer] = {}
        self.rounds: dict[int, Round] = {}
        self.newest: int | None = None
        """The last closed round; None before the first."""
        self._beat_timeout_s, self._keep = beat_timeout_s, keep

    def admit(self, hello: Hello, now: float) -> str | None:
        """Enter a rank into the books; what to wait for when it cannot be entered yet.

        Raises RunMismatchError when its layout or settings are not the others'.
        """
        known = self.peers.get(hello.peer)
        restarted = known is not None and known.instances.get(hello.rank, hello.instance) != hello.instance
        if restarted and known.alive(now, self._beat_timeout_s / 2):
            return f"another process that is peer {hello.peer!r} to fall silent; each cluster needs its own peer_id"
        for other in self.peers.values():
            if other.name != hello.peer and other.alive(now, self._beat_timeout_s):
                _compare(hello, other)
        if known is None or restarted or known.ranks != hello.ranks:
            known = self.peers[hello.peer] = Peer(hello.peer, hello.ranks, hello.settings, hello.round_deadline_s)
        known.instances[hello.rank] = hello.instance
        known.layouts[hello.rank] = hello.layout
        known.heard[hello.rank] = now
        return None

    def alive(self, now: float) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.alive(now, self._beat_timeout_s)]

    def awaited(self, now: float) -> list[Peer]:
        """Peers whose deltas the open round waits for."""
        return [peer for peer in self.alive(now) if peer.training]

    def open_round(self) -> Round | None:
        """The round that deltas come in for; after a restart the most advanced one that anybody brought."""
        pending = [each for each in self.rounds.values() if each.quorum_id is None]
        return max(pending, key=lambda each: each.outer_step, default=None)

    def accepts(self, outer_step: int, now: float) -> bool:
        """Whether a delta of this outer step can still enter a round."""
        if self.newest is not None:
            return outer_step == self.newest + 1
        return outer_step >= max((peer.outer_step for peer in self.awaited(now)), default=0)

    def delta(self, header: Header, now: float) -> Blob:
        """The blob of an acceptable delta; a new one replaces the same rank's earlier in an open round."""
        current = self.rounds.setdefault(header.outer_step, Round(header.outer_step, now))
        key = (header.peer, header.rank)
        blob = current.blobs.get(key)
        if blob is None or blob.header.checksum != header.checksum or blob.header.base_hash != header.base_hash:
            blob = current.blobs[key] = Blob(header, bytearray(header.size))
            blob.finish()
        return blob

    def left_s(self, current: Round, now: float) -> float:
        """Until the deadline; the most impatient contributor's counts."""
        brought = {name for name, _ in current.blobs}
        patience = [self.peers[name].deadline_s for name in brought if name in self.peers]
        return current.opened + min(patience, default=0.0) - now

    def closable(self, now: float, min_peers: int) -> dict[str, Base] | None:
        """The open round's contributions when it is time to close it: the largest party with equal global values."""
        current = self.open_round()
        if current is None:
            return None
        whole = current.contributors(self.peers)
        missing = [peer.name for peer in self.awaited(now) if peer.name not in whole]
        if len(whole) < min_peers or (missing and self.left_s(current, now) > 0):
            return None
        parties = Counter(whole.values())
        first = {base: min(name for name in whole if whole[name] == base) for base in parties}
        winner = min(parties, key=lambda base: (-parties[base], first[base]))
        return {name: base for name, base in whole.items() if base == winner}

    def close(self, members: dict[str, Base], quorum_id: int) -> Round:
        current = self.open_round()
        assert current is not None and members
        current.members, current.quorum_id = tuple(sorted(members)), quorum_id
        current.base = next(iter(members.values()))
        current.blobs = {key: blob for key, blob in current.blobs.items() if key[0] in members}
        self.newest = current.outer_step
        for step in [step for step in self.rounds if step <= self.newest - self._keep]:
            del self.rounds[step]
        for step in [step for step, each in self.rounds.items() if each.quorum_id is None and step <= self.newest]:
            del self.rounds[step]
        return current

    def forget(self, now: float) -> bool:
        """Drop all rounds when every peer has gone back behind those that are kept, as after a common resume."""
        alive = self.alive(now)
        oldest = min(self.rounds, default=0)
        if self.newest is None or not alive or any(peer.outer_step >= oldest for peer in alive):
            return False
        self.rounds.clear()
        self.newest = None
        return True

    def closed(self, outer_step: int) -> Round | None:
        found = self.rounds.get(outer_step)
        return found if found is not None and found.quorum_id is not None else None

    def party(self, now: float, but: str) -> list[Peer]:
        """Training peers that hold the most advanced, most widely held global values; `but` is not asked."""
        training = [peer for peer in self.awaited(now) if peer.name != but]
        top = max((peer.outer_step for peer in training), default=-1)
        leaders = [peer for peer in training if peer.outer_step == top]
        counts = Counter(peer.base for peer in leaders)
        if not leaders:
            return []
        base = min(counts, key=lambda base: (-counts[base], min(p.name for p in leaders if p.base == base)))
        return [peer for peer in leaders if peer.base == base]


def _compare(hello: Hello, other: Peer) -> None:
    if hello.ranks != other.ranks:
        raise RunMismatchError(
            f"peer {hello.peer} has {hello.ranks} trainer rank(s), peer {other.name} has {other.ranks}: shards are "
            "exchanged rank by rank, so give both the same trainer.ranks"
        )
    for key in sorted(hello.settings.keys() | other.settings.keys()):
        mine, theirs = hello.settings.get(key), other.settings.get(key)
        if mine != theirs:
            raise RunMismatchError(
                f"peer {hello.peer} has {key} = {mine}, peer {other.name} has {theirs}: all peers of a joint run must "
                "agree on it"
            )
    layout = other.layouts.get(hello.rank)
    if layout is not None and (text := difference(hello.layout, layout)):
        raise RunMismatchError(
            f"the layouts of peer {hello.peer} (here) and peer {other.name} (there) differ on rank {hello.rank}: "
            f"{text}; use the same model, sharding and adapters"
        )
