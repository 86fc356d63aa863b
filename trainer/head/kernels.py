"""The element-wise work on a block of logits: its row statistics, and its gradient in place.

fused.py makes the logits and multiplies the matrices. With x a row's logits as the head gives them (scaled and capped)
and T its temperature:

    statistics    x -> log p_y, H, Z      log p = x / T - Z,  Z = log sum exp(x / T),  H = -sum p log p
    gradient      x -> d loss / d (h W^T + b), in place, from the gradients of log p_y and H

A logit of -inf has probability 0 and does not enter the entropy. NaN or +inf makes the row's results NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_LOG_ZERO = -1e4
"""A finite stand-in for log 0; its exp is 0 in float64 too."""


class RowStatistics(NamedTuple):
    """Statistics of a block's rows, each [B], in the logits' type."""

    logprob_B: Tensor
    entropy_B: Tensor
    log_sum_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientInputs:
    """What turns the logits of B rows into their gradient."""

    targets_B: Tensor
    temperature_B: Tensor | None
    """None for 1."""
    log_sum_B: Tensor
    entropy_B: Tensor
    logprob_grad_B: Tensor
    entropy_grad_B: Tensor | None
    divergence_grad_BV: Tensor | None
    """The divergence's gradient in x / T; None for rows without a teacher."""
    scale: float
    """The head's, as is `cap`."""
    cap: float | None


def row_statistics(
    logits_BV: Tensor, targets_B: Tensor, temperature_B: Tensor | None, *, overwrite: bool
) -> RowStatistics:
    """Return the statistics of B >= 1 rows of float32 or float64 logits.

    `targets_B` is int64 [B], `temperature_B` float [B] or None for 1. `overwrite` allows to reuse the block; else one
    more is made.
    """
    if temperature_B is not None:
        logits_BV = torch.div(logits_BV, temperature_B[:, None], out=logits_BV if overwrite else None)
        overwrite = True
    largest_B1 = logits_BV.amax(-1, keepdim=True)
    shifted_BV = torch.sub(logits_BV, largest_B1, out=logits_BV if overwrite else None)
    weights_BV = shifted_BV.exp()
    sum_B = weights_BV.sum(-1)
    log_sum_B = sum_B.log()
    moment_B = weights_BV.mul_(shifted_BV).nansum(-1)  # drops 0 * -inf; NaN logits already show in the sum
    return RowStatistics(
        logprob_B=shifted_BV.gather(1, targets_B[:, None]).squeeze(1) - log_sum_B,
        entropy_B=log_sum_B - moment_B / sum_B,
        log_sum_B=log_sum_B + largest_B1.squeeze(1),
    )


def turn_into_gradient(logits_BV: Tensor, inputs: GradientInputs) -> None:
    """Replace x by its gradient. In x / T: d log p_y = [j = y] - p_j, dH = -p_j (log p_j + H)."""
    slope = _slope(logits_BV, inputs)
    if inputs.temperature_B is not None:
        logits_BV.div_(inputs.temperature_B[:, None])
    logits_BV -= inputs.log_sum_B[:, None]
    logprob_grad_B1 = inputs.logprob_grad_B[:, None]
    if inputs.entropy_grad_B is None:
        logits_BV.exp_().mul_(-logprob_grad_B1)
    else:
        weights_BV = logits_BV.exp()
        logits_BV.clamp_(min=_LOG_ZERO).add_(inputs.entropy_B[:, None])
        logits_BV.mul_(-inputs.entropy_grad_B[:, None]).sub_(logprob_grad_B1).mul_(weights_BV)
    logits_BV.scatter_add_(1, inputs.targets_B[:, None], logprob_grad_B1)
    if inputs.divergence_grad_BV is not None:
        logits_BV += inputs.divergence_grad_BV
    if slope is not None:
        logits_BV *= slope


def _slope(logits_BV: Tensor, inputs: GradientInputs) -> Tensor | float | None:
    """Return d(x / T) / d(h W^T + b); None for 1."""
    slope: Tensor | float | None = None if inputs.scale == 1.0 else inputs.scale
    if inputs.cap is not None:  # d tanh(x) = 1 - tanh(x)^2
        slope = (slope or 1.0) * (1.0 - (logits_BV / inputs.cap).square())
    if inputs.temperature_B is not None:
        slope = (1.0 if slope is None else slope) / inputs.temperature_B[:, None]
    return slope


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
