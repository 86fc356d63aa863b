"""The policy as one module, its attention over packed rows, and the other weights that a step reads.

The head runs inside this module's forward, so FSDP gathers its root group (embeddings, last norm, head) once for it.

Each document attends to itself only: a row is cut at the document borders, and no [N, N] mask is ever made.
Documents with a common beginning are branches of one tree (composer_prime/packing/pack.py).
How a branch sees the runs above it:

    CPU                  one call without a mask for all that hangs on a run, merged by log-sum-exp
    CUDA                 keys of the runs above and its own, end to end, with torch's lower-right causal bias
    flash_attention_2    the same keys as a sequence of its own, longer than the queries'
    windows, dropout     blocks of queries, each with a mask over the keys it can see

Recurrent layers (linear attention, Mamba) start anew at each document, and share no beginnings.

`SelfTeacher` reads under other weights before a step trains. A teacher (SDPO, arXiv 2601.20802) is the policy itself
(`live`), the start (`frozen`), or `ema`: theta_T += rate * (theta - theta_T) after each step.
The reference of the KL penalty is the start or an average; the start scores pairs.
Every pass gathers parameters from all ranks, so the ranks first agree on what is read.

No second model is built: a set of weights is exchanged with the policy's shards, read, and exchanged back,
to the last bit. No backward pass may be under way meanwhile.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import graph
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import is_flash_attn_2_available

from composer_prime.channels import replay_dpo
from composer_prime.channels.policy import PolicyTerm
from composer_prime.channels.sdpo import divergence
from composer_prime.config.channels import AVERAGES, ChannelsConfig, weight_sets
from composer_prime.errors import ConfigError, NonFiniteError
from composer_prime.packing.pack import Tree
from diloco.fragments import local_shard
from trainer.data import PackedRow, Reading, Sides, reading_of
from trainer.head import Head, HeadTeacher, TokenStatistics, head_of, likeliest, token_statistics
from trainer.model.context import by_heads, whole_rows
from trainer.world import gather_texts, gather_words

logger = logging.getLogger(__name__)

FORWARD_METHODS = ("states", "scores", "grades", "head")
"""Methods besides `forward` that compute with gathered parameters."""
PACKED = "composer_packed"
FLASH = "flash_attention_2"
SHARING = (PACKED, FLASH)
"""The attentions that can compute a common beginning of documents once."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Policy(nn.Module):
    """A Hugging Face causal language model as the trainer sees it; its parameters keep their names below `lm.`."""

    def __init__(
        self,
        lm: PreTrainedModel,
        attention: str,
        *,
        adapted: bool = False,
        offloads: bool = False,
        context: DeviceMesh | None = None,
    ) -> None:
        """`attention` is transformers' name; `adapted`: `lm` carries low-rank adapters.

        `offloads`: what the backward pass needs waits on the host; with checkpointing, that is each block's input.
        The ranks of `context`, if any, share each row; all of them make every call.
        """
        super().__init__()
        self.lm = lm
        self.attention = attention
        self.adapted = adapted
        recurrent = recurrent_layers(lm)
        self.is_recurrent = bool(recurrent)
        for layer in recurrent:
            layer.forward = partial(_restart, layer.forward)
        self._saved = partial(graph.save_on_cpu, pin_memory=True) if offloads else nullcontext
        self.context = context

    @property
    def leads(self) -> bool:
        """Tell whether this rank counts its rows; the others of its context group hold the same."""
        return self.context is None or self.context.get_local_rank() == 0

    @property
    def shares_prefixes(self) -> bool:
        """Tell whether this model can compute a common beginning of documents once."""
        return self.attention in SHARING and not self.is_recurrent

    @property
    def vocabulary(self) -> int:
        return self.lm.config.get_text_config().vocab_size

    def forward(self, row: PackedRow, teacher: HeadTeacher | None = None) -> TokenStatistics:
        """Return statistics of the row's R wanted tokens, the last D of them beside their teacher."""
        hidden_RH, head = self._hidden(row), head_of(self.lm)
        temperature_R = None if row.temperature_R is None else row.own(row.temperature_R)
        statistics = token_statistics(head, hidden_RH, row.own(row.targets_R), temperature_R, teacher)
        wanted = {"R": len(row.source_R), "D": sum(len(each.source_R) for each in row.taught)}
        named = {each.name: getattr(statistics, each.name) for each in dataclasses.fields(statistics)}
        filled = {name: values for name, values in named.items() if values is not None}
        return TokenStatistics(**{name: self._whole(each, row, wanted[name[-1]]) for name, each in filled.items()})

    def states(self, reading: Reading) -> Tensor:
        """Return the hidden states [R, H] that predict the reading's wanted tokens."""
        return self._whole(self._hidden(reading), reading)

    def scores(self, reading: Reading, targets_R: Tensor) -> Tensor:
        """Return the log-probabilities [R] of `targets_R` at the reading's wanted places, at temperature 1."""
        statistics = token_statistics(head_of(self.lm), self._hidden(reading), reading.own(targets_R))
        return self._whole(statistics.logprobs_R, reading)

    @torch.no_grad()
    def grades(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Return each wanted token's log-probability [R], and whether it is the likeliest, bool [R]."""
        hidden_RH, head, targets_R = self._hidden(row), head_of(self.lm), row.own(row.targets_R)
        logprobs_R = token_statistics(head, hidden_RH, targets_R).logprobs_R
        hits_R = (likeliest(head, hidden_RH) == targets_R).int()
        return self._whole(logprobs_R, row), self._whole(hits_R, row).bool()

    def head(self) -> Head:
        """Return a copy of the output layer as it is now."""
        return head_of(self.lm).copied()

    def _hidden(self, reading: Reading) -> Tensor:
        """Return the hidden states that predict the wanted tokens, [R, H]; of a shared row this rank's own."""
        borders = {"packed_trees": SimpleNamespace(trees=reading.trees)} if self.is_recurrent else {}
        shared = {} if self.context is None else {"packed_context": self.context}
        with self._saved():
            output = self.lm.base_model(
                input_ids=reading.input_ids,
                position_ids=reading.position_ids,
                attention_mask=self._masks(reading) if self.attention == "eager" else None,
                use_cache=False,
                **borders | shared | packing_arguments(self.attention, reading.trees, reading.input_ids.device),
            )
        return output.last_hidden_state[0][reading.own(reading.source_R) - reading.first]

    def _whole(self, own: Tensor, reading: Reading, last: int | None = None) -> Tensor:
        """Return the values of all R wanted tokens, or of the `last`, of which this rank gives its own.

        A collective of the context group, if there is one.
        """
        if self.context is None or reading.own_R is None:
            return own
        before = 0 if last is None else len(reading.source_R) - last
        places = reading.own_R[len(reading.own_R) - len(own) :] - before
        return whole_rows(own, places, len(reading.source_R) - before, self.context)

    def _masks(self, reading: Reading) -> Tensor | dict[str, Tensor] | None:
        """Return eager masks, [1, 1, N, N] a kind of layer: gpt-oss drops the position ids."""
        weight = self.lm.get_input_embeddings().get_parameter("weight")
        return create_masks_for_generate(
            config=self.lm.config,
            inputs_embeds=weight.new_empty(1, reading.input_ids.shape[1], 1),
            attention_mask=None,
            past_key_values=None,
            position_ids=reading.position_ids,
        )


def recurrent_layers(lm: nn.Module) -> list[nn.Module]:
    """Return the layers whose state runs along a row: to these transformers hands a cache as `cache_params`."""
    asked = {"hidden_states", "cache_params"}
    return [layer for layer in lm.modules() if asked <= inspect.signature(layer.forward).parameters.keys()]


def _restart(
    forward: Callable[..., Tensor], hidden_states: Tensor, *, packed_trees: Any = None, **options: Any
) -> Tensor:
    """Run a recurrent layer's `forward` over each document of `hidden_states` [1, N, H] alone."""
    if packed_trees is None:
        return forward(hidden_states, **options)
    documents = hidden_states.split([tree.tokens for tree in packed_trees.trees], dim=1)
    return torch.cat([forward(document) for document in documents], dim=1)


def attention_name(setting: str, device_type: str, compute_dtype: torch.dtype) -> str:
    """Return transformers' name of the attention that `model.attention` means on this device.

    Raises ConfigError for flash_attention_2 where it is not to be had; the configuration refuses it in float32.
    """
    flash = device_type == "cuda" and is_flash_attn_2_available()
    if setting == FLASH and not flash:
        raise ConfigError(
            "model.attention is 'flash_attention_2', but this needs a CUDA device and the package flash-attn: "
            "install it, or set model.attention = 'auto'"
        )
    if setting == "auto":
        return FLASH if flash and compute_dtype in (torch.bfloat16, torch.float16) else PACKED
    return PACKED if setting == "sdpa" else setting


def packing_arguments(name: str, trees: tuple[Tree, ...], device: torch.device) -> dict[str, object]:
    """Return the keyword arguments of the forward pass that tell the attention `name` how a row is packed.

    `eager` has masks of its own instead, and cannot share prefixes.
    """
    if name == PACKED:
        return {"packed_trees": SimpleNamespace(trees=trees)}  # A compiled block would depend on the length of a tuple.
    if name != FLASH:
        return {}
    queries, keys = _runs(trees)
    lengths = {"q": [len(run) for run in queries], "k": [len(run) for run in keys]}
    arguments: dict[str, object] = {f"max_length_{side}": max(counts) for side, counts in lengths.items()}
    for side, counts in lengths.items():
        ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        arguments[f"cu_seq_lens_{side}"] = ends.to(device)
    if any(tree.branches for tree in trees):
        arguments["packed_keys"] = torch.from_numpy(np.concatenate(keys)).to(device)
    return arguments


def _runs(trees: tuple[Tree, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the tokens of each run, and those it sees, also of runs above. int64 indices."""
    queries: list[np.ndarray] = []
    keys: list[np.ndarray] = []

    def visit(tree: Tree, above: np.ndarray) -> None:
        start = queries[-1][-1] + 1 if queries else 0
        queries.append(np.arange(start, start + tree.run))
        keys.append(np.concatenate([above, queries[-1]]))
        seen = keys[-1]
        for branch in tree.branches:
            visit(branch, seen)

    for tree in trees:
        visit(tree, np.zeros(0, dtype=np.int64))
    return queries, keys


def flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_keys: Tensor | None = None,
    packed_trees: object = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend; `packed_keys`, int64 [K], are the tokens that each run sees, run by run. None: its own.

    transformers' flash attention aligns causal sequences of unequal lengths at their ends.
    """
    if packed_keys is not None:
        key, value = key.index_select(2, packed_keys), value.index_select(2, packed_keys)
    return flash_attention_forward(module, query, key, value, *args, **options)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_trees: SimpleNamespace | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with transformers' signature: query [1, heads, N, D], key and value [1, key-value heads, N, D].

    Of transformers' `options` it follows dropout, scaling and sliding_window. Return ([1, N, heads, D], None). Raises
    ConfigError for a model whose attention needs more than a causal window.
    """
    has_sinks, has_cap = options.get("s_aux") is not None, options.get("softcap") is not None
    if packed_trees is None or has_cap or has_sinks or attention_mask is not None:
        flash = "" if has_sinks else " or 'flash_attention_2'"
        raise ConfigError(
            f"{type(module).__name__} needs an attention that packed rows do not offer through sdpa "
            f"(soft caps, sinks or its own masks): set model.attention = 'eager'{flash}"
        )
    dropout, scaling = options.get("dropout", 0.0), options.get("scaling")
    sliding_window = options.get("sliding_window")
    outputs: list[Tensor] = []
    sizes = [tree.tokens for tree in packed_trees.trees]
    splits = (each.split(sizes, dim=2) for each in (query, key, value))
    for tree, q, k, v in zip(packed_trees.trees, *splits, strict=True):
        window = None if sliding_window is None or tree.longest <= sliding_window else sliding_window
        plain = window is None and dropout == 0.0 and query.shape[3] == value.shape[3]
        if tree.branches and plain and query.device.type == "cpu":
            outputs.append(_TreeAttention.apply(q, k, v, tree, scaling))
            continue
        attend = partial(_attend, window=window, dropout=dropout, scaling=scaling)
        outputs += _attend_tree(tree, q, k, v, attend)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


ATTENTION = {PACKED: by_heads(packed_attention), FLASH: by_heads(flash_attention)}
"""By transformers' name."""
for _name, _attend_rows in ATTENTION.items():
    AttentionInterface.register(_name, _attend_rows)
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)


class _TreeAttention(torch.autograd.Function):
    """Attention over a tree that forks, on a CPU: no run is read twice and nothing is as large as its token pairs.

    All tokens below a run attend to it in one call without a mask, and each run to itself causally.
    The parts are merged: with out_i = sum_j exp(s_j - lse_i) v_j over the keys j of part i,

        lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

    A part's probabilities in the whole are exp(s_j - lse), and the softmax's gradient needs out only through
    sum(grad * out): given the merged out and lse, the kernel's backward pass gives a part's exact share.
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float | None) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        heads, tokens = query.shape[1], query.shape[2]
        out = query.new_empty(1, tokens, heads, value.shape[3], dtype=exact).transpose(1, 2)
        lse = query.new_empty(1, tokens, heads, dtype=exact).transpose(1, 2)
        for below, run, is_causal in _parts(tree):
            part, part_lse = _FLASH(query[:, :, below], key[:, :, run], value[:, :, run], 0.0, is_causal, scale=scale)
            if is_causal:
                out[:, :, below], lse[:, :, below] = part, part_lse
                continue
            share = torch.sigmoid(part_lse - lse[:, :, below])
            out[:, :, below].lerp_(part.to(exact), share[..., None])
            lse[:, :, below] = torch.logaddexp(lse[:, :, below], part_lse)
        ctx.tree, ctx.scale = tree, scale
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        sums = [torch.empty_like(each, dtype=lse.dtype) for each in (query, key, value)]
        for below, run, is_causal in _parts(ctx.tree):
            at = (below, run, run)
            inputs = [each[:, :, where] for each, where in zip((query, key, value), at, strict=True)]
            of_part = (each[:, :, below] for each in (grad, out, lse))
            grads = _FLASH_BACKWARD(next(of_part), *inputs, *of_part, 0.0, is_causal, scale=ctx.scale)
            for total, where, part in zip(sums, at, grads, strict=True):
                if is_causal:
                    total[:, :, where] = part
                else:
                    total[:, :, where] += part
        return *(each.to(query.dtype) for each in sums), None, None


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The CPU's scaled_dot_product_attention; called directly it returns the log-sum-exp too."""
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _parts(tree: Tree) -> list[tuple[slice, slice, bool]]:
    """Return (queries, keys, causal) of each call: every run over itself, then below each fork."""
    runs, forks = [], []

    def visit(tree: Tree, start: int) -> None:
        end = start + tree.run
        runs.append((slice(start, end), slice(start, end), True))
        if tree.branches:
            forks.append((slice(end, start + tree.tokens), slice(start, end), False))
        for branch in tree.branches:
            visit(branch, end)
            end += branch.tokens

    visit(tree, 0)
    return runs + forks


def _attend_tree(
    tree: Tree, query: Tensor, key: Tensor, value: Tensor, attend: Attend, above: tuple[Tensor, Tensor] | None = None
) -> list[Tensor]:
    """Return the outputs in order. `above`: keys and values of the runs the tree hangs on."""
    sizes = [tree.run, *(branch.tokens for branch in tree.branches)]
    (q, *queries), (k, *keys), (v, *values) = (tensor.split(sizes, dim=2) for tensor in (query, key, value))
    if above is not None:
        k, v = torch.cat([above[0], k], dim=2), torch.cat([above[1], v], dim=2)
    outputs = [attend(q, k, v)]
    for branch, *of_branch in zip(tree.branches, queries, keys, values, strict=True):
        outputs += _attend_tree(branch, *of_branch, attend=attend, above=(k, v))
    return outputs


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, dropout: float, scaling: float | None
) -> Tensor:
    """Attend causally from the last of the keys' positions; where that takes masks, in blocks."""
    if query.is_cuda and query.dtype == torch.float32:  # its memory-efficient kernel knows no grouped heads
        times = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
    grouped = query.shape[1] != key.shape[1]
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    length, context = query.shape[2], key.shape[2]
    binds = window is not None and context > window
    if length == context and not binds:
        return attend(query, key, value, is_causal=True)
    if query.is_cuda and not binds:
        with unset_fake_temporarily():  # the bias has no elements, but cannot be made among fake tensors
            bias = causal_lower_right(length, context)
        return attend(query, key, value, attn_mask=bias)
    blocks, width, reach = [], max(window or 0, _BLOCK), window or context
    for start in range(0, length, width):
        end = min(length, start + width)
        seen = slice(max(0, context - length + start + 1 - reach), context - length + end)
        mask = _window_mask(end - start, seen.stop - seen.start, reach, query.device)
        blocks.append(attend(query[:, :, start:end], key[:, :, seen], value[:, :, seen], attn_mask=mask))
    return torch.cat(blocks, dim=2)


_BLOCK = 512
"""Queries of a block; a window that is larger counts."""


def _window_mask(length: int, context: int, window: int, device: torch.device) -> Tensor:
    """Return bool [length, context]: the last positions see at most `window` up to themselves."""
    position = torch.arange(context, device=device)
    distance = position[context - length :, None] - position[None, :]
    return (distance >= 0) & (distance < window)


# -- other weights -----------------------------------------------------------------------------------------------------


_REFERENCE_RATE = 0.01
"""Share of the trained weights added at each step to the reference's average."""


@dataclass(slots=True, kw_only=True)
class AuxiliaryLogprobs:
    """What one row's loss needs of other weights."""

    teacher: HeadTeacher | None = None
    references: dict[str, Tensor] = field(default_factory=dict)
    """By term: the policy's float32 [T], for the KL penalty; replay_dpo's [2 P], each answer's sum."""


class SelfTeacher:
    """The other weights of a run, and the passes that read them."""

    def __init__(self, policy: Policy, channels: ChannelsConfig) -> None:
        """`policy` holds the start weights now."""
        self._policy = policy
        self._channels = channels
        self._sets = weight_sets(channels)
        self._cache = ReferenceLogprobs() if self._sets.scores_pairs else None
        self._averages = {name: WeightSnapshot(policy) for name in AVERAGES if name in self._sets.needed}
        self._rates = {"teacher": channels.sdpo.teacher.rate, "reference": _REFERENCE_RATE}
        self._swaps: dict[str, Callable[[], AbstractContextManager[None]]] = {
            name: average.swapped_in for name, average in self._averages.items()
        }
        if "frozen" in self._sets.needed:
            self._swaps["frozen"] = (
                partial(adapters_off, policy) if policy.adapted else WeightSnapshot(policy).swapped_in
            )
        self._swaps["live"] = nullcontext

    @torch.no_grad()
    def prepare(self, rows: Sequence[PackedRow]) -> list[AuxiliaryLogprobs]:
        """Read what `rows` need under every set of weights that is not the policy's. A collective."""
        results = [AuxiliaryLogprobs() for _ in rows]
        passes = self._teacher_passes(rows)
        uncached = self._uncached(rows)
        reads: dict[str, list[Callable[[], None]]] = {name: [] for name in self._swaps}
        if self._sets.reference is not None:
            reads[self._sets.reference].append(partial(self._read_reference, rows, results))
        if any(passes):
            reads[self._sets.teacher or "live"].append(partial(self._read_teacher, rows, passes, results))
        if self._cache is not None and uncached:
            reads["frozen"].append(partial(self._cache.compute, self._policy, uncached))
        self._policy.eval()
        try:
            for name in filter(reads.get, reads):
                with self._swaps[name]():
                    for read in reads[name]:
                        read()
        finally:
            self._policy.train()
        for row, result in zip(rows, results, strict=True):
            if self._cache is not None:
                references = self._cache.of(row.scored).to(row.input_ids.device, non_blocking=True)
                result.references[replay_dpo.NAME] = references
        return results

    def _uncached(self, rows: Sequence[PackedRow]) -> list[Sides]:
        """Return the pairs that any rank has to score. A collective."""
        scored = [row.scored for row in rows] if self._cache else []
        missing = self._cache.missing(scored) if self._cache else []
        return [pairs for pairs, is_missing in zip(scored, missing, strict=True) if is_missing]

    def follow(self) -> None:
        """Move the averages towards the new weights; called after each step."""
        for name, average in self._averages.items():
            average.follow(self._rates[name])

    def catch_up(self, steps: int) -> None:
        """Move the averages as far as `steps` steps would: other clusters took them, and the weights moved at once."""
        for name, average in self._averages.items():
            average.follow(1.0 - (1.0 - self._rates[name]) ** steps)

    def start_anew(self) -> None:
        """Begin the averages at the present weights: their past is another model's."""
        for average in self._averages.values():
            average.follow(1.0)

    def averages(self) -> dict[str, dict[str, Tensor]]:
        """Return the moving averages by name, for the checkpoint; loading writes into these tensors."""
        return {name: average.values for name, average in self._averages.items()}

    def begin(self, name: str) -> None:
        """Begin the average `name`, which the checkpoint lacks, at the policy's present weights."""
        logger.info("the checkpoint holds no moving average for the %s: it starts from the policy's weights", name)
        self._averages[name].follow(1.0)

    def _teacher_passes(self, rows: Sequence[PackedRow]) -> list[int]:
        """Return for each row how many teacher passes the rank with the most takes. A collective."""
        if self._channels.sdpo.weight == 0:
            return [0] * len(rows)
        of_ranks = gather_words([len(row.taught) for row in rows])
        return [max(counts) for counts in zip(*of_ranks, strict=True)]

    def _read_reference(self, rows: Sequence[PackedRow], results: Sequence[AuxiliaryLogprobs]) -> None:
        for row, result in zip(rows, results, strict=True):
            logprobs_R = self._policy(row).logprobs_R
            head_rows = row.terms[PolicyTerm.name].head_rows
            result.references[PolicyTerm.name] = logprobs_R if head_rows is None else logprobs_R[head_rows]

    def _read_teacher(self, rows: Sequence[PackedRow], passes: list[int], results: Sequence[AuxiliaryLogprobs]) -> None:
        """Read each row's teacher documents. A rank with fewer passes than another reads one token."""
        head, sdpo = self._policy.head(), self._channels.sdpo
        context = self._policy.context
        for row, count, result in zip(rows, passes, results, strict=True):
            idle = [reading_of([], [], row.input_ids.device, share=False, context=context)] * (count - len(row.taught))
            states = [self._policy.states(each) for each in (*row.taught, *idle)]
            if row.taught:
                hidden_DH = torch.cat(states)
                if row.own_R is not None:
                    own_D = row.own_R - (len(row.targets_R) - len(hidden_DH))
                    hidden_DH = hidden_DH[own_D[own_D >= 0]]
                result.teacher = HeadTeacher(
                    hidden_DH=hidden_DH,
                    head=head,
                    divergence=lambda student, teacher, targets: divergence(student, teacher, sdpo, targets),
                )


class ReferenceLogprobs:
    """The summed log-probabilities of pairs' answers under the frozen base: computed once, remembered on every rank.

    A key is the hash of a side's token ids with the answer's beginning. A resumed run computes its pairs' again.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def missing(self, rows: list[Sides]) -> list[bool]:
        """Return for each row whether any rank lacks a side. A collective; ranks bring equally many rows."""
        lacking = [int(any(key not in self._values for key in _keys(pairs))) for pairs in rows]
        return [any(flags) for flags in zip(*gather_words(lacking), strict=True)]

    def compute(self, policy: Policy, rows: list[Sides]) -> None:
        """Score the pairs of `rows`, with the base's weights in place. A collective; ranks bring equally many rows.

        Raises NonFiniteError when the base gives NaN or infinity.
        """
        computed: dict[str, float] = {}
        for pairs in rows:
            sums = _answer_logprobs(policy, pairs).tolist()
            computed |= zip(_keys(pairs), sums, strict=True)
        new = {key: value for key, value in computed.items() if key not in self._values}
        of_all_ranks: dict[str, float] = {}
        for text in gather_texts(json.dumps(new)):
            of_all_ranks |= json.loads(text)
        if not all(map(math.isfinite, of_all_ranks.values())):
            raise NonFiniteError(
                "the frozen base gives NaN or infinity as the log-probability of an answer in a preference "
                "pair; nothing was trained: look at model.path and the pairs"
            )
        self._values |= of_all_ranks

    def of(self, pairs: Sides) -> Tensor:
        """Return the answers' sums, float32 [2 P] on the CPU, in the order of the sides."""
        return torch.tensor([self._values[key] for key in _keys(pairs)], dtype=torch.float32)


def _keys(pairs: Sides) -> list[str]:
    raw = (f"{start} ".encode() + np.ascontiguousarray(ids, dtype="<i4").tobytes() for ids, start in pairs)
    return [hashlib.sha256(each).hexdigest() for each in raw]


def _answer_logprobs(policy: Policy, pairs: Sides) -> Tensor:
    """Return the answers' sums, float64 [2 P]. Without pairs read one token: ranks stay in step."""
    device = next(policy.parameters()).device
    wanted = [np.arange(start, len(ids)) for ids, start in pairs]
    answers = [ids[start:] for ids, start in pairs]
    targets = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *answers])).to(device)
    share, context = policy.shares_prefixes, policy.context
    reading = reading_of([ids for ids, _ in pairs], wanted, device, share=share, context=context)
    scores = policy.scores(reading, targets)
    lengths = np.array([len(answer) for answer in answers], dtype=np.int64)
    sides = torch.from_numpy(np.repeat(np.arange(len(answers)), lengths))
    return torch.zeros(len(answers), dtype=torch.float64).index_add(0, sides, scores.double().cpu())


class WeightSnapshot:
    """A second value for each trained parameter of `module`, at first the parameter's own; sharded alike, float32."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.values = {name: parameter.detach().clone() for name, parameter in _trained(module)}
        """By parameter name; checkpoints are loaded in place."""

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move by `rate` of the way towards the parameters, which is the moving average of a step; 1 takes them."""
        for name, parameter in _trained(self._module):
            local_shard(self.values[name]).lerp_(local_shard(parameter), rate)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the module compute with these values inside the block, and with its own again after it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self._module.modules():
            if isinstance(module, FSDPModule):  # else whole parameters of a forward pass stay in use
                module.reshard()
        for name, parameter in _trained(self._module):
            current, other = local_shard(parameter), local_shard(self.values[name])
            copy = current.clone()
            current.copy_(other)
            other.copy_(copy)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Scale the adapters of `module` to 0 inside the block: with adapters, the start weights are the base model.

    Switching them off through peft would change what is trained.
    """
    from peft.tuners.lora import LoraLayer  # peft takes seconds to import

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.scale_layer(0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.unscale_layer()


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return (named for named in module.named_parameters() if named[1].requires_grad)
