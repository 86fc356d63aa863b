"""The fused head: per-token statistics and their gradients, chunk by chunk, without ever holding [R, V].

    forward    chunk of rows: logits (one product) -> log-sum-exp, log-probability, entropy, divergence -> dropped
    backward   chunk of rows: logits again, turned into their own gradient in place -> dH of the chunk, dW += (float32)

Within a chunk the element-wise work goes over blocks of few rows that stay in the processor's cache; the product wants
many rows. The last D rows have a teacher: its logits are made beside theirs, and the divergence's gradient is what
autograd finds for it within a block. Rows whose logits fit one chunk altogether keep them instead of making them twice.

Products, chunks and teachers are here; what is done to each logit of a block is in passes.py, in torch and in Triton.
Logits that are kept stay as the head gave them: the backward pass works on a copy. All others lie in memory that the
next chunk writes over.

Why the gradients are not made in the forward pass, as Liger-Kernel does: what comes back per token (the gradient of
ratios, sequence means, pair margins) is known only after all tokens' log-probabilities, and dW mixes the tokens. The
price is one product of four; what is saved is writing and reading [R, V] (benchmarks/loss_head.py has the figures).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_prime.plan.footprint import CHUNK_LOGITS
from trainer.head.choose_kernels import choose_kernels
from trainer.head.head import Head, TeacherTargets, TokenStatistics
from trainer.head.logit_kernels import Incoming, LogitKernels, wide

BLOCK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits (elements) that element-wise passes work on at a time."""


