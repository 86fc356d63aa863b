"""Attention of one engine step, registered as an implementation of transformers' attention interface.

A step's tokens form one row of N: first one token of each decoding sequence, ordered by slot, then the segments of
prompts. Linear layers see that one row. Only attention treats it as many sequences:

    decode   neighboring slots of similar length share one call over a view of the cache
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
    columns: int
    """Length of the longest sequence in the group, its new token included."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [row, row + count) are tokens [start, start + count) of the sequence in `slot`."""

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
    _masks: dict = field(default_factory=dict)

    def decode_mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [B, columns]: -inf at columns that a decoding row must not see."""
        key = ("decode", window)
        if key not in self._masks:
            assert self.lengths is not None  # there are groups
            columns = torch.arange(max(group.columns for group in self.groups), device=query.device)
            hidden = columns >= self.lengths[:, None]
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
    if slot_plan.places is not None:
        slot_plan.cache.write(module.layer_idx, key, value, slot_plan.places)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    for group in slot_plan.groups:
        rows = slice(group.row, group.row + group.count)
        out[rows] = _decode(module, query[:, rows], group, slot_plan, scaling, sliding_window)
    for segment in slot_plan.segments:
        rows = slice(segment.row, segment.row + segment.count)
        keys, values = _seen(key, value, segment, slot_plan, module.layer_idx)
        out[rows] = _prefill(query[:, rows], keys, values, segment, slot_plan, scaling, sliding_window).transpose(0, 1)
    return out[None], None


def _decode(
    module: AttentionModule,
    query: torch.Tensor,
    group: DecodeGroup,
    plan: StepPlan,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend from one token of each sequence to all of it. query [H, count, D] -> [count, H, D].

    The query heads of one KV head become rows of one query, so that each cached key is read once.
    """
    keys, values = plan.cache.layers[module.layer_idx]
    heads, count, size = query.shape
    kv_heads, columns = keys.shape[0], group.columns
    slots = slice(group.slot, group.slot + count)
    grouped = query.reshape(kv_heads, heads // kv_heads, count, size).transpose(1, 2)
    mask = plan.decode_mask(window, query)[group.row : group.row + count, :columns]
    part = F.scaled_dot_product_attention(
        grouped, keys[:, slots, :columns], values[:, slots, :columns], attn_mask=mask[None, :, None], scale=scaling
    )
    return part.transpose(0, 1).reshape(count, heads, -1)


def _seen(
    key: torch.Tensor, value: torch.Tensor, segment: Segment, plan: StepPlan, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [H_kv, start + count, D] of a segment and of the tokens before it."""
    if segment.start:
        keys, values = plan.cache.layers[layer]
        end = segment.start + segment.count
        return keys[:, segment.slot, :end], values[:, segment.slot, :end]
    rows = slice(segment.row, segment.row + segment.count)
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
