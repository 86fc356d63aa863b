"""Account for every record and every turn of an ingestion, in bounded memory.

Records (a line, an event, a message of a document): seen = taken + skipped, by reason.
Turns (of the assistant): turns = states + passed over, by reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_REASONS = 200
"""Distinct reasons that are counted. A hostile file must not fill the memory with reasons."""
GENERATION = 250_000


@dataclass(slots=True)
class Tally:
    """Counts of one file, or the sum over several files."""

    taken: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    states: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    """Secrets by kind. Each occurrence in a distinct message counts once."""
    seen: int = 0
    turns: int = 0
    format: str | None = None
    """The reader that read the file; None when no reader matched."""

    def take(self) -> None:
        """Count a record that a reader used."""
        self.seen += 1
        self.taken += 1

    def skip(self, reason: str) -> None:
        """Count a record that no state is made of."""
        self.seen += 1
        self.skipped[_bounded(self.skipped, reason)] += 1

    def state(self) -> None:
        """Count a turn that became a state."""
        self.turns += 1
        self.states += 1

    def pass_over(self, reason: str) -> None:
        """Count a turn that became no state."""
        self.turns += 1
        self.passed_over[_bounded(self.passed_over, reason)] += 1

    def add(self, other: Tally) -> None:
        """Add the counts of another file."""
        for name in ("taken", "states", "seen", "turns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("skipped", "passed_over", "masked"):
            getattr(self, name).update(getattr(other, name))

    @property
    def balanced(self) -> bool:
        """Check that every record and every turn is accounted for."""
        return self.seen == self.taken + self.skipped.total() and self.turns == self.states + self.passed_over.total()


def _bounded(counter: Counter[str], reason: str) -> str:
    return reason if reason in counter or len(counter) < MAX_REASONS else "other reasons"


class Recent:
    """A set that forgets its older half once it holds twice `generation` keys. A file of any size fits."""

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        self._new: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._new or key in self._old

    def add(self, key: bytes) -> bool:
        """Add `key`. Return whether it is new."""
        if key in self:
            return False
        if len(self._new) >= self._generation:
            self._old, self._new = self._new, set()
        self._new.add(key)
        return True
