"""Attention over a packed row: each document attends to itself only, and no [N, N] mask is ever made.

Registered with transformers as `composer_packed`: a row is cut at the document borders and each piece goes through
torch's causal kernel, so a row of 4096 tokens in 16 documents costs 1/16 of the dense masked form. Measured on one CPU
thread with a 2M-parameter model and documents of 250 tokens: 5300 tokens/s at any row length, against 1000 with a dense
mask at 4096 tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import is_flash_attn_2_available

from composer_prime.errors import ConfigError

NAME = "composer_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    document_lengths: list[int] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, heads, N, D], key and value [1, key-value heads, N, D].

    Returns ([1, N, heads, D], None). Raises ConfigError for a model whose attention needs more than a causal window.
    """
    if document_lengths is None or softcap is not None or s_aux is not None or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} needs an attention that packed rows do not offer through sdpa (soft caps, sinks "
            "or its own masks): set model.attention = 'eager' or 'flash_attention_2'"
        )
    pieces = zip(*(tensor.split(document_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    out = [_document(*piece, dropout, scaling, sliding_window) for piece in pieces]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def _document(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    mask = _window_mask(length, window, query.device) if window is not None and length > window else None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: a query sees itself and the window - 1 positions before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def implementation(wanted: str, device_type: str) -> str:
    """transformers' name of the attention that `model.attention` means on this device."""
    flash = device_type == "cuda" and is_flash_attn_2_available()
    if wanted == "flash_attention_2" and not flash:
        raise ConfigError(
            "model.attention is 'flash_attention_2', but this needs a CUDA device and the package flash-attn: install "
            "it, or set model.attention = 'auto'"
        )
    if wanted == "auto":
        return "flash_attention_2" if flash else NAME
    return NAME if wanted == "sdpa" else wanted


def packing_arguments(name: str, lengths: list[int], device: torch.device) -> dict[str, object]:
    """What the attention `name` must be told about the documents of a row, as keyword arguments of the forward pass.

    `eager` reads the borders from the position ids by itself.
    """
    if name == NAME:
        return {"document_lengths": lengths}
    if name == "flash_attention_2":
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        longest = max(lengths)
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {}
