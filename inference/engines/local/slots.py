"""Slots of the KV cache: which request owns each, which token ids it holds, what a new prompt can reuse, and which
tokens a step computes: one per decoding sequence, and a bounded share of waiting prompts.

A slot is running (a request owns it), idle (a finished turn, kept for the conversation's next one) or free. Reuse needs
no hashing: the ids of all slots are one matrix, and one comparison gives a prompt's common prefix with every row.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from inference.engines.local.cached_attention import DecodeGroup, EngineStep, KvCache, Segment

MIN_SHARED = 32
"""Shortest prefix, in tokens, that is worth copying from another slot or waiting for."""
GROUP_WASTE = 384
"""How many padded cache columns cost as much as one more attention call (about 40 us; a column takes 0.1 us)."""


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """The place of a request: `slot`, of which the first `cached` columns are right already or copied from `source`."""

    slot: int
    cached: int
    source: int | None


class SlotTable:
    """`capacity` slots of at most `context` tokens. Not thread-safe: the compute thread owns it."""

    def __init__(self, capacity: int, context: int) -> None:
        self.capacity = capacity
        self.high = 0
        """Slots used so far; later rows were never touched."""
        self.tokens = np.zeros((capacity, context), dtype=np.int32)
        self.known = np.zeros(capacity, dtype=np.int64)
        """Token ids in each row."""
        self.computed = np.zeros(capacity, dtype=np.int64)
        """Columns of the cache that hold keys and values of those ids."""
        self.fresh = np.zeros(capacity, dtype=bool)
        """Whether the current weights computed all of `computed`."""
        self.running = np.zeros(capacity, dtype=bool)
        self.session: list[str | None] = [None] * capacity
        self._idle_since = np.zeros(capacity, dtype=np.int64)
        self._clock = 0

    def place(self, prompt: np.ndarray, session: str) -> SlotPlace | None:
        """Give a slot to a request with `prompt` (int32 [T]) of conversation `session`. Return None while it must wait.

        It waits when every slot runs, or when a longer prefix of its prompt is being computed for another request:
        siblings of a group arrive together, the first computes, the others copy.
        """
        idle = [slot for slot in range(self.high) if self.session[slot] == session and not self.running[slot]]
        held, coming = self._shared(prompt)
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
        self.fresh[target] = True
        return place

    def _shared(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return per slot in use: how many leading tokens of `prompt` it holds, and how many it will once computed.

        At most len(prompt) - 1: the last token is always computed because its logits are needed.
        """
        if not self.high:
            return np.zeros(self.high, dtype=np.int64), np.zeros(self.high, dtype=np.int64)
        width = min(len(prompt) - 1, int(self.known[: self.high].max()))
        differs = self.tokens[: self.high, :width] != prompt[:width]
        common = np.where(differs.any(1), differs.argmax(1), width) if width else np.zeros(self.high, dtype=np.int64)
        common = common * self.fresh[: self.high]
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
        self.running[slot] = False
        if self.fresh[slot]:
            self._clock += 1
            self._idle_since[slot] = self._clock
            self.known[slot] = self.computed[slot]  # The rest will not be computed: no request may wait for it.
        else:
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        self.session[slot] = None
        self.known[slot] = self.computed[slot] = 0
        self.fresh[slot] = False

    def weights_changed(self, again: Collection[int]) -> None:
        """Drop idle slots. Running ones keep their old entries; `again` are computed again."""
        for slot in range(self.high):
            if not self.running[slot]:
                self._forget(slot)
            elif slot in again:
                self.computed[slot], self.fresh[slot] = 0, True
            else:
                self.fresh[slot] = False


# ---- what a step computes ------------------------------------------------------------------------------------------


def plan_step(
    table: SlotTable, cache: KvCache, order: list[int], prefill_tokens: int, device: torch.device
) -> EngineStep | None:
    """Return the next step over the running slots in `order` (of admission), None when nothing runs.

    At most `prefill_tokens` prompt tokens are computed, oldest request first.
    """
    if not order:
        return None
    slots = np.array(order)
    missing = table.known[slots] - table.computed[slots]
    decoding = np.sort(slots[missing == 1])
    pieces = _prefill_pieces(slots[missing > 1], table, prefill_tokens)
    lengths = table.known[decoding]
    segments, rows, sampled = [], list(range(len(decoding))), decoding.tolist()
    row = len(decoding)
    for slot, start, count in pieces:
        segments.append(Segment(row, count, slot, start))
        row += count
        if start + count == table.known[slot]:
            rows.append(row - 1)
            sampled.append(slot)
    owners = np.concatenate([decoding, *(np.full(count, slot) for slot, _, count in pieces)])
    positions = np.concatenate([lengths - 1, *(np.arange(start, start + count) for _, start, count in pieces)])
    return EngineStep(
        cache=cache,
        input_ids=_tensor(table.tokens[owners, positions], device)[None],
        position_ids=_tensor(positions, device)[None],
        rows=_tensor(np.array(rows), device),
        segments=segments,
        places=_tensor(owners * cache.columns + positions, device),
        groups=_groups(decoding, lengths),
        lengths=_tensor(lengths, device),
        slots=sampled,
        counts=[(slot, 1) for slot in decoding.tolist()] + [(slot, count) for slot, _, count in pieces],
    )


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _prefill_pieces(slots: np.ndarray, table: SlotTable, budget: int) -> list[tuple[int, int, int]]:
    """Return (slot, first token, count) of each prompt piece, together at most `budget` tokens."""
    pieces = []
    for slot in slots.tolist():
        start = int(table.computed[slot])
        count = min(int(table.known[slot]) - start, budget)
        if count <= 0:
            break
        pieces.append((slot, start, count))
        budget -= count
    return pieces


def _groups(slots: np.ndarray, lengths: np.ndarray) -> list[DecodeGroup]:
    """Group neighboring slots whose padding to common columns costs less than another attention call."""
    groups: list[DecodeGroup] = []
    first = longest = 0
    at = slots.tolist()
    for row, (slot, length) in enumerate(zip(at, lengths.tolist(), strict=True)):
        together = (row - first + 1) * max(longest, length)
        apart = (row - first) * longest + length
        if row > first and (slot != at[row - 1] + 1 or together - apart > GROUP_WASTE):
            groups.append(DecodeGroup(first, row - first, at[first], longest))
            first, longest = row, 0
        longest = max(longest, length)
    if at:
        groups.append(DecodeGroup(first, len(at) - first, at[first], longest))
    return groups
