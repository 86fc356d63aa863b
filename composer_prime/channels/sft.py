"""SFT: cross entropy on the assistant tokens of recorded conversations (demonstrations).

    L = -1/E sum_t log pi(a_t | everything before it)

E counts the demonstrated tokens of the whole step, over all ranks and micro-batches. This is TRL's SFTTrainer with
assistant_only_loss, whose mean is over the tokens of a step too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer_prime.channels.tokens import Sums
from composer_prime.wire.types import StepTotals


def sft_loss(logprobs_E: Tensor, totals: StepTotals) -> tuple[Tensor, Sums]:
    """Return this micro-batch's share of the loss (scalar, before its weight) and its metric sums.

    `logprobs_E`: float [E], with gradient, at temperature 1; E may be 0. Without tokens the loss is a zero that is
    attached to the graph.
    """
    nll = -logprobs_E.sum()
    tokens = torch.full_like(nll.detach(), float(logprobs_E.numel()))
    return nll / max(totals.demonstrated_tokens, 1), {"tokens": tokens, "nll": nll.detach()}


def sft_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics: sft/tokens always, sft/nll (nats a token) only with tokens."""
    count = sums["tokens"]
    return {"sft/tokens": count} | ({"sft/nll": sums["nll"] / count} if count else {})
