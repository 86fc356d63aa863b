"""A peer in the rendezvous' books: its ranks, where each stands, and when each was last heard. No I/O here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco.transport.messages import TensorLayout

Base = tuple[str, ...]
"""Hash of the global values of each rank."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands."""

    outer_step: int
    base_hash: str
    training: bool
    """False while it joins: rounds do not wait for it."""


@dataclass(slots=True)
class Peer:
    name: str
    ranks: int
    instance: int
    """Which start of it, alike on all ranks."""
    settings: dict[str, str]
    deadline_s: float
    layouts: dict[int, list[TensorLayout]] = field(default_factory=dict)
    """By rank, for those that said hello."""
    frozen: dict[int, str] = field(default_factory=dict)
    """Digests of the parameters that are not trained, by rank."""
    heard: dict[int, float] = field(default_factory=dict)
    """When each rank last said something."""
    positions: dict[int, Position] = field(default_factory=dict)

    def note(self, rank: int, position: Position, now: float) -> None:
        self.positions[rank], self.heard[rank] = position, now

    def alive(self, now: float, timeout_s: float) -> bool:
        """A peer with a silent rank is no peer."""
        return len(self.heard) == self.ranks and all(now - at <= timeout_s for at in self.heard.values())

    def heard_since(self, moment: float) -> bool:
        """Whether every rank has said something since `moment`."""
        return len(self.heard) == self.ranks and min(self.heard.values()) >= moment

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
    """The names that most share a base with; of equal parties the one with the first name."""
    counts = Counter(bases.values())
    if not counts:
        return set()
    first = {base: min(name for name in bases if bases[name] == base) for base in counts}
    winner = min(counts, key=lambda base: (-counts[base], first[base]))
    return {name for name, base in bases.items() if base == winner}
