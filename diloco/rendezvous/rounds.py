"""Rounds and the peers that take part: what has arrived, when a round closes and with whom. No I/O here.

A round is one outer step. It closes when every peer that trains has brought its delta,
or at the deadline, which the first whole delta starts, with those that have.
What a round closed with never changes: late peers apply exactly these deltas too.

Three rounds wait for a stalled peer (its link beats, no inner step ends); later ones do not.

Peers that start a round from different global values cannot average.
The larger party stays (of equals the one with the first name). The others rejoin with its state.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from composer_prime.errors import RunMismatchError
from diloco.transport.messages import DeltaHeader, PeerHello, StateHeader, check_body, difference, running_checksum

HeaderKind = TypeVar("HeaderKind", DeltaHeader, StateHeader)
Base = tuple[str, ...]
"""Hash of the global values of each rank."""
_WAITS = 3
"""Rounds that wait for a peer without progress."""


class RendezvousSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `diloco rendezvous --help` explains, with its defaults."""

    bind: str
    """tcp://ADDRESS:PORT; port 0 takes a free one."""
    run: str
    min_peers: int = 1
    start_peers: int = 1
    gather_s: float = 60.0
    beat_timeout_s: float = 10.0
    keep_rounds: int = 16
    max_bytes: int = 16_000_000_000

    @property
    def beat_s(self) -> float:
        return self.beat_timeout_s / 5

    @property
    def listen_s(self) -> float:
        """After its start: until then every peer that trains is heard."""
        return 0.6 * self.beat_timeout_s


# -- peers -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RankReport:
    hello: PeerHello
    heard: float
    outer_step: int
    base_hash: str
    training: bool
    inner_steps: int = 0

    def note(self, outer_step: int, base_hash: str, now: float, *, training: bool | None = None) -> None:
        """`training` None leaves that as it was."""
        self.outer_step, self.base_hash, self.heard = outer_step, base_hash, now
        self.training = self.training if training is None else training


@dataclass(slots=True)
class Peer:
    name: str
    ranks: int
    instance: int
    deadline_s: float
    reports: dict[int, RankReport] = field(default_factory=dict)
    """By rank, of those that sent a hello."""
    _left_out_at: tuple[int, ...] = ()
    """`_progress` when a round last closed without it."""
    _left_out: int = 0
    """Rounds in a row that closed without it since."""

    @property
    def _progress(self) -> tuple[int, ...]:
        return self.outer_step, *(self.reports[rank].inner_steps for rank in sorted(self.reports))

    def note_left_out(self) -> None:
        self._left_out = self._left_out + 1 if self._left_out_at == self._progress else 1
        self._left_out_at = self._progress

    @property
    def standing(self) -> bool:
        """No progress while `_WAITS` rounds closed: a step may outlast one deadline."""
        return self._left_out >= _WAITS and self._left_out_at == self._progress

    @property
    def heard(self) -> float:
        """When the most silent rank was heard; never before all were."""
        every = len(self.reports) == self.ranks
        return min(each.heard for each in self.reports.values()) if every else float("-inf")

    @property
    def training(self) -> bool:
        return len(self.reports) == self.ranks and all(each.training for each in self.reports.values())

    @property
    def outer_step(self) -> int:
        return min((each.outer_step for each in self.reports.values()), default=0)

    @property
    def base(self) -> Base:
        return tuple(self.reports[rank].base_hash for rank in sorted(self.reports))

    @property
    def delta_bytes(self) -> int:
        return self.ranks * max((each.hello.delta_bytes for each in self.reports.values()), default=0)


def largest_party(bases: Mapping[str, Base]) -> set[str]:
    """Return the largest group with one base; of equals the one with the first name."""
    counts = Counter(bases[name] for name in sorted(bases))  # equal counts stay in the order of the names
    winner = counts.most_common(1)[0][0] if counts else None
    return {name for name, base in bases.items() if base == winner}


def leading(peers: Sequence[Peer]) -> list[Peer]:
    """Return those with the most advanced and most widely held values."""
    top = max((peer.outer_step for peer in peers), default=-1)
    bases = {peer.name: peer.base for peer in peers if peer.outer_step == top}
    winners = largest_party(bases)
    return [peer for peer in peers if peer.name in winners]


def check_same_run(hello: PeerHello, other: Peer) -> None:
    """Raises RunMismatchError when settings or layout differ from those of `other`."""
    report = other.reports.get(hello.rank, other.reports[0])
    settings = report.hello.settings
    # The ranks first: where they differ, so do digests and layouts.
    for key in sorted(hello.settings.keys() | settings.keys(), key=lambda key: (key != "trainer.ranks", key)):
        mine, theirs = hello.settings.get(key), settings.get(key)
        if mine != theirs:
            raise RunMismatchError(
                f"peer {hello.peer} has {key} = {mine}, peer {other.name} has {theirs}: all peers of a joint run must "
                "agree on it"
            )
    if text := difference(hello.layout, report.hello.layout):
        raise RunMismatchError(
            f"the layouts of peer {hello.peer} (here) and peer {other.name} (there) differ on rank {hello.rank}: "
            f"{text}; use the same model, sharding and adapters"
        )


