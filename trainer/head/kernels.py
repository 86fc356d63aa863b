"""The element-wise work on a block of logits: its row statistics, and its gradient in place.

fused.py makes the logits and multiplies the matrices. `LogitKernels` is what happens to each logit in between. There
are two implementations: torch, the reference, below, and triton_kernels.py. With x a row's logits as the head gives
them (scaled and capped) and T its temperature:

    statistics    x -> log p_y, H, Z      log p = x / T - Z,  Z = log sum exp(x / T),  H = -sum p log p
    gradient      x -> d loss / d (h W^T + b), in place, from the gradients of log p_y and H

A logit of -inf has probability 0 and does not enter the entropy. NaN or +inf makes the row's results NaN.

`choose_kernels` picks one of them by `trainer.head_kernels`:

    torch     everywhere
    triton    CUDA with triton installed, else ConfigError
    auto      torch on the CPU; on CUDA the faster of the two, timed once for each device, type and vocabulary on
              scratch logits of real size, after one run that compiles and warms up

Each rank chooses for itself. Both give the same statistics and gradients up to rounding, so ranks with different
kernels still train one model. Set torch or triton where the last bits must not depend on a clock.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from composer_prime.config.trainer import HeadKernels
from composer_prime.errors import ConfigError

TIMED_LOGITS = 1 << 25
"""Logits (elements) that both are timed on: larger than any cache, well below a chunk (footprint.CHUNK_LOGITS)."""
REPEATS = 5
_LOG_ZERO = -1e4
"""A finite stand-in for log 0; its exp is 0 in float64 too."""
logger = logging.getLogger(__name__)


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


class LogitKernels(Protocol):
    """Two passes over logits_BV: [B, V] with B >= 1, float32 or float64, contiguous rows."""

    name: str

    def statistics(
        self, logits_BV: Tensor, targets_B: Tensor, temperature_B: Tensor | None, *, overwrite: bool
    ) -> RowStatistics:
        """`targets_B` is int64 [B], `temperature_B` float [B] or None for 1; `overwrite` allows to reuse the block."""
        ...

    def gradient(self, logits_BV: Tensor, inputs: GradientInputs) -> None:
        """Replace x by its gradient. In x / T: d log p_y = [j = y] - p_j, dH = -p_j (log p_j + H)."""


class TorchLogitKernels:
    """The reference, for any device; needs memory for one more block."""

    name = "torch"

    def statistics(
        self, logits_BV: Tensor, targets_B: Tensor, temperature_B: Tensor | None, *, overwrite: bool
    ) -> RowStatistics:
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

    def gradient(self, logits_BV: Tensor, inputs: GradientInputs) -> None:
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


def choose_kernels(setting: HeadKernels, hidden_RH: Tensor, vocabulary: int) -> LogitKernels:
    """Return the kernels for the logits of `hidden_RH`; with `auto` on CUDA, the first call of a kind times both.

    Raises ConfigError as `check_kernels` does.
    """
    device, dtype = hidden_RH.device, wide(hidden_RH.dtype)
    check_kernels(setting, device)
    if setting == "triton":
        return _triton()
    if setting == "torch" or device.type != "cuda" or not _triton_installed():
        return TorchLogitKernels()
    return _faster(device, dtype, vocabulary)


def check_kernels(setting: HeadKernels, device: torch.device) -> None:
    """Raise ConfigError when `setting` cannot run on `device`."""
    if setting != "triton":
        return
    if not _triton_installed():
        raise ConfigError(
            "trainer.head_kernels is 'triton', but the package triton is not installed here: install it, or set "
            "trainer.head_kernels = 'auto'"
        )
    if device.type != "cuda":
        raise ConfigError(
            f"trainer.head_kernels is 'triton', but the trainer computes on {device.type} and the kernels need CUDA: "
            "set trainer.head_kernels = 'auto', or trainer.device = 'cuda' where there is a GPU"
        )


@functools.cache
def _faster(device: torch.device, dtype: torch.dtype, vocabulary: int) -> LogitKernels:
    torch_kernels = TorchLogitKernels()
    try:
        triton_kernels = _triton()
        triton_ms = _time_ms(triton_kernels, device, dtype, vocabulary)
    except Exception as error:  # a missing compiler, an old driver or GPU: whatever Triton's toolchain raises
        logger.warning(
            "the loss head's Triton kernels do not run on %s (%s: %s); using torch's",
            device, type(error).__name__, error,
        )  # fmt: skip
        return torch_kernels
    torch_ms = _time_ms(torch_kernels, device, dtype, vocabulary)
    best = triton_kernels if triton_ms < torch_ms else torch_kernels
    logger.info(
        "loss head on %s, vocabulary %d, %s: a block takes %.3f ms in torch, %.3f ms in Triton; using %s",
        device, vocabulary, dtype, torch_ms, triton_ms, best.name,
    )  # fmt: skip
    return best


def _time_ms(kernels: LogitKernels, device: torch.device, dtype: torch.dtype, vocabulary: int) -> float:
    """Return the milliseconds of both passes over about TIMED_LOGITS logits on CUDA: the best of REPEATS."""
    rows = max(1, TIMED_LOGITS // vocabulary)
    logits_BV = torch.zeros(rows, vocabulary, device=device, dtype=dtype)
    targets_B, ones_B = torch.zeros(rows, device=device, dtype=torch.int64), logits_BV.new_ones(rows)

    def both_passes() -> None:
        row = kernels.statistics(logits_BV, targets_B, None, overwrite=True)
        kernels.gradient(
            logits_BV,
            GradientInputs(
                targets_B=targets_B, temperature_B=None, log_sum_B=row.log_sum_B, entropy_B=row.entropy_B,
                logprob_grad_B=ones_B, entropy_grad_B=None, divergence_grad_BV=None, scale=1.0, cap=None,
            ),
        )  # fmt: skip

    with torch.cuda.device(device), torch.no_grad():
        both_passes()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            both_passes()
            event.record()
        events[-1].synchronize()
    return min(start.elapsed_time(end) for start, end in itertools.pairwise(events))


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton() -> LogitKernels:
    from trainer.head.triton_kernels import TritonLogitKernels

    return TritonLogitKernels()
