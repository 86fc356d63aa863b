"""Which implementation of the head's element-wise passes a process takes: `trainer.head_kernels`.

    torch     everywhere
    triton    CUDA with triton installed, else ConfigError
    auto      the CPU: torch. CUDA: both are timed once for each device, type and vocabulary (to a factor of 2), on
              scratch logits of real size, after a pass that compiles and warms up; the faster one stays

Each rank chooses for itself and waits for no other: both give the same statistics and gradients to rounding, so ranks
that differ train one model. A run whose last bits must not depend on a clock sets torch or triton.
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
from trainer.head.head import Head
from trainer.head.logit_kernels import Incoming, LogitKernels, TorchLogitKernels, wide

MEASURED_LOGITS = 1 << 25
"""Logits (elements) that both are timed on: past any cache, and well below a chunk's (footprint.CHUNK_LOGITS)."""
REPEATS = 5
logger = logging.getLogger(__name__)
_Key = tuple[torch.device, torch.dtype, int]
_chosen: dict[_Key, LogitKernels] = {}


def choose_kernels(wanted: HeadKernels, hidden_RH: Tensor, vocabulary: int) -> LogitKernels:
    """The passes for the logits of `hidden_RH`. Measures at the first call for a kind of logits on CUDA with `auto`.

    Raises ConfigError as `check_kernels` does.
    """
    device, dtype = hidden_RH.device, wide(hidden_RH.dtype)
    check_kernels(wanted, device)
    if wanted == "torch" or (wanted == "auto" and (device.type != "cuda" or not _installed())):
        return TorchLogitKernels()
    if wanted == "triton":
        return _triton()
    key = (device, dtype, vocabulary.bit_length())
    if key not in _chosen:
        _chosen[key] = _faster(device, dtype, vocabulary)
    return _chosen[key]


def check_kernels(wanted: HeadKernels, device: torch.device) -> None:
    """Raises ConfigError when `wanted` cannot run on `device`."""
    if wanted != "triton":
        return
    if not _installed():
        raise ConfigError(
            "trainer.head_kernels is 'triton', but the package triton is not installed here: install it, or set "
            "trainer.head_kernels = 'auto'"
        )
    if device.type != "cuda":
        raise ConfigError(
            f"trainer.head_kernels is 'triton', but the trainer computes on {device.type} and the kernels need CUDA: "
            "set trainer.head_kernels = 'auto', or trainer.device = 'cuda' where there is a GPU"
        )


def _faster(device: torch.device, dtype: torch.dtype, vocabulary: int) -> LogitKernels:
    """Time both, say what came out, return the faster; torch where Triton's kernels cannot be built."""
    torch_passes = TorchLogitKernels()
    try:
        triton_passes = _triton()
        triton_ms = time_ms(triton_passes, device, dtype, vocabulary)
    except Exception as error:  # a missing compiler, an old driver or GPU: whatever Triton's toolchain raises
        logger.warning(
            "the loss head's Triton kernels do not run on %s, so it takes torch's (%s: %s)",
            device, type(error).__name__, error,
        )  # fmt: skip
        return torch_passes
    torch_ms = time_ms(torch_passes, device, dtype, vocabulary)
    best = triton_passes if triton_ms < torch_ms else torch_passes
    logger.info(
        "loss head on %s, vocabulary %d, %s: a block's passes take %.3f ms in torch, %.3f ms in Triton; it takes %s",
        device, vocabulary, dtype, torch_ms, triton_ms, best.name,
    )  # fmt: skip
    return best


def time_ms(passes: LogitKernels, device: torch.device, dtype: torch.dtype, vocabulary: int) -> float:
    """Milliseconds of both passes over about MEASURED_LOGITS logits of a CUDA device: the best of REPEATS."""
    rows = max(1, MEASURED_LOGITS // vocabulary)
    logits_BV = torch.zeros(rows, vocabulary, device=device, dtype=dtype)
    targets_B = torch.zeros(rows, device=device, dtype=torch.int64)
    coming_B, head = logits_BV.new_ones(rows), Head(weight_VH=logits_BV.new_empty(vocabulary, 0))

    def both() -> None:
        found = passes.statistics(logits_BV, targets_B, None, spent=True)
        passes.gradient(
            logits_BV,
            Incoming(
                targets_B=targets_B, temperature_B=None, log_sum_B=found.log_sum_B, entropy_B=found.entropy_B,
                logprob_grad_B=coming_B, entropy_grad_B=None, taught_BV=None,
            ),
            head,
        )  # fmt: skip

    with torch.cuda.device(device), torch.no_grad():
        both()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            both()
            mark.record()
        marks[-1].synchronize()
    return min(start.elapsed_time(end) for start, end in itertools.pairwise(marks))


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton() -> LogitKernels:
    from trainer.head.triton_kernels import TritonLogitKernels

    return TritonLogitKernels()
