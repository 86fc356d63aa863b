"""Element-wise work on a block of logits: what its rows tell, and its turning into its own gradient.

fused.py makes logits and multiplies. `LogitKernels` is what happens to each logit. It is written and tested twice:
here in torch, the reference, and in triton_kernels.py. choose_kernels.py takes one of them.
With x a row's logits as the head gives them (scaled and capped), T its temperature:

    statistics    x -> log p_y, H, Z      log p = x / T - Z,  Z = log sum exp(x / T),  H = -sum p log p
    gradient      x -> d loss / d (h W^T + b), in place, from what came back for log p_y and H

Logits of -inf have no probability and take no part in the entropy; NaN and +inf make the row's results NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.head.head import Head

_LOG_NOTHING = -1e4
"""exp of it is 0 in float64 too; a finite stand-in for the logarithm of 0."""


class RowStatistics(NamedTuple):
    """Of a block's rows, each [B], in the logits' type."""

    logprob_B: Tensor
    entropy_B: Tensor
    log_sum_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What turns the logits of B rows into a gradient."""

    targets_B: Tensor
    temperature_B: Tensor | None
    """None for 1."""
    log_sum_B: Tensor
    entropy_B: Tensor
    logprob_grad_B: Tensor
    entropy_grad_B: Tensor | None
    taught_BV: Tensor | None
    """The divergence's gradient in x / T; None for rows without a teacher."""


class LogitKernels(Protocol):
    """Two passes over logits_BV, [B, V] with B >= 1, float32 or float64, whose rows are contiguous."""

    name: str

    def statistics(
        self, logits_BV: Tensor, targets_B: Tensor, temperature_B: Tensor | None, *, spent: bool
    ) -> RowStatistics:
        """`targets_B` int64 [B], `temperature_B` float [B] or None for 1; a `spent` block may be written over."""
        ...

    def gradient(self, logits_BV: Tensor, incoming: Incoming, head: Head) -> None:
        """Written over x. In x / T: d log p_y = [j = y] - p_j, dH = -p_j (log p_j + H), and `taught_BV`."""
        ...


class TorchLogitKernels:
    """Any device; a block's size of memory on top."""

    name = "torch"

    def statistics(
        self, logits_BV: Tensor, targets_B: Tensor, temperature_B: Tensor | None, *, spent: bool
    ) -> RowStatistics:
        if temperature_B is not None:
            logits_BV = torch.div(logits_BV, temperature_B[:, None], out=logits_BV if spent else None)
            spent = True
        largest_B1 = logits_BV.amax(-1, keepdim=True)
        shifted_BV = torch.sub(logits_BV, largest_B1, out=logits_BV if spent else None)
        weights_BV = shifted_BV.exp()
        sum_B = weights_BV.sum(-1)
        log_sum_B = sum_B.log()
        moment_B = weights_BV.mul_(shifted_BV).nansum(-1)  # 0 * -inf counts for nothing; of NaN logits the sum tells
        return RowStatistics(
            logprob_B=shifted_BV.gather(1, targets_B[:, None]).squeeze(1) - log_sum_B,
            entropy_B=log_sum_B - moment_B / sum_B,
            log_sum_B=log_sum_B + largest_B1.squeeze(1),
        )

    def gradient(self, logits_BV: Tensor, incoming: Incoming, head: Head) -> None:
        slope = _slope(logits_BV, incoming.temperature_B, head)
        if incoming.temperature_B is not None:
            logits_BV.div_(incoming.temperature_B[:, None])
        logits_BV -= incoming.log_sum_B[:, None]
        coming_B1 = incoming.logprob_grad_B[:, None]
        if incoming.entropy_grad_B is None:
            logits_BV.exp_().mul_(-coming_B1)
        else:
            weights_BV = logits_BV.exp()
            logits_BV.clamp_(min=_LOG_NOTHING).add_(incoming.entropy_B[:, None])
            logits_BV.mul_(-incoming.entropy_grad_B[:, None]).sub_(coming_B1).mul_(weights_BV)
        logits_BV.scatter_add_(1, incoming.targets_B[:, None], coming_B1)
        if incoming.taught_BV is not None:
            logits_BV += incoming.taught_BV
        if slope is not None:
            logits_BV *= slope


def _slope(logits_BV: Tensor, temperature_B: Tensor | None, head: Head) -> Tensor | float | None:
    """What the gradient of x / T is multiplied with to be that of h W^T + b; None for 1."""
    slope: Tensor | float | None = None if head.scale == 1.0 else head.scale
    if head.cap is not None:  # d tanh(x) = 1 - tanh(x)^2
        slope = (slope or 1.0) * (1.0 - (logits_BV / head.cap).square())
    if temperature_B is not None:
        slope = (1.0 if slope is None else slope) / temperature_B[:, None]
    return slope


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums and statistics are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
