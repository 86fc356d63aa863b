"""The element-wise work of kernels.py as Triton kernels.

Logits are read once for the statistics, and read and written once for the gradient. The kernels use only what Triton's
interpreter can run from a plain function: tl.reduce with the functions below instead of tl.max and tl.sum. So tests
without a GPU run the same source on CPU tensors. Importing this module imports triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import KernelInterface

from trainer.head.kernels import GradientInputs, RowStatistics

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
    """One program a row: the largest logit m, sum exp(x - m) and sum exp(x - m) (x - m), rescaled when m rises."""
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
        base = tl.where(higher == float("-inf"), 0.0, higher)  # all -inf so far: avoid -inf - -inf
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
    logits, targets, temperature, log_sum, entropy, logprob_grad, entropy_grad, divergence_grad, stride,
    vocabulary, pieces, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a piece of a row. `divergence_grad` is dense [B, V]; `logits` has `stride` between rows."""
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
        rising = tl.where(p > 0, p * (log_p + tl.load(entropy + row)), p)  # p itself where it is 0 or NaN
        gradient -= tl.load(entropy_grad + row) * rising
    if divergence_grad is not None:
        gradient += tl.load(divergence_grad + row * vocabulary + at, mask=inside, other=0.0)
    tl.store(logits + at, gradient * slope, mask=inside)


class TritonLogitKernels:
    """For CUDA tensors; needs no extra memory."""

    name = "triton"

    def __init__(
        self, statistics: Kernel = statistics_kernel, gradient: Kernel = gradient_kernel, *, block: int = 4096
    ) -> None:
        """`statistics` and `gradient` may be wrapped for Triton's interpreter. `block`, a power of two, is the largest
        number of logits of a row that a program holds at a time."""
        self._statistics = statistics
        self._gradient = gradient
        self._block = block

    def statistics(
        self, logits_BV: Tensor, targets_B: Tensor, temperature_B: Tensor | None, *, overwrite: bool
    ) -> RowStatistics:
        rows, vocabulary = logits_BV.shape
        block = min(self._block, triton.next_power_of_2(vocabulary))
        results = RowStatistics(*(logits_BV.new_empty(rows) for _ in RowStatistics._fields))
        with torch.cuda.device_of(logits_BV):
            self._statistics[(rows,)](
                logits_BV, targets_B.contiguous(), _contiguous(temperature_B), *results, logits_BV.stride(0),
                vocabulary, BLOCK=block, num_warps=_WARPS,
            )  # fmt: skip
        return results

    def gradient(self, logits_BV: Tensor, inputs: GradientInputs) -> None:
        rows, vocabulary = logits_BV.shape
        block = min(self._block, triton.next_power_of_2(vocabulary))
        pieces = triton.cdiv(vocabulary, block)
        with torch.cuda.device_of(logits_BV):
            self._gradient[(rows * pieces,)](
                logits_BV, inputs.targets_B.contiguous(), _contiguous(inputs.temperature_B),
                inputs.log_sum_B.contiguous(), inputs.entropy_B.contiguous(), inputs.logprob_grad_B.contiguous(),
                _contiguous(inputs.entropy_grad_B), _contiguous(inputs.divergence_grad_BV), logits_BV.stride(0),
                vocabulary, pieces, SCALE=inputs.scale, CAP=inputs.cap, BLOCK=block, num_warps=_WARPS,
            )  # fmt: skip


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
