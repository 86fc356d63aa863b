"""Which tokens a step computes: the next token of every decoding sequence, and a bounded share of waiting prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from inference.engines.local.attention import DecodeGroup, Segment, StepPlan
from inference.engines.local.kv_cache import KvCache
from inference.engines.local.slots import SlotTable

GROUP_WASTE = 384
"""Padded cache columns that one more attention call is worth (a call costs about 40 us, a column about 0.1 us)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward: its inputs, its plan, and which rows sample for which slots."""

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
) -> Step | None:
    """The next step over the running slots in `order` (of admission); None when nothing runs.

    At most `prefill_tokens` prompt tokens are computed, oldest request first.
    """
    if not order:
        return None
    slots = np.array(order)
    missing = table.known[slots] - table.computed[slots]
    decoding = np.sort(slots[missing == 1])
    pieces, budget = _prefill_pieces(slots[missing > 1], table, prefill_tokens), 0
    del budget
    starts = table.computed[decoding]
    ids = [table.tokens[decoding, starts]] + [table.tokens[slot, at : at + count] for slot, at, count in pieces]
    positions = [starts] + [np.arange(at, at + count) for _, at, count in pieces]
    owners = [decoding] + [np.full(count, slot) for slot, _, count in pieces]
    lengths = starts + 1
    ends = [at + count for _, at, count in pieces]
    longest = max([int(lengths.max())] if len(lengths) else [0], default=0)
    cache.reserve(int(slots.max()) + 1, max([longest, *ends]))
    position = np.concatenate(positions)
    places = np.concatenate(owners) * cache.columns + position
    segments, rows, sampled = [], list(range(len(decoding))), decoding.tolist()
    row = len(decoding)
    for slot, at, count in pieces:
        segments.append(Segment(row, count, slot, at))
        row += count
        if at + count == table.known[slot]:
            rows.append(row - 1)
            sampled.append(slot)
    plan = StepPlan(
        cache=cache,
        groups=_groups(decoding, lengths),
        segments=segments,
        lengths=_tensor(lengths, device),
        places=_tensor(places, device),
    )
    return Step(
        input_ids=_tensor(np.concatenate(ids), device)[None],
        position_ids=_tensor(position, device)[None],
        plan=plan,
        sample_rows=_tensor(np.array(rows), device),
        sample_slots=sampled,
        counts=[(slot, 1) for slot in decoding.tolist()] + [(slot, count) for slot, _, count in pieces],
    )


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _prefill_pieces(slots: np.ndarray, table: SlotTable, budget: int) -> list[tuple[int, int, int]]:
    """(slot, first token, count) of each prompt piece, together at most `budget` tokens."""
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
    """Neighbouring slots whose padding to a common length costs less than another attention call."""
    groups: list[DecodeGroup] = []
    first = 0
    for row in range(1, len(slots) + 1):
        if row < len(slots) and slots[row] == slots[row - 1] + 1:
            span = lengths[first : row + 1]
            split_cost = _waste(lengths[first:row])
            if _waste(span) - split_cost < GROUP_WASTE:
                continue
        groups.append(DecodeGroup(first, row - first, int(slots[first]), int(lengths[first:row].max())))
        first = row
    return groups if len(slots) else []


def _waste(lengths: np.ndarray) -> int:
    return int(lengths.max() * len(lengths) - lengths.sum())
