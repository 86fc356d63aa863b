"""The rendezvous' books: which peers there are, what has arrived, when a round closes and with whom. No I/O here.

A round is one outer step. It opens with the first header that arrives for it and closes when every peer that is alive
and training has brought its own delta, or with those that have, at the deadline, which the first whole delta starts: on
a slow link the first of equal peers needs as long to bring one as the others. What it closed with never changes: every
peer applies exactly these deltas, also one that comes late, whose own is then not among them.

Peers that start a round from different global values cannot average. The larger party stays (of equal ones the one with
the first peer by name); the others join anew with its state, also where it is too small to close the round alone.

Whether peers that stand at one outer step hold one global model, as they say in beats and hellos. No I/O here.

A round compares what its deltas start from. What comes out of the last round nothing starts from: this compares it too,
also where a rendezvous that was restarted in between has closed a round a second time.

What a rendezvous is started with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from composer_prime.errors import RunMismatchError
from diloco.rendezvous.peer import Base, Peer, Position, largest_party
from diloco.rendezvous.transfer import Blob
from diloco.transport.header import Header
from diloco.transport.messages import PeerHello, difference

_KEPT = 64
"""Outer steps behind the most advanced that are remembered."""


class Agreement:
    def __init__(self) -> None:
        self._models: dict[tuple[int, int], tuple[str, str]] = {}
        """By outer step and rank: who came first, and the hash of its model."""
        self._told: set[int] = set()
        self._front = -1
        """The most advanced outer step."""

    def difference(self, peer: str, rank: int, position: Position) -> str:
        """What differs from the first that was at this outer step, in words that name both; empty when nothing does.

        Of each outer step it is said once.
        """
        step = position.outer_step
        first, model = self._models.get((step, rank), (peer, ""))
        if first == peer:  # it may have joined anew since
            self._models[step, rank] = peer, position.base_hash
            if step > self._front:
                self._front = step
                self._forget_before(step - _KEPT)
            return ""
        if model == position.base_hash or step in self._told:
            return ""
        self._told.add(step)
        return (
            f"peers {first} and {peer} hold different global models of outer step {step} (hashes {model} and "
            f"{position.base_hash} of rank {rank}): unless one of them joins anew with the other's state, their final "
            "models differ"
        )

    def go_to(self, outer_step: int) -> None:
        """The run goes on from this outer step: what was said of it and of later ones is void."""
        self._models = {key: found for key, found in self._models.items() if key[0] < outer_step}
        self._told = {step for step in self._told if step < outer_step}
        self._front = min(self._front, outer_step - 1)

    def _forget_before(self, outer_step: int) -> None:
        for key in [key for key in self._models if key[0] < outer_step]:
            del self._models[key]
        self._told = {step for step in self._told if step >= outer_step}


@dataclass(slots=True)
class Round:
    outer_step: int
    whole_since: float | None = None
    """When the first peer had brought a whole delta; None while nobody has."""
    blobs: dict[tuple[str, int], Blob] = field(default_factory=dict)
    """By peer and rank."""
    quorum_id: int | None = None
    """None while it is open."""
    members: tuple[str, ...] = ()
    base: Base = ()
    digest: str = ""
    """Of what it closed with, on all ranks."""

    def contributors(self, peers: dict[str, Peer]) -> dict[str, Base]:
        """Peers whose ranks have all delivered parts of one delta, and what they started from."""
        whole: dict[str, Base] = {}
        for name, peer in peers.items():
            parts = [self.blobs.get((name, rank)) for rank in range(peer.ranks)]
            headers = [part.header for part in parts if part is not None and part.complete]
            if len(headers) == peer.ranks and len({_delta_of(header) for header in headers}) == 1:
                whole[name] = tuple(header.base_hash for header in headers)
        return whole

    @property
    def split(self) -> bool:
        """Whether deltas in it, whole or not, start from different global values."""
        bases = {(rank, blob.header.base_hash) for (_, rank), blob in self.blobs.items()}
        return len(bases) > len({rank for rank, _ in bases})

    @property
    def held(self) -> int:
        """Bytes in memory."""
        return sum(len(blob.data) for blob in self.blobs.values())


class Rounds:
    def __init__(self, *, beat_timeout_s: float, keep: int) -> None:
        """`keep`: closed rounds whose deltas stay to be had by those that come late."""
        self.peers: dict[str, Peer] = {}
        self.rounds: dict[int, Round] = {}
        self.newest: int | None = None
        """The last closed round; None before the first."""
        self.settled = False
        """A round was closed since the start, or since `go_to`: until then the highest outer step wins."""
        self._beat_timeout_s, self._keep = beat_timeout_s, keep
        self.agreement = Agreement()
        self._succeeded: set[tuple[str, int]] = set()
        """Peers and starts of them whose place another start has taken."""

    def admit(self, hello: PeerHello, now: float) -> str | None:
        """Enter a rank into the books; what to wait for when it cannot be entered yet.

        Raises RunMismatchError when its layout or settings are not the others'.
        """
        known = self.peers.get(hello.peer)
        if known is not None and known.instance != hello.instance:
            if known.alive(now, self._beat_timeout_s / 2):
                return f"another process that is peer {hello.peer!r} to fall silent; each cluster needs its own peer_id"
            self._drop_open_deltas(hello.peer)
            self._succeeded.add((known.name, known.instance))
            known = None
        for other in self.peers.values():
            if other.name != hello.peer and other.alive(now, self._beat_timeout_s):
                _compare(hello, other)
        if known is None or known.ranks != hello.ranks:
            known = Peer(hello.peer, hello.ranks, hello.instance, hello.settings, hello.round_deadline_s)
            self.peers[hello.peer] = known
        known.layouts[hello.rank], known.frozen[hello.rank] = hello.layout, hello.frozen
        known.note(hello.rank, Position(hello.outer_step, hello.base_hash, hello.training), now)
        return None

    def check_not_succeeded(self, peer: str, instance: int) -> None:
        """Raises RunMismatchError when this start of the peer was silent and another has taken its place."""
        if (peer, instance) in self._succeeded:
            raise RunMismatchError(
                f"peer {peer} was silent, and another process has taken its place in the run: this one must end, for "
                "only one may speak for a peer. Start each cluster once, with a diloco.peer_id of its own"
            )

    def _drop_open_deltas(self, peer: str) -> None:
        """What a process brought that is gone: its successor's ranks bring their own."""
        for each in self.rounds.values():
            if each.quorum_id is None:
                each.blobs = {key: blob for key, blob in each.blobs.items() if key[0] != peer}
                self._stop_deadline(each)

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
        front = self.front(now)
        return outer_step == front if self.newest is not None else outer_step >= front

    def front(self, now: float) -> int:
        """The outer step that the next round is for; after a restart that of the most advanced peer."""
        if self.newest is not None:
            return self.newest + 1
        return max((peer.outer_step for peer in self.awaited(now)), default=0)

    def delta(self, header: Header) -> Blob:
        """The blob of an acceptable delta; a new one replaces the same rank's earlier in an open round."""
        current = self.rounds.setdefault(header.outer_step, Round(header.outer_step))
        key = (header.peer, header.rank)
        blob = current.blobs.get(key)
        if blob is None or blob.header.checksum != header.checksum or blob.header.base_hash != header.base_hash:
            blob = current.blobs[key] = Blob(header)
            self._stop_deadline(current)
        return blob

    def note_whole(self, outer_step: int, now: float) -> None:
        """A rank's part of a delta is there: the first delta that is whole starts the deadline, once."""
        current = self.rounds.get(outer_step)
        if current is not None and current.whole_since is None and current.contributors(self.peers):
            current.whole_since = now

    def _stop_deadline(self, current: Round) -> None:
        """Where no whole delta is left, the next one starts it anew."""
        if not current.contributors(self.peers):
            current.whole_since = None

    def left_s(self, current: Round, now: float) -> float | None:
        """Until the deadline, None before it runs; the most impatient contributor's counts."""
        patience = [self.peers[name].deadline_s for name in current.contributors(self.peers)]
        if current.whole_since is None or not patience:
            return None
        return current.whole_since + min(patience) - now

    def closable(self, now: float, min_peers: int) -> dict[str, Base] | None:
        """The open round's contributions when it is time to close it: the largest party with equal global values."""
        winners, _ = self.parties(now)
        return winners if len(winners) >= max(1, min_peers) else None

    def parties(self, now: float) -> tuple[dict[str, Base], dict[str, Base]]:
        """Of the open round's contributors the largest party, and those that differ from it; both empty before its end.

        It ends when every peer that trains has contributed, or at the deadline.
        """
        current = self.open_round()
        whole = current.contributors(self.peers) if current is not None else {}
        missing = [peer.name for peer in self.awaited(now) if peer.name not in whole]
        left_s = self.left_s(current, now) if current is not None else None
        if missing and (left_s is None or left_s > 0):
            return {}, {}
        winners = largest_party(whole)
        return (
            {name: base for name, base in whole.items() if name in winners},
            {name: base for name, base in whole.items() if name not in winners},
        )

    def close(self, members: dict[str, Base], quorum_id: int, needed_from: int | None = None) -> Round:
        """Close the open round with `members`; rounds from `needed_from` on stay, however many."""
        current = self.open_round()
        assert current is not None and members
        current.members, current.quorum_id = tuple(sorted(members)), quorum_id
        current.base = next(iter(members.values()))
        current.blobs = {key: blob for key, blob in current.blobs.items() if key[0] in members}
        macs = [blob.header.mac for _, blob in sorted(current.blobs.items())]
        current.digest = hashlib.blake2b("".join(macs).encode(), digest_size=16).hexdigest()
        self.newest, self.settled = current.outer_step, True
        kept_from = self.newest - self._keep + 1
        kept_from = kept_from if needed_from is None else min(kept_from, needed_from)
        for step in [step for step in self.rounds if step < kept_from]:
            del self.rounds[step]
        for step in [step for step, each in self.rounds.items() if each.quorum_id is None and step <= self.newest]:
            del self.rounds[step]
        return current

    def go_to(self, lead: int) -> None:
        """The run goes on from outer step `lead`: later rounds are void, those that lead up to it stay if kept."""
        joined = self.newest is not None and lead <= self.newest + 1
        closed = [each for each in self.rounds.values() if joined and each.quorum_id is not None]
        self.rounds = {each.outer_step: each for each in closed if each.outer_step < lead}
        self.newest, self.settled = (lead - 1 if lead else None), False
        self.agreement.go_to(lead)

    @property
    def oldest(self) -> int:
        """From this outer step on, rounds are to be had; that of the next round when none is kept."""
        kept = [step for step, each in self.rounds.items() if each.quorum_id is not None]
        return min(kept, default=0 if self.newest is None else self.newest + 1)

    @property
    def held(self) -> int:
        """Bytes in memory."""
        return sum(each.held for each in self.rounds.values())

    def drop_oldest(self) -> bool:
        """Let go of the oldest closed round but the newest; whether there was one."""
        if self.newest is None or self.oldest >= self.newest:
            return False
        del self.rounds[self.oldest]
        return True

    def closed(self, outer_step: int) -> Round | None:
        found = self.rounds.get(outer_step)
        return found if found is not None and found.quorum_id is not None else None


def leading(peers: Sequence[Peer]) -> list[Peer]:
    """Those of `peers` that hold the most advanced, and of these the most widely held, global values."""
    top = max((peer.outer_step for peer in peers), default=-1)
    bases = {peer.name: peer.base for peer in peers if peer.outer_step == top}
    winners = largest_party(bases)
    return [peer for peer in peers if peer.name in winners]


def _delta_of(header: Header) -> tuple[int, str, float, int]:
    """What the parts of one peer's delta have in common."""
    return header.fragment, header.codec, header.weight, header.inner_steps


def _compare(hello: PeerHello, other: Peer) -> None:
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
    frozen = other.frozen.get(hello.rank, hello.frozen)
    if hello.frozen != frozen:
        raise RunMismatchError(
            f"the parameters that are not trained differ on rank {hello.rank}: their digest is {hello.frozen} for peer "
            f"{hello.peer}, {frozen} for peer {other.name}. Adapters fit the model that they were trained on: give "
            "both the same files as model.path (compare their sha256sum)"
        )


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
