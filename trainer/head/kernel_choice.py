"""Which kernels the loss head uses, by `trainer.head_kernels`:

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

import torch
from torch import Tensor

from composer_prime.config.trainer import HeadKernels
from composer_prime.errors import ConfigError
from trainer.head.kernels import GradientInputs, LogitKernels, TorchLogitKernels, wide

TIMED_LOGITS = 1 << 25
"""Logits (elements) that both are timed on: larger than any cache, well below a chunk (CHUNK_LOGITS)."""
REPEATS = 5
logger = logging.getLogger(__name__)


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
    from trainer.head.triton_kernels import TritonLogitKernels  # triton is not installed everywhere

    return TritonLogitKernels()
