"""Decoding sequences that begin with the same tokens: siblings of a group, which differ only after their prompt.

Attention over a common prefix needs its keys and values once for all of them, and on a CPU reading those is most of
what decoding long sequences costs. A family attends to the prefix in one slot (any member's copy is the same) as one
call, each member to its own tail, and the two parts are merged by their log-sum-exp (as in Flash-Decoding and cascade
attention, arXiv 2501.01005).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inference.engines.local.slots import SlotTable

MIN_COLUMNS = 32
"""A shorter common prefix is not looked for."""
MIN_GAIN = 1024
"""Cached columns that a family must save in each layer to be worth its extra call and merge."""


@dataclass(frozen=True, slots=True)
class Family:
    """Decoding rows that share their first `columns` tokens."""

    rows: tuple[int, ...]
    slot: int
    """Whose copy of the prefix is read."""
    columns: int


class FamilyMemory:
    """Families of the last step: they hold until a request comes, goes, or starts to decode."""

    def __init__(self) -> None:
        self._key: tuple[int, bytes] | None = None
        self._families: list[Family] = []

    def families(self, table: SlotTable, slots: np.ndarray) -> list[Family]:
        """`find_families`, looked up where nothing changed."""
        key = (table.changes, slots.tobytes())
        if key != self._key:
            self._key, self._families = key, find_families(table, slots)
        return self._families


def find_families(table: SlotTable, slots: np.ndarray) -> list[Family]:
    """Families among the decoding `slots` (ascending; a row's index is its place among them)."""
    limits = table.sharable(slots)
    buckets: dict[tuple[int, bytes], list[int]] = {}
    for row in np.flatnonzero(limits >= MIN_COLUMNS).tolist():
        slot = int(slots[row])
        key = (int(table.origin[slot]), table.tokens[slot, :MIN_COLUMNS].tobytes())
        buckets.setdefault(key, []).append(row)
    families: list[Family] = []
    for rows in buckets.values():
        families += _split(table, slots, limits, np.array(rows))
    return families


def _split(table: SlotTable, slots: np.ndarray, limits: np.ndarray, left: np.ndarray) -> list[Family]:
    """Families among rows `left`. The first one left chooses the prefix that saves most for each of its sharers."""
    families = []
    while len(left) > 1:
        leader, others = left[0], left[1:]
        width = int(limits[leader])
        differs = table.tokens[slots[others], :width] != table.tokens[slots[leader], :width]
        common = np.minimum(np.where(differs.any(1), differs.argmax(1), width), limits[others])
        order = np.argsort(-common, kind="stable")
        sharers = np.arange(1, len(order) + 1)
        saved = np.where(common[order] * sharers >= MIN_GAIN, common[order] * sharers / (sharers + 1), 0.0)
        best = int(saved.argmax())
        left = others
        if saved[best] > 0:
            members = others[order[: best + 1]]
            rows = (int(leader), *sorted(members.tolist()))
            families.append(Family(rows, int(slots[leader]), int(common[order[best]])))
            left = np.setdiff1d(others, members)
    return families
