"""Attention of one engine step, registered as an implementation of transformers' attention interface.

A step's tokens form one row of N: first one token of each decoding sequence, ordered by slot, then the segments of
prompts. Linear layers see that one row. Only attention treats it as many sequences:

    decode   neighboring slots of similar length share one call over a view of the cache; on a CPU, a prefix that
             several sequences share is attended to once for all of them (families, slots.py)
    segment  one call per sequence: causal over itself, and over what its slot already holds

The plan passes through the model as a keyword argument. The model is called with use_cache=False.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from composer_prime.errors import EngineError
from inference.engines.local.kv_cache import KvCache
from inference.engines.local.slots import Family

IMPLEMENTATION = "composer_slots"


class AttentionModule(Protocol):
    """A layer's attention in transformers."""

    layer_idx: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [row, row + count) of the step are the next tokens of slots [slot, slot + count)."""

    row: int
    count: int
    slot: int
    first: int
    """The rows' families cover the columns before this one; 0 without families."""
    columns: int
    """Length of the longest sequence in the group, its new token included."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [row, row + count) are tokens [start, start + count) of the sequence in `slot`.

    In a plan that stores nothing, the first `start` rows are the tokens before it.
    """

    row: int
    count: int
    slot: int
    start: int


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What one forward pass computes."""

    cache: KvCache
    segments: list[Segment]
    places: torch.Tensor | None
    """int64 [N]: where the cache stores the rows' keys and values; None stores nothing (scoring)."""
    groups: list[DecodeGroup] = field(default_factory=list)
    lengths: torch.Tensor | None = None
    """int64 [B]: length of each decoding sequence, its new token included. None without decoding sequences."""
    families: list[Family] = field(default_factory=list)
    starts: torch.Tensor | None = None
    """int64 [B]: columns of each decoding sequence that its family covers. None without families."""
    members: torch.Tensor | None = None
    """int64 [M]: decoding rows of all families, family after family. None without families."""
    _masks: dict = field(default_factory=dict)

    def decode_mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [B, columns]: -inf at columns that a decoding row must not see."""
        key = ("decode", window)
        if key not in self._masks:
            assert self.lengths is not None  # there are groups
            columns = torch.arange(max(group.columns for group in self.groups), device=query.device)
            hidden = columns >= self.lengths[:, None]
            if self.starts is not None:
                hidden |= columns < self.starts[:, None]
            if window is not None:
                hidden |= columns < self.lengths[:, None] - window
            self._masks[key] = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(
                hidden, float("-inf")
            )
        return self._masks[key]

    def segment_mask(self, segment: Segment, window: int | None, repeat: int, device: torch.device) -> torch.Tensor:
        """Return the boolean mask [repeat * count, start + count]: True where a segment's row may look."""
        key = (segment.row, window, repeat)
        if key not in self._masks:
            rows = torch.arange(segment.start, segment.start + segment.count, device=device)[:, None]
            columns = torch.arange(segment.start + segment.count, device=device)
            seen = columns <= rows
            if window is not None:
                seen &= columns > rows - window
            self._masks[key] = seen.repeat(repeat, 1)
        return self._masks[key]


