"""Plan which tokens a step computes: one per decoding sequence, and a bounded share of waiting prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from inference.engines.local.cached_attention import DecodeGroup, Segment, StepPlan
from inference.engines.local.kv_cache import KvCache
from inference.engines.local.slots import SlotTable

GROUP_WASTE = 384
"""How many padded cache columns cost as much as one more attention call (about 40 us; a column takes 0.1 us)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """One forward pass: its inputs, its plan, and which rows sample for which slots."""

    input_ids: torch.Tensor
    """int64 [1, N]."""
    position_ids: torch.Tensor
    """int64 [1, N]."""
    plan: StepPlan
    sample_rows: torch.Tensor
    """int64 [R]: rows whose logits are sampled from."""
    sample_slots: list[int]
    """[R]."""
    counts: list[tuple[int, int]]
    """(slot, tokens computed)."""


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
    plan = StepPlan(
        cache=cache,
        segments=segments,
        places=_tensor(owners * cache.columns + positions, device),
        groups=_groups(decoding, lengths),
        lengths=_tensor(lengths, device),
    )
    return EngineStep(
        input_ids=_tensor(table.tokens[owners, positions], device)[None],
        position_ids=_tensor(positions, device)[None],
        plan=plan,
        sample_rows=_tensor(np.array(rows), device),
        sample_slots=sampled,
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
