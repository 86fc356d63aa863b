"""A bounded memory of what was seen: never more than two generations, so that a file of any size fits."""

from __future__ import annotations

GENERATION = 250_000


class Recent:
    """A set that forgets its oldest half once it holds twice `generation` keys."""

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        self._new: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._new or key in self._old

    def add(self, key: bytes) -> bool:
        """Whether `key` was not there yet."""
        if key in self:
            return False
        if len(self._new) >= self._generation:
            self._old, self._new = self._new, set()
        self._new.add(key)
        return True