def slot_attention(
    module: AttentionModule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slot_plan: StepPlan | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, N, H, D].

    Raises EngineError for models whose attention needs more than scale, mask and window.
    """
    del attention_mask
    if slot_plan is None or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise EngineError(
            f"the local engine cannot serve {type(module).__name__} (soft-capped logits, attention sinks or its own "
            "cache handling): set inference.engine = 'vllm'"
        )
    query, key, value = query[0], key[0], value[0]
    slot_plan.cache.windowed |= sliding_window is not None
    if slot_plan.places is not None:
        slot_plan.cache.write(module.layer_idx, key, value, slot_plan.places)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    if slot_plan.families:
        _decode_families(module, query, slot_plan, scaling, out)
    else:
        for group in slot_plan.groups:
            grouped, keys, values, mask = _decode_inputs(module, query, group, slot_plan, sliding_window)
            part = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
            out[group.row : group.row + group.count] = _rows(part)
    for segment in slot_plan.segments:
        rows = slice(segment.row, segment.row + segment.count)
        keys, values = _seen(key, value, segment, slot_plan, module.layer_idx)
        out[rows] = _prefill(query[:, rows], keys, values, segment, slot_plan, scaling, sliding_window).transpose(0, 1)
    return out[None], None


def _decode_inputs(
    module: AttentionModule, query: torch.Tensor, group: DecodeGroup, plan: StepPlan, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [H_kv, count, H / H_kv, D], keys and values [H_kv, count, columns, D] and mask of one token a sequence.

    The query heads of one KV head become rows of one query, so that each cached key is read once.
    """
    keys, values = plan.cache.layers[module.layer_idx]
    heads, size, kv_heads = query.shape[0], query.shape[2], keys.shape[0]
    rows, slots = slice(group.row, group.row + group.count), slice(group.slot, group.slot + group.count)
    columns = slice(group.first, group.columns)
    grouped = query[:, rows].reshape(kv_heads, heads // kv_heads, group.count, size).transpose(1, 2)
    mask = plan.decode_mask(window, query)[rows, columns]
    return grouped, keys[:, slots, columns], values[:, slots, columns], mask[None, :, None]


def _rows(part: torch.Tensor) -> torch.Tensor:
    """[H_kv, count, H / H_kv, ...] -> [count, H, ...]."""
    moved = part.transpose(0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


def _decode_families(
    module: AttentionModule, query: torch.Tensor, plan: StepPlan, scaling: float | None, out: torch.Tensor
) -> None:
    """Attend to tails by group and to common prefixes by family, and merge both into `out` [N, H, D]. CPU only.

    The operator is the one that scaled_dot_product_attention runs on a CPU. Called directly it also returns the
    log-sum-exp.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    tail_lse = query.new_empty(sum(group.count for group in plan.groups), query.shape[0])
    for group in plan.groups:
        grouped, keys, values, mask = _decode_inputs(module, query, group, plan, None)
        part, lse = flash(grouped, keys, values, attn_mask=mask, scale=scaling)
        rows = slice(group.row, group.row + group.count)
        out[rows], tail_lse[rows] = _rows(part), _rows(lse)
    keys, values = plan.cache.layers[module.layer_idx]
    kv_heads, size, members = keys.shape[0], query.shape[2], plan.members
    assert members is not None  # there are families
    family_query = query.index_select(1, members).reshape(kv_heads, -1, len(members), size).transpose(1, 2)
    parts, part_lses, first = [], [], 0
    for family in plan.families:
        count, columns = len(family.rows), slice(0, family.columns)
        one = slice(family.slot, family.slot + 1)
        grouped = family_query[:, first : first + count].reshape(kv_heads, 1, -1, size)
        part, lse = flash(grouped, keys[:, one, columns], values[:, one, columns], scale=scaling)
        parts.append(part.reshape(kv_heads, count, -1, size))
        part_lses.append(lse.reshape(kv_heads, count, -1))
        first += count
    prefix, prefix_lse = _rows(torch.cat(parts, 1)), _rows(torch.cat(part_lses, 1))
    share = torch.sigmoid(prefix_lse - tail_lse.index_select(0, members))[..., None]
    out.index_copy_(0, members, torch.lerp(out.index_select(0, members), prefix, share))


def _seen(
    key: torch.Tensor, value: torch.Tensor, segment: Segment, plan: StepPlan, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [H_kv, start + count, D] of a segment and of the tokens before it."""
    end, rows = segment.start + segment.count, slice(segment.row, segment.row + segment.count)
    if segment.start and plan.places is not None:
        keys, values = plan.cache.layers[layer]
        return keys[:, segment.slot, :end], values[:, segment.slot, :end]
    if segment.start:
        start = slice(0, segment.start)
        return torch.cat([key[:, start], key[:, rows]], 1), torch.cat([value[:, start], value[:, rows]], 1)
    return key[:, rows], value[:, rows]


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment: Segment,
    plan: StepPlan,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend from a segment's rows to all up to it. query [H, count, D] -> [H, count, D]."""
    heads, count, _ = query.shape
    kv_heads = key.shape[0]
    if segment.start == 0 and (window is None or count <= window):
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )[0]
    repeat = heads // kv_heads
    grouped = query.reshape(kv_heads, repeat * count, -1)
    mask = plan.segment_mask(segment, window, repeat, query.device)
    out = F.scaled_dot_product_attention(grouped[None], key[None], value[None], attn_mask=mask, scale=scaling)
    return out[0].reshape(heads, count, -1)


AttentionInterface.register(IMPLEMENTATION, slot_attention)
