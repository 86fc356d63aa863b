"""Slots of the KV cache: which request owns each, which token ids it holds, and what a new prompt can reuse.

A slot is running (a request owns it), idle (a finished turn, kept for the conversation's next one) or free. Reuse needs
no hashing: the ids of all slots are one matrix, and one comparison gives a prompt's common prefix with every row.

A family is a set of decoding sequences that begin with the same tokens, such as the siblings of a rollout group. On a
CPU, reading keys and values is most of the cost of decoding long sequences, and a family reads those of its prefix
once. It attends to the prefix in one slot in one call, each member attends to its own tail, and the two parts are
merged by their log-sum-exp (as in Flash-Decoding and cascade attention, arXiv 2501.01005).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

MIN_SHARED = 32
"""Shortest prefix, in tokens, that is worth copying from another slot or waiting for."""


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where a request goes: `slot`, of which the first `cached` columns are right already or copied from `source`."""

    slot: int
    cached: int
    source: int | None


class SlotTable:
    """`capacity` slots of at most `context` tokens. Not thread-safe: the compute thread owns it."""

    def __init__(self, capacity: int, context: int, *, reuse: bool = True, keep_idle: bool = False) -> None:
        self.capacity = capacity
        self.reuse = reuse
        self.keep_idle = keep_idle
        """Whether idle slots outlive a swap, for the next turn of their own conversation only."""
        self.high = 0
        """Slots used so far; later rows were never touched."""
        self.tokens = np.zeros((capacity, context), dtype=np.int32)
        self.known = np.zeros(capacity, dtype=np.int64)
        """Token ids in each row."""
        self.computed = np.zeros(capacity, dtype=np.int64)
        """Columns of the cache that hold keys and values of those ids."""
        self.fresh = np.zeros(capacity, dtype=bool)
        """Whether the current weights computed all of `computed`."""
        self.origin = np.zeros(capacity, dtype=np.int64)
        """Number of swaps before the first `_pure` columns were computed (all of `computed` while fresh)."""
        self._pure = np.zeros(capacity, dtype=np.int64)
        self._swaps = 0
        self._refused = 0
        """Swaps up to the last one that took weights back. What was computed before it is not reused."""
        self.running = np.zeros(capacity, dtype=bool)
        self.session: list[str | None] = [None] * capacity
        self._idle_since = np.zeros(capacity, dtype=np.int64)
        self._clock = 0
        self._changes = 0
        self._found: tuple[tuple[int, bytes] | None, list[Family]] = (None, [])

    def place(self, prompt: np.ndarray, session: str) -> SlotPlace | None:
        """Give a slot to a request with `prompt` (int32 [T]) of conversation `session`. Return None while it must wait.

        It waits when every slot runs, or when a longer prefix of its prompt is being computed for another request:
        siblings of a group arrive together, the first computes, the others copy.
        """
        idle = [slot for slot in range(self.high) if self.session[slot] == session and not self.running[slot]]
        held, coming = self._shared(prompt, idle)
        best = int(held.argmax()) if self.high else -1
        longest = int(held[best]) if best >= 0 else 0
        if self.high and int(coming.max()) - longest >= MIN_SHARED:
            return None
        if idle:
            target = max(idle, key=lambda slot: int(held[slot]))
        else:
            target = self._vacant(keep=best if longest >= MIN_SHARED else -1)
        if target is None:
            return None
        own = int(held[target]) if target < len(held) else 0
        place = SlotPlace(target, own, None) if own + MIN_SHARED > longest else SlotPlace(target, longest, best)
        self.tokens[target, : len(prompt)] = prompt
        self.known[target], self.computed[target] = len(prompt), place.cached
        self.running[target], self.session[target] = True, session
        if place.cached and place.source is None and not self.fresh[target]:
            self._pure[target] = min(self._pure[target], place.cached)  # The beginning is of older weights.
        else:
            self.fresh[target], self.origin[target] = True, self._swaps
        self._changes += 1
        return place

    def _shared(self, prompt: np.ndarray, own: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return per slot in use: how many leading tokens of `prompt` it holds, and how many it will once computed.

        At most len(prompt) - 1: the last token is always computed because its logits are needed. Entries of older
        weights count in the conversation's `own` idle slots only.
        """
        if not self.reuse or not self.high:
            return np.zeros(self.high, dtype=np.int64), np.zeros(self.high, dtype=np.int64)
        width = min(len(prompt) - 1, int(self.known[: self.high].max()))
        differs = self.tokens[: self.high, :width] != prompt[:width]
        common = np.where(differs.any(1), differs.argmax(1), width) if width else np.zeros(self.high, dtype=np.int64)
        usable = self.fresh[: self.high].copy()
        usable[own] |= self.origin[own] >= self._refused
        common = common * usable
        return np.minimum(common, self.computed[: self.high]), np.minimum(common, self.known[: self.high])

    def _vacant(self, keep: int) -> int | None:
        """Return a free slot, else a new one, else the one idle for longest; `keep` only when there is no other."""
        idle = np.flatnonzero(~self.running[: self.high]).tolist()
        for slot in idle:
            if self.session[slot] is None:
                return slot
        if self.high < self.capacity:
            self.high += 1
            return self.high - 1
        others = [slot for slot in idle if slot != keep] or idle
        return min(others, key=lambda slot: int(self._idle_since[slot])) if others else None

    def append(self, slot: int, token: int) -> int:
        """Add a sampled token. Returns the number of tokens in the row."""
        known = int(self.known[slot])
        self.tokens[slot, known] = token
        self.known[slot] = known + 1
        return known + 1

    def release(self, slot: int) -> None:
        """End the slot's request. Its cache stays for the next turn, unless older weights computed it."""
        self._changes += 1
        self.running[slot] = False
        if self.reuse and (self.fresh[slot] or (self.keep_idle and self.origin[slot] >= self._refused)):
            self._clock += 1
            self._idle_since[slot] = self._clock
            self.known[slot] = self.computed[slot]  # The rest will not be computed: no request may wait for it.
        else:
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        self.session[slot] = None
        self.known[slot] = self.computed[slot] = 0
        self.fresh[slot] = False

    def weights_changed(self, again: Collection[int], *, taken_back: bool = False) -> None:
        """Drop idle slots unless they are kept. Running ones keep their old entries; `again` are computed again.

        `taken_back`: the weights before were refused, so that nothing computed until now is kept for a later turn.
        """
        self._swaps += 1
        self._changes += 1
        if taken_back:
            self._refused = self._swaps
        for slot in range(self.high):
            if not self.running[slot] and (taken_back or not self.keep_idle):
                self._forget(slot)
            elif slot in again:
                self.computed[slot], self.fresh[slot], self.origin[slot] = 0, True, self._swaps
            elif self.fresh[slot]:
                self.fresh[slot], self._pure[slot] = False, self.computed[slot]

    def families(self, slots: np.ndarray) -> list[Family]:
        """Return `find_families`, from memory unless a request came, went or started to decode since the last call."""
        key = (self._changes, slots.tobytes())
        if key != self._found[0]:
            # Leading columns that equal those of any slot with the same tokens and `origin`.
            limits = np.where(self.fresh[slots], self.computed[slots], self._pure[slots])
            self._found = (key, find_families(self, slots, limits))
        return self._found[1]


MIN_COLUMNS = 32
"""Shortest common prefix, in tokens, that makes a family."""
MIN_GAIN = 1024
"""Cached columns per layer that a family must save to be worth its extra call and merge."""


@dataclass(frozen=True, slots=True)
class Family:
    """Decoding rows that share their first `columns` tokens."""

    rows: tuple[int, ...]
    slot: int
    """Slot whose copy of the prefix is read."""
    columns: int


def find_families(table: SlotTable, slots: np.ndarray, limits: np.ndarray) -> list[Family]:
    """Find families among the decoding `slots` (ascending; a row is an index into them).

    `limits`: how many leading columns of each slot may be shared.
    """
    buckets: dict[tuple[int, bytes], list[int]] = {}
    for row in np.flatnonzero(limits >= MIN_COLUMNS).tolist():
        slot = int(slots[row])
        key = (int(table.origin[slot]), table.tokens[slot, :MIN_COLUMNS].tobytes())
        buckets.setdefault(key, []).append(row)
    families: list[Family] = []
    for rows in buckets.values():
        families += _split(table, slots, limits, np.array(rows))
    return families


def _split(table: SlotTable, slots: np.ndarray, limits: np.ndarray, rows: np.ndarray) -> list[Family]:
    """Split `rows` into families. The first row left picks the prefix that saves most for each of its sharers."""
    families = []
    while len(rows) > 1:
        leader, others = rows[0], rows[1:]
        width = int(limits[leader])
        differs = table.tokens[slots[others], :width] != table.tokens[slots[leader], :width]
        common = np.minimum(np.where(differs.any(1), differs.argmax(1), width), limits[others])
        order = np.argsort(-common, kind="stable")
        sharers = np.arange(1, len(order) + 1)
        saved = np.where(common[order] * sharers >= MIN_GAIN, common[order] * sharers / (sharers + 1), 0.0)
        best = int(saved.argmax())
        rows = others
        if saved[best] > 0:
            members = others[order[: best + 1]]
            family_rows = (int(leader), *sorted(members.tolist()))
            families.append(Family(family_rows, int(slots[leader]), int(common[order[best]])))
            rows = np.setdiff1d(others, members)
    return families
