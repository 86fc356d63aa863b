"""Attention over a packed row: each document attends to itself only, and no [N, N] mask is ever made.

Registered with transformers as `composer_packed`. A row is cut at the document borders, and each piece goes through
torch's causal kernel: a row of 4096 tokens in 16 documents costs 1/16 of the dense masked form. Documents with a common
beginning are branches of one tree (composer_prime/packing/prefixes.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import is_flash_attn_2_available

from composer_prime.errors import ConfigError
from composer_prime.packing.prefixes import Tree

PACKED = "composer_packed"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_name(setting: str, device_type: str) -> str:
    """Return transformers' name of the attention that `model.attention` means on this device.

    Raises ConfigError for flash_attention_2 where it is not to be had.
    """
    flash = device_type == "cuda" and is_flash_attn_2_available()
    if setting == "flash_attention_2" and not flash:
        raise ConfigError(
            "model.attention is 'flash_attention_2', but this needs a CUDA device and the package flash-attn: install "
            "it, or set model.attention = 'auto'"
        )
    if setting == "auto":
        return "flash_attention_2" if flash else PACKED
    return PACKED if setting == "sdpa" else setting


def packing_arguments(name: str, trees: tuple[Tree, ...], device: torch.device) -> dict[str, object]:
    """Return the keyword arguments of the forward pass that tell the attention `name` how a row is packed.

    `eager` reads the borders from the position ids by itself. Only `composer_packed` can share prefixes.
    """
    if name == PACKED:
        return {"packed_trees": trees}
    if name == "flash_attention_2":
        lengths = [tree.tokens for tree in trees]
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        longest = max(lengths)
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_trees: tuple[Tree, ...] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend with transformers' signature: query [1, heads, N, D], key and value [1, key-value heads, N, D].

    Returns ([1, N, heads, D], None). Raises ConfigError for a model whose attention needs more than a causal window.
    """
    if packed_trees is None or softcap is not None or s_aux is not None or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} needs an attention that packed rows do not offer through sdpa (soft caps, sinks "
            "or its own masks): set model.attention = 'eager' or 'flash_attention_2'"
        )
    attend = partial(_attend, window=sliding_window, dropout=dropout, scaling=scaling)
    sizes = [tree.tokens for tree in packed_trees]
    pieces = zip(packed_trees, *(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [output for tree, q, k, v in pieces for output in _attend_tree(tree, q, k, v, attend)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)


def _attend_tree(
    tree: Tree, query: Tensor, key: Tensor, value: Tensor, attend: Attend, above: tuple[Tensor, Tensor] | None = None
) -> list[Tensor]:
    """Return the outputs of the tree's tokens in order: its run over `above` and itself, then each branch.

    query, key and value hold the tree's tokens; `above` the keys and values of the runs it hangs on.
    """
    sizes = [tree.run, *(branch.tokens for branch in tree.branches)]
    (q, *queries), (k, *keys), (v, *values) = (tensor.split(sizes, dim=2) for tensor in (query, key, value))
    if above is not None:
        k, v = torch.cat([above[0], k], dim=2), torch.cat([above[1], v], dim=2)
    outputs = [attend(q, k, v)]
    for branch, *piece in zip(tree.branches, queries, keys, values, strict=True):
        outputs += _attend_tree(branch, *piece, attend, (k, v))
    return outputs


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, dropout: float, scaling: float | None
) -> Tensor:
    """Attend causally from queries that are the last of the keys' positions."""
    length, context = query.shape[2], key.shape[2]
    plain = length == context and (window is None or length <= window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if plain else _causal_mask(length, context, window, query.device),
        is_causal=plain,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _causal_mask(length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [length, context]: the last `length` positions see at most `window` positions up to themselves."""
    position = torch.arange(context, device=device)
    distance = position[context - length :, None] - position[None, :]
    return (distance >= 0) & (distance < (window or context))
