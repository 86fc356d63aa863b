"""Attention of one engine step, registered as an implementation of transformers' attention interface.

A step's tokens form one row of N: first one token of each decoding sequence, ordered by slot, then the segments of
prompts. Linear layers see that one row. Only attention treats it as many sequences:

    decode   neighboring slots of similar length share one call over a view of the cache
    segment  one call per sequence: causal over itself, and over what its slot already holds

The step passes through the model as a keyword argument. The model is called with use_cache=False.

Keys and values of every slot are one pair of tensors per layer. A slot is one sequence's row of columns. The layout is
[heads, slots, columns, head size]: the new tokens of a step are one `index_copy_`, and attention sees neighboring slots
as one strided view without a copy.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from composer_prime.errors import EngineError

IMPLEMENTATION = "composer_slots"
_FIRST_COLUMNS = 128
"""For the pass that shows which layers there are."""


class KvCache:
    """Takes its shapes from the first forward pass, so it fits any model that uses the attention interface."""

    def __init__(self) -> None:
        self.slots = 1
        self.columns = _FIRST_COLUMNS
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of each layer, [heads, slots, columns, head size]."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers; known after the first forward pass."""
        tensors = [tensor for pair in self.layers.values() for tensor in pair]
        return sum(tensor.shape[0] * tensor.shape[3] * tensor.element_size() for tensor in tensors)

    def allocate(self, slots: int, columns: int) -> None:
        """Make room for `slots` rows of `columns`, and forget what there was."""
        self.slots, self.columns = slots, columns
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = self._empty(keys.shape[0], keys), self._empty(values.shape[0], values)

    def _empty(self, heads: int, like: torch.Tensor) -> torch.Tensor:
        """Return zeros: a masked column may be read and must be finite. On a CPU untouched pages cost no memory."""
        shape = (heads, self.slots, self.columns, like.shape[-1])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        pages = mmap.mmap(-1, math.prod(shape) * like.element_size())
        return torch.frombuffer(pages, dtype=like.dtype).view(shape)

    def write(self, index: int, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor) -> None:
        """Store `key`, `value` [heads, N, head size] at flat `places` [N] (slot * columns + position)."""
        if index not in self.layers:
            self.layers[index] = self._empty(key.shape[0], key), self._empty(value.shape[0], value)
        keys, values = self.layers[index]
        if keys.shape[0] != key.shape[0] or keys.shape[3] != key.shape[2]:
            raise EngineError(f"layer {index} changed its KV shape; the local engine cannot serve this model")
        keys.view(key.shape[0], -1, key.shape[2]).index_copy_(1, places, key)
        values.view(value.shape[0], -1, value.shape[2]).index_copy_(1, places, value)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` columns of one slot to another: a shared prefix, or a move."""
        for pair in self.layers.values():
            for tensor in pair:
                tensor[:, target, :count] = tensor[:, source, :count]


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
class EngineStep:
    """One forward pass: its inputs, how they attend, and which rows sample for which slots."""

    cache: KvCache
    input_ids: torch.Tensor
    """int64 [1, N]."""
    position_ids: torch.Tensor
    """int64 [1, N]."""
    rows: torch.Tensor | None
    """int64 [R]: those whose logits are wanted; None for all."""
    segments: list[Segment]
    places: torch.Tensor | None
    """int64 [N]: where the cache stores the rows' keys and values; None stores nothing (scoring)."""
    groups: list[DecodeGroup] = field(default_factory=list)
    lengths: torch.Tensor | None = None
    """int64 [B]: length of each decoding sequence, its new token included. None without decoding sequences."""
    slots: list[int] = field(default_factory=list)
    """[R]: those that sample."""
    counts: list[tuple[int, int]] = field(default_factory=list)
    """(slot, tokens computed)."""
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


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends."""

    index: int
    scale: float | None
    window: int | None


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_step: EngineStep | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, N, H, D].

    Raises EngineError for models whose attention needs more than scale, mask and window.
    """
    del attention_mask
    if slot_step is None or settings.get("softcap") is not None or settings.get("s_aux") is not None:
        raise EngineError(
            f"the local engine cannot serve {type(module).__name__} (soft-capped logits, attention sinks or its own "
            "cache handling): set inference.engine = 'vllm'"
        )
    layer = LayerAttention(module.layer_idx, settings.get("scaling"), settings.get("sliding_window"))
    query, key, value = query[0], key[0], value[0]
    if slot_step.places is not None:
        slot_step.cache.write(layer.index, key, value, slot_step.places)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    for group in slot_step.groups:
        rows = slice(group.row, group.row + group.count)
        out[rows] = _decode(query[:, rows], group, slot_step, layer)
    for segment in slot_step.segments:
        rows = slice(segment.row, segment.row + segment.count)
        keys, values = key[:, rows], value[:, rows]
        if segment.start:
            end = segment.start + segment.count
            keys, values = (held[:, segment.slot, :end] for held in slot_step.cache.layers[layer.index])
        out[rows] = _prefill(query[:, rows], keys, values, segment, slot_step, layer).transpose(0, 1)
    return out[None], None


def _decode(query: torch.Tensor, group: DecodeGroup, step: EngineStep, layer: LayerAttention) -> torch.Tensor:
    """Attend from one token of each sequence to all of it. query [H, count, D] -> [count, H, D].

    The query heads of one KV head become rows of one query, so that each cached key is read once.
    """
    keys, values = step.cache.layers[layer.index]
    heads, count, size = query.shape
    kv_heads, columns = keys.shape[0], group.columns
    slots = slice(group.slot, group.slot + count)
    grouped = query.reshape(kv_heads, heads // kv_heads, count, size).transpose(1, 2)
    mask = step.decode_mask(layer.window, query)[group.row : group.row + count, :columns]
    part = F.scaled_dot_product_attention(
        grouped,
        keys[:, slots, :columns],
        values[:, slots, :columns],
        attn_mask=mask[None, :, None],
        scale=layer.scale,
    )
    return part.transpose(0, 1).reshape(count, heads, -1)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment: Segment,
    step: EngineStep,
    layer: LayerAttention,
) -> torch.Tensor:
    """Attend from a segment's rows to all up to it. query [H, count, D] -> [H, count, D]."""
    heads, count, _ = query.shape
    kv_heads = key.shape[0]
    if segment.start == 0 and (layer.window is None or count <= layer.window):
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=layer.scale, enable_gqa=heads != kv_heads
        )[0]
    repeat = heads // kv_heads
    grouped = query.reshape(kv_heads, repeat * count, -1)
    mask = step.segment_mask(segment, layer.window, repeat, query.device)
    out = F.scaled_dot_product_attention(grouped[None], key[None], value[None], attn_mask=mask, scale=layer.scale)
    return out[0].reshape(heads, count, -1)


AttentionInterface.register(IMPLEMENTATION, slot_attention)
