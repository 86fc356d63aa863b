"""Which pair comes next: each pass over the file in its own order, from a cursor that a checkpoint can hold."""

from __future__ import annotations

import random

import msgspec

from composer_prime.errors import CheckpointError
from orchestrator.rollouts.groups import derive_seed


class PairCursor(msgspec.Struct, frozen=True, kw_only=True):
    """A position in a pass. Pairs that the file gained since the pass began wait for the next one."""

    number: int = 0
    """Pass, from 0."""
    position: int = 0
    """Pairs of the pass that were drawn."""
    known: int = 0
    """Pairs that the file held when the pass began."""
    digest: str = ""
    """Digest of those pairs' lines; a resumed run's file must begin with the same lines."""


class PairOrder:
    def __init__(self, seed: int) -> None:
        self.cursor = PairCursor()
        self._seed = seed
        self._pass: list[int] = []

    def seek(self, cursor: PairCursor, available: int) -> None:
        """Continue from `cursor`. Raises CheckpointError when the file lost pairs since."""
        if cursor.known > available:
            raise CheckpointError(
                f"the checkpoint's pass over the pairs file had {cursor.known} pairs, the file has {available}: give "
                "the run the file it was started with (it may have grown since)"
            )
        self.cursor = cursor
        self._shuffle()

    def next(self, available: int) -> int | None:
        """Return the next pair's number; None while the file holds none. `available`: pairs in the file now."""
        if self.cursor.position == self.cursor.known:
            if not available:
                return None
            number = self.cursor.number + (self.cursor.known > 0)
            self.cursor = PairCursor(number=number, known=available)
            self._shuffle()
        index = self._pass[self.cursor.position]
        self.cursor = msgspec.structs.replace(self.cursor, position=self.cursor.position + 1)
        return index

    def _shuffle(self) -> None:
        self._pass = list(range(self.cursor.known))
        random.Random(derive_seed(self._seed, "pairs", self.cursor.number)).shuffle(self._pass)
