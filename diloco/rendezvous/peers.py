"""The peers as the rendezvous sees them: their ranks, where each stands, when each was last heard. No I/O here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from composer_prime.errors import RunMismatchError
from diloco.transport.messages import PeerHello, Position, TensorLayout, difference

Base = tuple[str, ...]
"""Hash of the global values of each rank."""


_WAITS = 3
"""Rounds that wait for a peer that makes no progress, before it counts as standing still."""


@dataclass(slots=True)
class Peer:
    name: str
    ranks: int
    instance: int
    """Which start of it, alike on all ranks."""
    settings: dict[str, str]
    deadline_s: float
    layouts: dict[int, list[TensorLayout]] = field(default_factory=dict)
    """By rank, for those that sent a hello."""
    frozen: dict[int, str] = field(default_factory=dict)
    """Digests of the parameters that are not trained, by rank."""
    delta_bytes: dict[int, int] = field(default_factory=dict)
    """The most that a delta of each rank has."""
    heard: dict[int, float] = field(default_factory=dict)
    """When each rank last sent anything."""
    positions: dict[int, Position] = field(default_factory=dict)
    inner_steps: dict[int, int] = field(default_factory=dict)
    """Taken since its start, by rank."""
    _left_out_at: tuple[int, ...] = ()
    """`_progress` when a round last closed without it."""
    _left_out: int = 0
    """Rounds in a row that closed without it while `_progress` stayed the same."""

    def note(self, rank: int, position: Position, now: float) -> None:
        self.positions[rank] = position
        self.heard[rank] = now

    @property
    def _progress(self) -> tuple[int, ...]:
        return self.outer_step, *(self.inner_steps.get(rank, 0) for rank in range(self.ranks))

    def note_left_out(self) -> None:
        """Note that a round closed without it."""
        self._left_out = self._left_out + 1 if self._left_out_at == self._progress else 1
        self._left_out_at = self._progress

    @property
    def standing(self) -> bool:
        """Tell whether it beats, and made no progress while `_WAITS` rounds closed without it.

        One would not do: a step may take longer than the deadline of a round, and beats tell of it a little later.
        """
        return self._left_out >= _WAITS and self._left_out_at == self._progress

    def alive(self, now: float, timeout_s: float) -> bool:
        """Return whether every rank was heard within `timeout_s`."""
        return len(self.heard) == self.ranks and all(now - at <= timeout_s for at in self.heard.values())

    @property
    def training(self) -> bool:
        return len(self.positions) == self.ranks and all(each.training for each in self.positions.values())

    @property
    def outer_step(self) -> int:
        return min((each.outer_step for each in self.positions.values()), default=0)

    @property
    def base(self) -> Base:
        return tuple(self.positions[rank].base_hash for rank in sorted(self.positions))


def largest_party(bases: Mapping[str, Base]) -> set[str]:
    """Return the names of the largest group with one base; of equal groups the one with the first name."""
    counts = Counter(bases.values())
    if not counts:
        return set()
    first = {base: min(name for name in bases if bases[name] == base) for base in counts}
    winner = min(counts, key=lambda base: (-counts[base], first[base]))
    return {name for name, base in bases.items() if base == winner}


def leading(peers: Sequence[Peer]) -> list[Peer]:
    """Return those of `peers` that hold the most advanced, and of these the most widely held, global values."""
    top = max((peer.outer_step for peer in peers), default=-1)
    bases = {peer.name: peer.base for peer in peers if peer.outer_step == top}
    winners = largest_party(bases)
    return [peer for peer in peers if peer.name in winners]


def check_same_run(hello: PeerHello, other: Peer) -> None:
    """Raises RunMismatchError when the ranks, settings, layout or frozen parameters differ from the other peer's."""
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