# -- rounds ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Blob(Generic[HeaderKind]):
    """A body on its way in. Hashing all of it at once would hold up all beats."""

    header: HeaderKind
    name: str = field(init=False)
    data: bytearray = field(init=False)
    received: int = 0
    complete: bool = False
    _checksum: hashlib.blake2b = field(default_factory=running_checksum)

    def __post_init__(self) -> None:
        self.name = self.header.name
        self.data = bytearray(self.header.size)
        self._finish()

    def add(self, offset: int, data: bytes) -> None:
        """Append bytes, or drop those that do not continue the body.

        Raises ChecksumError when it is whole and wrong; the blob is then empty again.
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
        checksum, self._checksum = self._checksum.hexdigest(), running_checksum()
        self.received = 0
        check_body(self.header, len(self.data), checksum)
        self.received, self.complete = len(self.data), True


@dataclass(slots=True)
class Round:
    outer_step: int
    whole_since: float | None = None
    """When the first peer had brought a whole delta."""
    blobs: dict[tuple[str, int], Blob[DeltaHeader]] = field(default_factory=dict)
    is_closed: bool = False
    members: tuple[str, ...] = ()
    base: Base = ()
    digest: str = ""

    def contributors(self, peers: dict[str, Peer]) -> dict[str, Base]:
        """Return the peers whose delta is whole, and what they started from."""
        whole: dict[str, Base] = {}
        for name, peer in peers.items():
            parts = [self.blobs.get((name, rank)) for rank in range(peer.ranks)]
            headers = [part.header for part in parts if part is not None and part.complete]
            common = {(header.fragment, header.codec, header.weight, header.inner_steps) for header in headers}
            if len(headers) == peer.ranks and len(common) == 1:
                whole[name] = tuple(header.base_hash for header in headers)
        return whole

    @property
    def split(self) -> bool:
        """Its deltas start from different global values."""
        bases = {(rank, blob.header.base_hash) for (_, rank), blob in self.blobs.items()}
        return len(bases) > len({rank for rank, _ in bases})


class Rounds:
    """The rounds that are kept, and the peers that take part in them."""

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self.peers: dict[str, Peer] = {}
        self.rounds: dict[int, Round] = {}
        self.newest = -1
        """The last closed round; -1 before the first."""
        self.settled = False
        """A round was closed since the start or `go_to`."""
        self._replaced: set[tuple[str, int]] = set()
        """Peers and instances of them that another instance has replaced."""

    # -- peers -----------------------------------------------------------------------------------------------------

    def admit(self, hello: PeerHello, now: float) -> str | None:
        """Enter a rank; return what to wait for when it cannot be entered yet. Raises RunMismatchError."""
        peer = self.peers.get(hello.peer)
        if peer is not None and peer.instance != hello.instance:
            if now - peer.heard < self._settings.beat_timeout_s:
                return f"another process that is peer {hello.peer!r} to fall silent; each cluster needs its own peer_id"
            self._drop_open_deltas(hello.peer)
            self._replaced.add((peer.name, peer.instance))
            peer = None
        for other in self.alive(now):
            if other.name != hello.peer:
                check_same_run(hello, other)
        if peer is None or peer.ranks != hello.ranks:
            peer = Peer(hello.peer, hello.ranks, hello.instance, hello.round_deadline_s)
            self.peers[hello.peer] = peer
        report = RankReport(hello, now, hello.outer_step, hello.base_hash, hello.training)
        peer.reports[hello.rank] = report
        return None

    def report(self, peer: str, rank: int, instance: int, now: float) -> RankReport | None:
        """Return the report of a rank that was heard now, if this start of it said hello. Raises RunMismatchError."""
        self.check_not_replaced(peer, instance)
        known = self.peers.get(peer)
        report = known.reports.get(rank) if known is not None and known.instance == instance else None
        if report is not None:
            report.heard = now
        return report

    def check_not_replaced(self, peer: str, instance: int) -> None:
        if (peer, instance) in self._replaced:
            raise RunMismatchError(
                f"peer {peer} was silent, and another process has taken its place in the run: this one must end, for "
                "only one may speak for a peer. Start each cluster once, with a diloco.peer_id of its own"
            )

    def _drop_open_deltas(self, peer: str) -> None:
        for each in self.rounds.values():
            if not each.is_closed:
                each.blobs = {key: blob for key, blob in each.blobs.items() if key[0] != peer}
                self._stop_deadline(each)

    def alive(self, now: float) -> list[Peer]:
        return [peer for peer in self.peers.values() if now - peer.heard <= self._settings.beat_timeout_s]

    def training(self, now: float) -> list[Peer]:
        return [peer for peer in self.alive(now) if peer.training]

    # -- the open round --------------------------------------------------------------------------------------------

    def open_round(self) -> Round | None:
        pending = [each for each in self.rounds.values() if not each.is_closed]
        return max(pending, key=lambda each: each.outer_step, default=None)

    def accepts(self, outer_step: int, now: float) -> bool:
        front = self.front(now)
        return outer_step == front if self.newest >= 0 else outer_step >= front

    def front(self, now: float) -> int:
        """Return the next outer step, after a restart that of the first peer."""
        if self.newest >= 0:
            return self.newest + 1
        return max((peer.outer_step for peer in self.training(now)), default=0)

    def delta(self, header: DeltaHeader) -> Blob[DeltaHeader]:
        current = self.rounds.setdefault(header.outer_step, Round(header.outer_step))
        key = (header.peer, header.rank)
        blob = current.blobs.get(key)
        if blob is None or blob.header.checksum != header.checksum or blob.header.base_hash != header.base_hash:
            blob = current.blobs[key] = Blob(header)
            self._stop_deadline(current)
        return blob

    def note_whole(self, outer_step: int, now: float) -> None:
        """Start the deadline, once, when the first delta is whole."""
        current = self.rounds.get(outer_step)
        if current is not None and current.whole_since is None and current.contributors(self.peers):
            current.whole_since = now

    def _stop_deadline(self, current: Round) -> None:
        if not current.contributors(self.peers):
            current.whole_since = None

    def left_s(self, current: Round, now: float) -> float | None:
        """Return the seconds to the shortest deadline, if it runs."""
        deadlines_s = [self.peers[name].deadline_s for name in current.contributors(self.peers)]
        if current.whole_since is None or not deadlines_s:
            return None
        return current.whole_since + min(deadlines_s) - now

    def closable(self, now: float, min_peers: int) -> dict[str, Base] | None:
        """Return the largest party, once it is time to close the round."""
        winners, _ = self.parties(now)
        return winners if len(winners) >= max(1, min_peers) else None

    def parties(self, now: float) -> tuple[dict[str, Base], dict[str, Base]]:
        """Return the largest party and the others; both empty before the round's end."""
        current = self.open_round()
        whole = current.contributors(self.peers) if current is not None else {}
        missing = [peer.name for peer in self.training(now) if peer.name not in whole and not peer.standing]
        left_s = self.left_s(current, now) if current is not None else None
        if missing and (left_s is None or left_s > 0):
            return {}, {}
        winners = largest_party(whole)
        return (
            {name: base for name, base in whole.items() if name in winners},
            {name: base for name, base in whole.items() if name not in winners},
        )

    # -- closed rounds ---------------------------------------------------------------------------------------------

    def close(self, members: dict[str, Base], now: float) -> Round:
        """Close the open round. While a peer joins, which may replay it, none is dropped."""
        current = self.open_round()
        assert current is not None and members
        current.members = tuple(sorted(members))
        for peer in self.peers.values():
            if peer.training and peer.name not in members:
                peer.note_left_out()
        current.is_closed = True
        current.base = next(iter(members.values()))
        current.blobs = {key: blob for key, blob in current.blobs.items() if key[0] in members}
        macs = [blob.header.mac for _, blob in sorted(current.blobs.items())]
        current.digest = hashlib.blake2b("".join(macs).encode(), digest_size=16).hexdigest()
        self.newest, self.settled = current.outer_step, True
        all_train = all(peer.training for peer in self.alive(now))
        kept_from = self.newest - self._settings.keep_rounds + 1 if all_train else 0
        self.rounds = {
            step: each
            for step, each in self.rounds.items()
            if step >= kept_from and (each.is_closed or step > self.newest)
        }
        return current

    def closed(self, outer_step: int) -> Round | None:
        kept = self.rounds.get(outer_step)
        return kept if kept is not None and kept.is_closed else None

    def go_to(self, lead: int) -> None:
        """Continue from outer step `lead`; keep the rounds that lead up to it."""
        contiguous = self.newest >= 0 and lead <= self.newest + 1
        closed = [each for each in self.rounds.values() if contiguous and each.is_closed]
        self.rounds = {each.outer_step: each for each in closed if each.outer_step < lead}
        self.newest, self.settled = lead - 1, False

    @property
    def oldest(self) -> int:
        """The first outer step whose round is kept, else that of the next."""
        kept = [step for step, each in self.rounds.items() if each.is_closed]
        return min(kept, default=self.newest + 1)

    def drop_oldest(self, now: float, short_s: float) -> bool:
        """Drop the oldest closed round; the newest only when all that train have it or room was short for long."""
        moving = [peer for peer in self.training(now) if not peer.standing]
        behind = [peer.deadline_s for peer in moving if peer.outer_step <= self.newest]
        if self.oldest > self.newest:
            return False
        if self.oldest == self.newest and short_s <= max(behind, default=-1.0):
            return False
        del self.rounds[self.oldest]
        return True