def token_statistics(
    head: Head,
    hidden_RH: Tensor,
    targets_R: Tensor,
    temperature_R: Tensor | None = None,
    distillation: TeacherTargets | None = None,
    *,
    chunk_rows: int | None = None,
    passes: LogitKernels | None = None,
) -> TokenStatistics:
    """Statistics of `targets_R` int64 [R] under softmax(head(hidden_RH) / temperature_R).

    hidden_RH is [R, H]; temperature_R float [R] or None for 1 (a teacher's logits are divided by it too). R may be 0:
    the results then hang on the graph, empty. `chunk_rows` None takes as many as the device's budget allows; `passes`
    None the faster ones (choose_passes.py).
    """
    budget = CHUNK_LOGITS.get(hidden_RH.device.type, CHUNK_LOGITS["cpu"])
    count = len(targets_R) + (distillation.rows if distillation else 0)
    job = _Job(
        head=head,
        targets_R=targets_R,
        temperature_R=temperature_R,
        distillation=distillation,
        passes=passes or choose_kernels("auto", hidden_RH, head.vocabulary),
        chunk_rows=chunk_rows or max(1, budget // head.vocabulary),
        keeps=chunk_rows is None and count * head.vocabulary <= budget,
    )
    logprobs_R, entropy_R, divergence_D, teacher_D = _FusedHead.apply(hidden_RH, head.weight_VH, head.bias_V, job)
    return TokenStatistics(
        logprobs_R=logprobs_R,
        entropy_R=entropy_R,
        divergence_D=divergence_D if distillation else None,
        teacher_entropy_D=teacher_D if distillation else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What a call works on besides the tensors that autograd follows."""

    head: Head
    targets_R: Tensor
    temperature_R: Tensor | None
    distillation: TeacherTargets | None
    passes: LogitKernels
    chunk_rows: int
    keeps: bool
    """Whether the backward pass finds the logits of the forward pass in `kept`."""
    kept: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    @property
    def plain_rows(self) -> int:
        """Rows before those that have a teacher."""
        return len(self.targets_R) - (self.distillation.rows if self.distillation else 0)

    def chunks(self) -> list[slice]:
        """Rows of each chunk; none mixes rows with and without a teacher."""
        spans = ((0, self.plain_rows), (self.plain_rows, len(self.targets_R)))
        return [
            slice(start, min(start + self.chunk_rows, end))
            for begin, end in spans
            for start in range(begin, end, self.chunk_rows)
        ]

    def blocks(self, chunk: slice) -> list[tuple[slice, slice]]:
        """A chunk in pieces for element-wise work: rows counted from the chunk's first, and from the first of all."""
        logits = BLOCK_LOGITS.get(self.targets_R.device.type, BLOCK_LOGITS["cpu"])
        step, count = max(1, logits // self.head.vocabulary), chunk.stop - chunk.start
        pieces = (slice(at, min(at + step, count)) for at in range(0, count, step))
        return [(piece, slice(chunk.start + piece.start, chunk.start + piece.stop)) for piece in pieces]

    def heat(self, rows: slice) -> Tensor | None:
        """The rows' temperatures; None for 1."""
        return None if self.temperature_R is None else self.temperature_R[rows]

    def cooled(self, logits_BV: Tensor, rows: slice, *, copy: bool = False) -> Tensor:
        """Divided by the rows' temperatures; in place unless they are kept, or a `copy` is wanted."""
        if self.temperature_R is None:
            return logits_BV.clone() if copy else logits_BV
        return torch.div(logits_BV, self.temperature_R[rows, None], out=None if copy or self.keeps else logits_BV)

    def taught(self, rows: slice) -> slice:
        """Rows counted from the first that has a teacher."""
        return slice(rows.start - self.plain_rows, rows.stop - self.plain_rows)


class _Logits:
    """Makes the logits of chunks in memory that is used again for the next chunk."""

    def __init__(self, job: _Job, dtype: torch.dtype, hidden_RH: Tensor, weight_VH: Tensor) -> None:
        self._job, self._dtype = job, dtype
        self.hidden_RH, self.weight_VH = _operand(hidden_RH, dtype), _operand(weight_VH, dtype)
        self._memory: dict[str, Tensor] = {}
        self._weights: dict[int, Tensor] = {}

    def student(self, chunk: slice, bias_V: Tensor | None) -> Tensor:
        """[C, V], scaled and capped, at temperature 1."""
        return self._make("student", self.hidden_RH[chunk], self.weight_VH, bias_V, self._job.head)

    def teacher(self, chunk: slice) -> Tensor | None:
        """[C, V] at temperature 1: the parts' logits, weighed; None for rows without a teacher."""
        if chunk.start < self._job.plain_rows:
            return None
        mixed, *others = [
            self._make(f"teacher {index}", _operand(part.hidden_DH[self._job.taught(chunk)], self._dtype),
                       self._teacher_weight(index), part.head.bias_V, part.head).mul_(part.share)
            for index, part in enumerate(self._job.distillation.teacher)
        ]  # fmt: skip
        for other in others:
            mixed += other
        return mixed

    def _teacher_weight(self, index: int) -> Tensor:
        if index not in self._weights:
            self._weights[index] = _operand(self._job.distillation.teacher[index].head.weight_VH.detach(), self._dtype)
        return self._weights[index]

    def _make(self, name: str, hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, head: Head) -> Tensor:
        out = self._room(name, len(hidden_CH), len(weight_VH))
        _multiply(hidden_CH, weight_VH.t(), out)
        if bias_V is not None:
            out += bias_V
        if head.scale != 1.0:
            out *= head.scale
        if head.cap is not None:
            out.div_(head.cap).tanh_().mul_(head.cap)
        return out

    def _room(self, name: str, rows: int, vocabulary: int) -> Tensor:
        """[rows, V] to write into: fresh where the logits are kept, else the memory of the chunk before."""
        held = self._memory.get(name)
        if self._job.keeps or held is None or len(held) < rows:
            held = self._memory[name] = self.hidden_RH.new_empty(rows, vocabulary, dtype=self._dtype)
        return held[:rows]


class _FusedHead(torch.autograd.Function):
    """(hidden [R, H], weight [V, H], bias [V] or None, job) -> log-probabilities [R], entropies [R], divergences [D],
    teacher entropies [D]; differentiable but for the last."""

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, job: _Job):
        dtype, count = wide(hidden_RH.dtype), len(hidden_RH)
        logprobs_R, entropy_R, log_sum_R = (hidden_RH.new_empty(count, dtype=dtype) for _ in range(3))
        divergence_D, teacher_D = (hidden_RH.new_empty(count - job.plain_rows, dtype=dtype) for _ in range(2))
        logits = _Logits(job, dtype, hidden_RH, weight_VH)
        for chunk in job.chunks():
            student_CV, teacher_CV = logits.student(chunk, bias_V), logits.teacher(chunk)
            for block, rows in job.blocks(chunk):
                student_BV, heat_B, targets_B = student_CV[block], job.heat(rows), job.targets_R[rows]
                if teacher_CV is not None:
                    student_BV, heat_B, taught = job.cooled(student_BV, rows), None, job.taught(rows)
                    teacher_BV = job.cooled(teacher_CV[block], rows)
                    divergence_D[taught] = job.distillation.divergence(student_BV, teacher_BV, targets_B)
                    _, teacher_D[taught], _ = job.passes.statistics(teacher_BV, targets_B, None, spent=not job.keeps)
                found = job.passes.statistics(student_BV, targets_B, heat_B, spent=not job.keeps)
                logprobs_R[rows], entropy_R[rows], log_sum_R[rows] = found
            if job.keeps:
                job.kept.append((student_CV, teacher_CV))
        ctx.save_for_backward(hidden_RH, weight_VH, bias_V, log_sum_R, entropy_R)
        ctx.job = job
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(teacher_D)
        return logprobs_R, entropy_R, divergence_D, teacher_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):
        hidden_RH, weight_VH, bias_V, log_sum_R, entropy_R = ctx.saved_tensors
        job, dtype = ctx.job, log_sum_R.dtype
        logprobs_grad, entropy_grad, divergence_grad, _ = gradients
        coming = _Coming(
            torch.zeros_like(log_sum_R) if logprobs_grad is None else logprobs_grad,
            entropy_grad,
            divergence_grad,
            entropy_R,
            log_sum_R,
        )
        logits = _Logits(job, dtype, hidden_RH, weight_VH)
        hidden_grad = torch.empty_like(hidden_RH, dtype=dtype)
        weight_grad = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias_V, dtype=dtype) if ctx.needs_input_grad[2] else None
        for index, chunk in enumerate(job.chunks()):
            student_CV, teacher_CV = _again(job, logits, index, chunk, bias_V)
            for block, rows in job.blocks(chunk):
                _to_gradient(job, coming, student_CV[block], None if teacher_CV is None else teacher_CV[block], rows)
            _multiply(student_CV, logits.weight_VH, hidden_grad[chunk])
            if weight_grad is not None:
                _multiply(student_CV.t(), logits.hidden_RH[chunk], weight_grad, add=True)
            if bias_grad is not None:
                bias_grad += student_CV.sum(0)
        return (
            hidden_grad.to(hidden_RH.dtype),
            None if weight_grad is None else weight_grad.to(weight_VH.dtype),
            None if bias_grad is None else bias_grad.to(bias_V.dtype),
            None,
        )


