"""The model of the local engine: its KV cache, attention over it in transformers' interface, and its weights.

A slot holds one sequence: running (a request owns it), idle (a finished turn, kept for the next one) or free.
The ids of all slots are one matrix: one comparison gives a prompt's common prefix with every row.

A step's tokens form one row of N: one token of each decoding sequence, ordered by slot, then segments of prompts.
Linear layers see that one row. Only attention treats it as many sequences:

    decode   neighboring slots of similar length share one call over a view of the cache
    segment  one call per sequence: causal over itself, and over what its slot already holds

Recurrent layers (linear attention, Mamba) have one state a slot, that of its last computed token. It cannot go back: a
prompt that shares less is computed from its first token.

The step passes through the model as a keyword argument. Keys and values of all slots are a pair of tensors a layer,
[heads, slots, columns, head size]: new tokens are one `index_copy_`, neighboring slots a view.

New weights are copied into the loaded model in place (`LoadedModel.swap`).
"""

from __future__ import annotations

import inspect
import logging
import math
import mmap
import re
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import ConfigError, EngineError, MisfitError, ModelNotFoundError
from inference.engines.base import ReadBack, refuse_misfits
from inference.snapshot import folder_snapshot, tensor_blocks, word_sum

logger = logging.getLogger(__name__)

