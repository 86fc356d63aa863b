"""The passes of passes.py as Triton kernels: logits are read once for statistics, read and written once for gradients.

The kernels use what Triton's interpreter can run from a plain function (tl.reduce with the functions below instead of
tl.max and tl.sum), so that tests without a GPU run the same source on CPU tensors. Importing this imports triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import KernelInterface

from trainer.head.head import Head
from trainer.head.logit_kernels import Incoming, RowStatistics

_WARPS = 8
Kernel = KernelInterface[Any]


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _both_sums(one, other, next_one, next_other):
    return one + next_one, other + next_other


@triton.jit
def statistics_kernel(
    logits, targets, temperature, logprob, entropy, log_sum, stride, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a row: largest m, sum of exp(x - m) and of exp(x - m) (x - m), corrected as m rises."""
    row = tl.program_id(0).to(tl.int64)  # rows * vocabulary passes 2^31
    logits += row * stride
    kind = logits.dtype.element_ty
    if temperature is not None:
        heat = tl.load(temperature + row).to(kind)
    largest = tl.full((), float("-inf"), kind)
    total = tl.full((), 0.0, kind)
    moment = tl.full((), 0.0, kind)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
        if temperature is not None:
            x = x / heat
        higher = tl.maximum(largest, tl.reduce(x, 0, _larger))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far: no -inf - -inf
        lift = tl.where(largest == float("-inf"), 0.0, largest - base)
        shifted = x - base
        weight = tl.exp(shifted)
        rescale = tl.exp(largest - base)
        weighted = tl.where(weight > 0, weight * shifted, 0.0)
        new_total, new_moment = tl.reduce((weight, weighted), 0, _both_sums)
        moment = rescale * (moment + lift * total) + new_moment
        total = rescale * total + new_total
        largest = higher
    chosen = tl.load(logits + tl.load(targets + row))
    if temperature is not None:
        chosen = chosen / heat
    log_total = tl.log(total)
    tl.store(logprob + row, chosen - largest - log_total)
    tl.store(entropy + row, log_total - moment / total)
    tl.store(log_sum + row, log_total + largest)


@triton.jit
def gradient_kernel(
    logits, targets, temperature, log_sum, entropy, logprob_grad, entropy_grad, taught, stride, vocabulary, pieces,
    SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a piece of a row; `taught` is laid out as [B, V], `logits` with `stride` between rows."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    logits += row * stride
    kind = logits.dtype.element_ty
    x = tl.load(logits + at, mask=inside, other=0.0)
    slope = tl.full((), SCALE, kind)
    if CAP is not None:
        slope = slope * (1.0 - (x / CAP) * (x / CAP))
    if temperature is not None:
        heat = tl.load(temperature + row).to(kind)
        x = x / heat
        slope = slope / heat
    log_p = x - tl.load(log_sum + row)
    p = tl.exp(log_p)
    coming = tl.load(logprob_grad + row)
    gradient = tl.where(at == tl.load(targets + row), coming, 0.0) - coming * p
    if entropy_grad is not None:
        rising = tl.where(p > 0, p * (log_p + tl.load(entropy + row)), p)  # p again where it is 0, or NaN
        gradient -= tl.load(entropy_grad + row) * rising
    if taught is not None:
        gradient += tl.load(taught + row * vocabulary + at, mask=inside, other=0.0)
    tl.store(logits + at, gradient * slope, mask=inside)


class TritonLogitKernels:
    """CUDA tensors; no memory on top."""

    name = "triton"

    def __init__(
        self, statistics: Kernel = statistics_kernel, gradient: Kernel = gradient_kernel, *, block: int = 4096
    ) -> None:
        """The kernels compiled, as they are here, or wrapped for Triton's interpreter; `block`, a power of two, is the
        logits of a row that a program holds at a time, at most."""
        self._statistics, self._gradient, self._block = statistics, gradient, block

    def statistics(
        self, logits_BV: Tensor, targets_B: Tensor, temperature_B: Tensor | None, *, spent: bool
    ) -> RowStatistics:
        rows, vocabulary = logits_BV.shape
        block = min(self._block, triton.next_power_of_2(vocabulary))
        found = RowStatistics(*(logits_BV.new_empty(rows) for _ in RowStatistics._fields))
        with torch.cuda.device_of(logits_BV):
            self._statistics[(rows,)](
                logits_BV, targets_B.contiguous(), _contiguous(temperature_B), *found, logits_BV.stride(0), vocabulary,
                BLOCK=block, num_warps=_WARPS,
            )  # fmt: skip
        return found

    def gradient(self, logits_BV: Tensor, incoming: Incoming, head: Head) -> None:
        rows, vocabulary = logits_BV.shape
        block = min(self._block, triton.next_power_of_2(vocabulary))
        pieces = triton.cdiv(vocabulary, block)
        with torch.cuda.device_of(logits_BV):
            self._gradient[(rows * pieces,)](
                logits_BV, incoming.targets_B.contiguous(), _contiguous(incoming.temperature_B),
                incoming.log_sum_B.contiguous(), incoming.entropy_B.contiguous(), incoming.logprob_grad_B.contiguous(),
                _contiguous(incoming.entropy_grad_B), _contiguous(incoming.taught_BV), logits_BV.stride(0), vocabulary,
                pieces, SCALE=head.scale, CAP=head.cap, BLOCK=block, num_warps=_WARPS,
            )  # fmt: skip


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
