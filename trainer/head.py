"""From hidden states to each trained token's log-probability and entropy.

Only positions that predict a trained token come here, and they pass in chunks whose logits are recomputed in the
backward pass when they would be large: [T, V] float32 is never held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_BUDGET = 1 << 24
"""Logits (elements) that may be alive at a time; 64 MiB in float32."""

Logits = Callable[[Tensor], Tensor]
"""Hidden states [T, H] to logits [T, V] at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    logprobs_T: Tensor
    """float32 [T], with gradient."""
    entropy_T: Tensor
    """float32 [T], detached; nats."""


def token_statistics(
    hidden_T: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor | None,
    logits: Logits,
    vocabulary: int,
    budget: int = LOGITS_BUDGET,
) -> TokenStatistics:
    """Statistics of `targets_T` int64 [T] under softmax(logits(hidden_T) / temperature_T).

    hidden_T is [T, H]; temperature_T float32 [T] or None for 1. T may be 0: the results then hang on the graph, empty.
    """
    chunk = max(1, budget // vocabulary)
    if hidden_T.shape[0] <= chunk:
        logprobs_T, entropy_T = _chunk(hidden_T, targets_T, temperature_T, logits)
        return TokenStatistics(logprobs_T=logprobs_T, entropy_T=entropy_T)
    temperatures = [None] * -(-hidden_T.shape[0] // chunk) if temperature_T is None else temperature_T.split(chunk)
    pieces = [
        checkpoint(_chunk, *piece, logits, use_reentrant=False, preserve_rng_state=False)
        for piece in zip(hidden_T.split(chunk), targets_T.split(chunk), temperatures, strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return TokenStatistics(logprobs_T=torch.cat(logprobs), entropy_T=torch.cat(entropies))


def _chunk(
    hidden_T: Tensor, targets_T: Tensor, temperature_T: Tensor | None, logits: Logits
) -> tuple[Tensor, Tensor]:
    scores_TV = logits(hidden_T).float()
    if temperature_T is not None:
        scores_TV = scores_TV / temperature_T[:, None]
    logprobs_TV = F.log_softmax(scores_TV, dim=-1)
    with torch.no_grad():
        entropy_T = torch.special.entr(logprobs_TV.exp()).sum(-1)
    return -F.nll_loss(logprobs_TV, targets_T, reduction="none"), entropy_T