_one_load = threading.Lock()
"""transformers replaces methods of its classes while it loads: of two loads at a time, all later ones lack tied
tensors."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
IMPLEMENTATION = "composer_slots"
MIN_SHARED = 32
"""Shortest prefix, in tokens, worth copying or waiting for."""
_FIRST_COLUMNS = 128
"""For the pass that shows which layers there are."""
_GROUP_WASTE = 384
"""How many padded cache columns cost as much as one more attention call."""


class KvCache:
    """Slots of token ids with their keys and values, in the shapes of the first pass."""

    def __init__(self, slots: int = 1, columns: int = _FIRST_COLUMNS) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of each layer, [heads, slots, columns, head size]."""
        self.states: dict[int, tuple[torch.Tensor, ...]] = {}
        """Of each recurrent layer, [slots, ...]: of its convolution, and its own."""
        self.allocate(slots, columns)

    def allocate(self, slots: int, columns: int) -> None:
        self.slots, self.columns = slots, columns
        self.high = 0
        self.tokens = np.zeros((slots, columns), dtype=np.int32)
        self.known = np.zeros(slots, dtype=np.int64)
        """Token ids in each row."""
        self.computed = np.zeros(slots, dtype=np.int64)
        self.fresh = np.zeros(slots, dtype=bool)
        self.running = np.zeros(slots, dtype=bool)
        self.session: list[str | None] = [None] * slots
        self._idle_since = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = self._empty(keys.shape[0], keys), self._empty(values.shape[0], values)
        for layer, states in self.states.items():
            self.states[layer] = tuple(each.new_zeros(slots, *each.shape[1:]) for each in states)

    # ---- slots: who owns which, and what a new prompt can reuse ---------------------------------------------------

    def place(self, prompt: np.ndarray, session: str) -> tuple[int, int] | None:
        """Give a slot to a request with `prompt` (int32 [T]) of conversation `session`.

        Return the slot and how many of its first columns are right, some of them copied. Return None while every slot
        runs, or a longer prefix of the prompt is being computed: of siblings the first computes, the others copy.
        """
        idle = [slot for slot in range(self.high) if self.session[slot] == session and not self.running[slot]]
        held, coming = self._shared(prompt)
        best = int(held.argmax()) if self.high else -1
        longest = int(held[best]) if best >= 0 else 0
        if self.high and int(coming.max()) - longest >= MIN_SHARED:
            return None
        if idle:
            slot = max(idle, key=lambda slot: int(held[slot]))
        else:
            slot = self._vacant(keep=best if longest >= MIN_SHARED else -1)
        if slot is None:
            return None
        cached = int(held[slot]) if slot < len(held) else 0
        if cached + MIN_SHARED <= longest:
            cached = longest
            self.copy(best, slot, longest)
        self.tokens[slot, : len(prompt)] = prompt
        self.known[slot], self.computed[slot] = len(prompt), cached
        self.running[slot], self.session[slot] = True, session
        self.fresh[slot] = True
        return slot, cached

    def _shared(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return per slot how many leading tokens of `prompt`, but the last, it holds and will hold."""
        if not self.high:
            return np.zeros(self.high, dtype=np.int64), np.zeros(self.high, dtype=np.int64)
        width = min(len(prompt) - 1, int(self.known[: self.high].max()))
        differs = self.tokens[: self.high, :width] != prompt[:width]
        common = np.where(differs.any(1), differs.argmax(1), width) if width else np.zeros(self.high, dtype=np.int64)
        common = common * self.fresh[: self.high]
        if self.states:
            held = np.where(common >= self.computed[: self.high], self.computed[: self.high], 0)
            return held, held
        return np.minimum(common, self.computed[: self.high]), np.minimum(common, self.known[: self.high])

    def _vacant(self, keep: int) -> int | None:
        idle = np.flatnonzero(~self.running[: self.high]).tolist()
        for slot in idle:
            if self.session[slot] is None:
                return slot
        if self.high < self.slots:
            self.high += 1
            return self.high - 1
        others = [slot for slot in idle if slot != keep] or idle
        return min(others, key=lambda slot: int(self._idle_since[slot])) if others else None

    def append(self, slot: int, token: int) -> int:
        known = int(self.known[slot])
        self.tokens[slot, known] = token
        self.known[slot] = known + 1
        return known + 1

    def release(self, slot: int) -> None:
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
        for slot in range(self.high):
            if not self.running[slot]:
                self._forget(slot)
            elif slot in again:
                self.computed[slot], self.fresh[slot] = 0, True
            else:
                self.fresh[slot] = False

    # ---- keys and values ----------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        tensors = [tensor for pair in self.layers.values() for tensor in pair]
        return sum(tensor.shape[0] * tensor.shape[3] * tensor.element_size() for tensor in tensors)

    @property
    def bytes_per_state(self) -> int:
        return sum(each[0].nbytes for states in self.states.values() for each in states)

    def _empty(self, heads: int, like: torch.Tensor) -> torch.Tensor:
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
        for pair in self.layers.values():
            for tensor in pair:
                tensor[:, target, :count] = tensor[:, source, :count]
        for states in self.states.values():
            for each in states:
                each[target] = each[source]


# ---- a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [row, row + count) of the step are the next tokens of slots [slot, slot + count)."""

    row: int
    count: int
    slot: int
    columns: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [row, row + count) are tokens [start, start + count) of the sequence in `slot`."""

    row: int
    count: int
    slot: int
    start: int


@dataclass(slots=True, kw_only=True)
class EngineStep:
    cache: KvCache
    input_ids: torch.Tensor
    """int64 [1, N]."""
    position_ids: torch.Tensor
    """int64 [1, N]."""
    rows: torch.Tensor | None
    """int64 [R]: those whose logits are wanted; None for all."""
    segments: list[Segment]
    places: torch.Tensor | None
    """int64 [N]: where keys and values are stored; None stores nothing (scoring)."""
    groups: list[DecodeGroup] = field(default_factory=list)
    lengths: torch.Tensor | None = None
    """int64 [B]: length of each decoding sequence, its new token included. None without decoding sequences."""
    slots: list[int] = field(default_factory=list)
    """[R]: those that sample."""
    _masks: dict = field(default_factory=dict)

    def decode_mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [B, columns]: -inf where a decoding row must not look."""
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
        """Return the boolean mask [repeat * count, start + count]: where a row may look."""
        key = (segment.row, window, repeat)
        if key not in self._masks:
            rows = torch.arange(segment.start, segment.start + segment.count, device=device)[:, None]
            columns = torch.arange(segment.start + segment.count, device=device)
            seen = columns <= rows
            if window is not None:
                seen &= columns > rows - window
            self._masks[key] = seen.repeat(repeat, 1)
        return self._masks[key]


def plan_step(cache: KvCache, order: list[int], prefill_tokens: int, device: torch.device) -> EngineStep:
    """Return the next step over the running slots in `order` (of admission).

    It computes one token of each decoding sequence, and at most `prefill_tokens` of prompts.
    """
    slots = np.array(order)
    missing = cache.known[slots] - cache.computed[slots]
    decoding = np.sort(slots[missing == 1])
    lengths, row = cache.known[decoding], len(decoding)
    segments, rows, sampled = [], list(range(row)), decoding.tolist()
    for slot in slots[missing > 1].tolist():
        start, known = int(cache.computed[slot]), int(cache.known[slot])
        count = min(known - start, len(decoding) + prefill_tokens - row)
        if count <= 0:
            break
        segments.append(Segment(row, count, slot, start))
        row += count
        if start + count == known:
            rows.append(row - 1)
            sampled.append(slot)
    owners = np.concatenate([decoding, *(np.full(one.count, one.slot) for one in segments)])
    positions = np.concatenate([lengths - 1, *(one.start + np.arange(one.count) for one in segments)])
    return EngineStep(
        cache=cache,
        input_ids=_tensor(cache.tokens[owners, positions], device)[None],
        position_ids=_tensor(positions, device)[None],
        rows=_tensor(np.array(rows), device),
        segments=segments,
        places=_tensor(owners * cache.columns + positions, device),
        groups=_groups(decoding, lengths),
        lengths=_tensor(lengths, device),
        slots=sampled,
    )


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _groups(slots: np.ndarray, lengths: np.ndarray) -> list[DecodeGroup]:
    """Group neighboring slots whose padding costs less than another attention call."""
    groups: list[DecodeGroup] = []
    first = longest = 0
    at = slots.tolist()
    for row, (slot, length) in enumerate(zip(at, lengths.tolist(), strict=True)):
        together = (row - first + 1) * max(longest, length)
        apart = (row - first) * longest + length
        if row > first and (slot != at[row - 1] + 1 or together - apart > _GROUP_WASTE):
            groups.append(DecodeGroup(first, row - first, at[first], longest))
            first, longest = row, 0
        longest = max(longest, length)
    if at:
        groups.append(DecodeGroup(first, len(at) - first, at[first], longest))
    return groups


# ---- attention -------------------------------------------------------------------------------------------------------


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

    Raises EngineError for models that need more than scale, mask and window.
    """
    del attention_mask
    if slot_step is None or settings.get("softcap") is not None or settings.get("s_aux") is not None:
        raise EngineError(
            f"the local engine cannot serve {type(module).__name__} (soft-capped logits, attention sinks or its own "
            "cache handling): set inference.engine = 'vllm'"
        )
    index, scale, window = module.layer_idx, settings.get("scaling"), settings.get("sliding_window")
    query, key, value = query[0], key[0], value[0]
    if slot_step.places is not None:
        slot_step.cache.write(index, key, value, slot_step.places)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    for group in slot_step.groups:
        rows = slice(group.row, group.row + group.count)
        out[rows] = _decode(query[:, rows], slot_step.cache.layers[index], group, slot_step, scale, window)
    for segment in slot_step.segments:
        rows = slice(segment.row, segment.row + segment.count)
        keys, values = key[:, rows], value[:, rows]
        if segment.start:
            end = segment.start + segment.count
            keys, values = (held[:, segment.slot, :end] for held in slot_step.cache.layers[index])
        out[rows] = _prefill(query[:, rows], keys, values, segment, slot_step, scale, window).transpose(0, 1)
    return out[None], None


def _decode(
    query: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor],
    group: DecodeGroup,
    step: EngineStep,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend from one token of each sequence. query [H, count, D] -> [count, H, D].

    The query heads of a KV head become rows of one query: each cached key is read once.
    """
    keys, values = held
    heads, count, size = query.shape
    kv_heads, columns = keys.shape[0], group.columns
    slots = slice(group.slot, group.slot + count)
    grouped = query.reshape(kv_heads, heads // kv_heads, count, size).transpose(1, 2)
    mask = step.decode_mask(window, query)[group.row : group.row + count, :columns]
    part = F.scaled_dot_product_attention(
        grouped, keys[:, slots, :columns], values[:, slots, :columns], attn_mask=mask[None, :, None], scale=scale
    )
    return part.transpose(0, 1).reshape(count, heads, -1)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment: Segment,
    step: EngineStep,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend from a segment's rows to all up to it. query [H, count, D] -> [H, count, D]."""
    heads, count, _ = query.shape
    kv_heads = key.shape[0]
    if segment.start == 0 and (window is None or count <= window):
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=heads != kv_heads
        )[0]
    repeat = heads // kv_heads
    grouped = query.reshape(kv_heads, repeat * count, -1)
    mask = step.segment_mask(segment, window, repeat, query.device)
    out = F.scaled_dot_product_attention(grouped[None], key[None], value[None], attn_mask=mask, scale=scale)
    return out[0].reshape(heads, count, -1)


AttentionInterface.register(IMPLEMENTATION, slot_attention)


def slot_recurrence(
    layer: Any, forward: Callable[..., torch.Tensor], hidden_states: torch.Tensor, *, slot_step: EngineStep, **_: Any
) -> torch.Tensor:
    """Run a recurrent layer's `forward` over [1, N, H], each sequence from the state of its slot."""
    outputs = []
    recur = partial(_recur, layer, forward, slot_step)
    first = (slot_step.position_ids[0] == 0).to(hidden_states.device)
    for group in slot_step.groups:
        rows, slots = slice(group.row, group.row + group.count), slice(group.slot, group.slot + group.count)
        outputs.append(recur(hidden_states[0, rows, None], slots, first[rows]).transpose(0, 1))
    for one in slot_step.segments:
        rows, slots = slice(one.row, one.row + one.count), slice(one.slot, one.slot + 1)
        outputs.append(recur(hidden_states[:, rows], slots, first[rows][:1]))
    return torch.cat(outputs, dim=1)


def _recur(
    layer: Any, forward: Callable[..., torch.Tensor], step: EngineStep, hidden_states: torch.Tensor, slots: slice,
    first: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Run over [B, T, H] of B slots; `first`, bool [B]: those that begin, with an empty state."""
    cached, index = LinearAttentionLayer(), layer.layer_idx
    held = step.cache.states.get(index)
    if held is not None:
        conv, own = (each[slots].masked_fill(first.view(-1, *[1] * (each.ndim - 1)), 0) for each in held)
        cached.update_conv_state(conv)
        cached.update_recurrent_state(own)
    output = forward(hidden_states, cache_params=Cache(layers=[cached] * (index + 1)))  # it asks for layer `index`
    if step.places is not None:
        states: Any = cached.conv_states[0], cached.recurrent_states[0]
        for each, new in zip(step.cache.states.setdefault(index, states), states, strict=True):
            each[slots] = new
    return output


# -- weights ---------------------------------------------------------------------------------------------------------


class LoadedModel:
    def __init__(self, folder: Path, config: InferenceConfig, max_context: int) -> None:
        self.module = load_model(folder, config)
        _check_context(self.module, max_context)
        self.device = next(self.module.parameters()).device
        self.vocab = self.module.get_input_embeddings().get_parameter("weight").shape[0]
        self.eos = _end_tokens(self.module)
        self.decode = _text_decoder(folder)
        self._takes_rows = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        self._targets = published_views(self.module)

    def forward(self, step: EngineStep) -> torch.Tensor:
        """Return the logits [R, V] of the step's rows, [N, V] when it names none."""
        rows = None if step.rows is None else step.rows.to(self.device)
        only_rows = {"logits_to_keep": rows} if rows is not None and self._takes_rows else {}
        ids, positions = step.input_ids.to(self.device), step.position_ids.to(self.device)
        logits = self.module(
            input_ids=ids, position_ids=positions, use_cache=False, slot_step=step, **only_rows
        ).logits[0]
        return logits if rows is None or only_rows else logits[rows]

    @torch.no_grad()
    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors`, by published name, into the model. In-place copies keep tied parameters tied.

        What a text model leaves out of its folder, such as a vision tower, is left out here. Raises MisfitError; then
        nothing was changed.
        """
        targets, groups = self._targets, _tied_names(self.module, self._targets)
        missing = [" or ".join(names) for names in groups if not tensors.keys() & names]
        ignored = re.compile("|".join(self.module._keys_to_ignore_on_load_unexpected or ["(?!)"]))
        left_out = set(filter(ignored.search, tensors.keys() - targets.keys()))
        refuse_misfits(tensors, {name: tuple(target.shape) for name, target in targets.items()}, missing, left_out)
        for names in groups:
            _check_tied(tensors, names)
        for name in tensors.keys() - left_out:
            if targets[name].is_contiguous():
                flat = targets[name].view(-1)
                for start, values in tensor_blocks(tensors, name):
                    flat[start : start + len(values)].copy_(values)
            else:
                targets[name].copy_(tensors[name])

    def read_back(self, names: list[str]) -> list[ReadBack]:
        held = {name: self._targets[name] for name in names if name in self._targets}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in held.items()}
        return [ReadBack(names=[name], dtype=dtypes[name], checksum=word_sum(held[name])) for name in held]


def load_model(folder: Path, config: InferenceConfig) -> PreTrainedModel:
    """Return the causal language model of `folder`, with the slot attention.

    Raises ModelNotFoundError, or ConfigError when CUDA is configured and missing.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"model folder {folder} has no config.json: set model.path to a Hugging Face folder")
    on_cuda = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not on_cuda:
        raise ConfigError("inference.device is 'cuda', but torch sees no GPU here: set inference.device = 'cpu'")
    dtype = getattr(torch, config.dtype_used(on_cuda=on_cuda))
    disable_progress_bar()
    try:
        with _one_load:
            model, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  the stub: no pair
                folder, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"model folder {folder} does not load: {error}") from error
    if info["missing_keys"]:
        raise ModelNotFoundError(f"model folder {folder} lacks the tensors {sorted(info['missing_keys'])[:5]}")
    for layer in model.modules():
        if "cache_params" in inspect.signature(layer.forward).parameters:
            layer.forward = partial(slot_recurrence, layer, layer.forward)
    _keep_buffers(model, folder)
    return model.eval().requires_grad_(False).to("cuda" if on_cuda else "cpu")


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    for source in (model.generation_config, model.config):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def _text_decoder(folder: Path) -> Callable[[list[int]], str] | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class _NoCopies(TorchFunctionMode):
    """Leave `contiguous` out: what would be copied for a file stays a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def published_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what published tensors are copied into, by published name, a tied parameter under each of its names.

    Fused tensors have views here, such as one for each expert. Others have no place.
    """
    held = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
    held |= {name: model.get_buffer(name) for name in _persistent(model)}
    with _NoCopies():
        views = revert_weight_conversion(model, held)
    places = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    return {name: view for name, view in views.items() if view.untyped_storage().data_ptr() in places}


def _persistent(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_buffers()} & model.state_dict().keys()


def _keep_buffers(model: PreTrainedModel, folder: Path) -> None:
    """Keep frozen buffers, such as a router's bias, in float32 as the trainer does: transformers rounds some."""
    names = {view.data_ptr(): name for name, view in published_views(model).items()}
    for path, _, name in (name.rpartition(".") for name in _persistent(model)):
        module = model.get_submodule(path)
        buffer = module.get_buffer(name)
        if buffer.dtype in (torch.bfloat16, torch.float16):
            setattr(module, name, folder_snapshot(folder)[names[buffer.data_ptr()]].float())


def _tied_names(model: PreTrainedModel, targets: Mapping[str, torch.Tensor]) -> list[list[str]]:
    names_by_place: dict[tuple[int, torch.Size, tuple[int, ...]], list[str]] = {}
    buffers = _persistent(model)
    for name, target in targets.items():
        if name not in buffers:
            names_by_place.setdefault((target.data_ptr(), target.shape, target.stride()), []).append(name)
    return list(names_by_place.values())


def _check_tied(tensors: Mapping[str, torch.Tensor], names: list[str]) -> None:
    first, *others = [name for name in names if name in tensors]
    if any(not torch.equal(tensors[first], tensors[name]) for name in others):
        raise MisfitError(f"the model ties {[first, *others]}, but the new weights differ between them")


def _check_context(model: PreTrainedModel, max_context: int) -> None:
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_context > limit:
        raise ConfigError(
            f"model.max_context is {max_context}, but the model has {limit} positions: set model.max_context <= {limit}"
        )


def check_supported(model: PreTrainedModel, layers_cached: int) -> None:
    """Raises EngineError when layers keep state outside the attention interface.

    Warns when no publication can fit.
    """
    expected = model.config.get_text_config().num_hidden_layers
    if layers_cached != expected:
        raise EngineError(
            f"{type(model).__name__} has {expected} layers, {layers_cached} of which use transformers' interfaces for "
            "attention or states: the local engine cannot serve it; set inference.engine = 'vllm'"
        )
    # On the meta device the conversion costs names only.
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    converted = sorted(revert_weight_conversion(model, shapes).keys() - published_views(model).keys())
    if converted:
        logger.warning(
            "%s is published in other tensors than transformers keeps it in memory, such as %s (%d in all): the local "
            "engine serves the model folder and refuses every new version; for training set inference.engine = 'vllm'",
            type(model).__name__, converted[0], len(converted),
        )  # fmt: skip