@dataclass(frozen=True, slots=True)
class _Coming:
    """Gradients of the outputs, and what the forward pass noted of each row."""

    logprobs_R: Tensor
    entropy_R: Tensor | None
    divergence_D: Tensor | None
    value_of_entropy_R: Tensor
    log_sum_R: Tensor


def _again(job: _Job, logits: _Logits, index: int, chunk: slice, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A chunk's logits for the backward pass: what was kept (copied, as they become the gradient), or made again."""
    if not job.keeps:
        return logits.student(chunk, bias_V), logits.teacher(chunk)
    student_CV, teacher_CV = job.kept[index]
    return student_CV.clone(), teacher_CV


def _to_gradient(job: _Job, coming: _Coming, logits_BV: Tensor, teacher_BV: Tensor | None, rows: slice) -> None:
    """A block's logits become the gradient of h W^T + b, in place; autograd finds the part of a divergence."""
    taught_BV = None
    if teacher_BV is not None and coming.divergence_D is not None:
        leaf = job.cooled(logits_BV, rows, copy=True).requires_grad_()
        with torch.enable_grad():
            divergence_B = job.distillation.divergence(leaf, job.cooled(teacher_BV, rows), job.targets_R[rows])
        (taught_BV,) = torch.autograd.grad(divergence_B, leaf, coming.divergence_D[job.taught(rows)])
    incoming = Incoming(
        targets_B=job.targets_R[rows],
        temperature_B=job.heat(rows),
        log_sum_B=coming.log_sum_R[rows],
        entropy_B=coming.value_of_entropy_R[rows],
        logprob_grad_B=coming.logprobs_R[rows],
        entropy_grad_B=None if coming.entropy_R is None else coming.entropy_R[rows],
        taught_BV=taught_BV,
    )
    job.passes.gradient(logits_BV, incoming, job.head)


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor as products take it: a GPU multiplies half precision with float32 sums, a CPU has no such kernel."""
    return tensor if tensor.is_cuda else tensor.to(dtype)


def _multiply(one: Tensor, other: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out = one @ other, or out += one @ other; summed and stored in out's type."""
    if one.dtype == other.dtype == out.dtype:
        if add:
            out.addmm_(one, other)
        else:
            torch.mm(one, other, out=out)
        return
    half = other.dtype
    if add:
        torch.addmm(out, one.to(half), other, out_dtype=out.dtype, out=out)
    else:
        torch.mm(one.to(half), other, out_dtype=out.dtype, out=out)
