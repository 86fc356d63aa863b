"""The loss head: statistics of each wanted token and their gradients, without ever holding the logits [R, V].

    forward    chunk of rows: logits (one product) -> log-sum-exp, log-probability, entropy, divergence -> dropped
    backward   chunk of rows: logits again, turned into their own gradient in place -> dH of the chunk, dW += (float32)

A chunk is as many rows as the matrix product wants; element-wise work goes over blocks of rows that stay in the
cache. The last D rows have a teacher, whose logits are made beside theirs; autograd finds the divergence's gradient.

Logits that fit one chunk are kept for the backward pass, which works on a copy. Others share one memory.

Gradients cannot be made in the forward pass, as Liger-Kernel does: that of a token is known only after the
log-probabilities of all, and dW mixes the tokens (figures: benchmarks/loss_head.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

from composer_prime.config.trainer import CHUNK_LOGITS
from composer_prime.errors import ConfigError

BLOCK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits (elements) of a block, by device."""
_LOG_ZERO = -1e4
"""A finite stand-in for log 0; its exp is 0 in float64 too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer: logits(h) = cap * tanh(scale * (h W^T + b) / cap); without a cap, scale * (h W^T + b)."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight_VH.shape[0]

    def copied(self) -> Head:
        """Return a copy without gradient: the weights will be overwritten."""
        bias = None if self.bias_V is None else self.bias_V.detach().clone()
        return dataclasses.replace(self, weight_VH=self.weight_VH.detach().clone(), bias_V=bias)


Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(student logits [C, V], teacher logits [C, V], targets [C]) -> [C], differentiable in the student's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTeacher:
    """The teacher of the head's last D rows."""

    hidden_DH: Tensor
    """[D, H], detached: the states that predict the hinted turns' tokens behind the hint."""
    head: Head
    divergence: Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """Statistics of the head's R rows, in nats; float32 (float64 for float64 hidden states)."""

    logprobs_R: Tensor
    """[R], with gradient."""
    entropy_R: Tensor
    """[R], with gradient."""
    divergence_D: Tensor | None = None
    """[D], with gradient: the last D rows against their teacher; None without one."""
    teacher_entropy_D: Tensor | None = None
    """[D], detached."""
    teacher_logprobs_D: Tensor | None = None
    """[D], detached: of the targets, under the teacher."""


def token_statistics(
    head: Head,
    hidden_RH: Tensor,
    targets_R: Tensor,
    temperature_R: Tensor | None = None,
    teacher: HeadTeacher | None = None,
    *,
    chunk_rows: int | None = None,
) -> TokenStatistics:
    """Return statistics of `targets_R` int64 [R] under softmax(head(hidden_RH) / temperature_R).

    hidden_RH is [R, H], temperature_R float [R] or None for 1; the teacher's logits are divided by it too.
    With R = 0 the results are empty and attached to the graph. `chunk_rows` None takes what the device's budget allows.
    """
    budget = CHUNK_LOGITS.get(hidden_RH.device.type, CHUNK_LOGITS["cpu"])
    count = len(targets_R) + (len(teacher.hidden_DH) if teacher else 0)
    job = _Job(
        head=head,
        targets_R=targets_R,
        temperature_R=temperature_R,
        teacher=teacher,
        chunk_rows=chunk_rows or max(1, budget // head.vocabulary),
        keeps_logits=chunk_rows is None and count * head.vocabulary <= budget,
    )
    logprobs_R, entropy_R, divergence_D, teacher_entropy_D, teacher_logprobs_D = _FusedHead.apply(
        hidden_RH, head.weight_VH, head.bias_V, job
    )
    return TokenStatistics(
        logprobs_R=logprobs_R,
        entropy_R=entropy_R,
        divergence_D=divergence_D if teacher else None,
        teacher_entropy_D=teacher_entropy_D if teacher else None,
        teacher_logprobs_D=teacher_logprobs_D if teacher else None,
    )


@torch.no_grad()
def likeliest(head: Head, hidden_RH: Tensor) -> Tensor:
    """Return the likeliest token of each row, int64 [R]. Scaling and soft cap keep the order of the logits."""
    rows = max(1, CHUNK_LOGITS.get(hidden_RH.device.type, CHUNK_LOGITS["cpu"]) // head.vocabulary)
    weight_VH = head.weight_VH.to(hidden_RH.dtype)
    bias_V = None if head.bias_V is None else head.bias_V.to(hidden_RH.dtype)
    chunks = (functional.linear(chunk_CH, weight_VH, bias_V).argmax(-1) for chunk_CH in hidden_RH.split(rows))
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=hidden_RH.device), *chunks])


def head_of(lm: PreTrainedModel) -> Head:
    """Return the output layer of `lm`, with the scaling or soft cap that some families apply behind it.

    An adapted layer counts as W + (alpha / rank) B A, without the adapters' dropout, and as W while they are off.
    Raises ConfigError for an output layer that is not linear.
    """
    module: Any = lm.get_output_embeddings()
    layer = getattr(module, "base_layer", module)  # peft's layers; an isinstance would import peft, which takes seconds
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"{type(lm).__name__} ends in a {type(layer).__name__}, and the loss needs a linear output layer: train "
            "another model, or leave the output layer out of trainer.lora.target_modules"
        )
    weight = layer.weight
    if layer is not module and not module.disable_adapters:
        for adapter in module.active_adapters:
            weight = weight + module.get_delta_weight(adapter)
    config = lm.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return Head(
        weight_VH=weight,
        bias_V=layer.bias,
        scale=scale,
        cap=getattr(config, "final_logit_softcapping", None),  # Gemma
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What a call works on besides the tensors that autograd follows."""

    head: Head
    targets_R: Tensor
    temperature_R: Tensor | None
    teacher: HeadTeacher | None
    chunk_rows: int
    keeps_logits: bool
    """Whether the backward pass finds the logits in `kept_logits`."""
    kept_logits: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    """(student, teacher) of each chunk."""

    @property
    def plain_rows(self) -> int:
        """Rows before those that have a teacher."""
        return len(self.targets_R) - (len(self.teacher.hidden_DH) if self.teacher else 0)

    def chunks(self) -> list[slice]:
        """Return the rows of each chunk, all with or all without a teacher."""
        spans = ((0, self.plain_rows), (self.plain_rows, len(self.targets_R)))
        return [
            slice(start, min(start + self.chunk_rows, end))
            for begin, end in spans
            for start in range(begin, end, self.chunk_rows)
        ]

    def blocks(self, chunk: slice) -> list[tuple[slice, slice]]:
        """Return the rows of each block, counted from the chunk's first and from all."""
        logits = BLOCK_LOGITS.get(self.targets_R.device.type, BLOCK_LOGITS["cpu"])
        step, count = max(1, logits // self.head.vocabulary), chunk.stop - chunk.start
        blocks = (slice(at, min(at + step, count)) for at in range(0, count, step))
        return [(block, slice(chunk.start + block.start, chunk.start + block.stop)) for block in blocks]

    def temperature(self, rows: slice) -> Tensor | None:
        """Return the rows' temperatures; None for 1."""
        return None if self.temperature_R is None else self.temperature_R[rows]

    def cooled(self, logits_BV: Tensor, rows: slice, *, copy: bool = False) -> Tensor:
        """Divide by the rows' temperatures; in place unless the logits are kept or `copy`."""
        if self.temperature_R is None:
            return logits_BV.clone() if copy else logits_BV
        out = None if copy or self.keeps_logits else logits_BV
        return torch.div(logits_BV, self.temperature_R[rows, None], out=out)

    def teacher_rows(self, rows: slice) -> slice:
        """Count `rows` from the first that has a teacher."""
        return slice(rows.start - self.plain_rows, rows.stop - self.plain_rows)


class _FusedHead(torch.autograd.Function):
    """(hidden, weight, bias or None, job) -> the fields of TokenStatistics; gradients of all but the last two."""

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, job: _Job):
        dtype, count = wide(hidden_RH.dtype), len(hidden_RH)
        logprobs_R, entropy_R, log_sum_R = (hidden_RH.new_empty(count, dtype=dtype) for _ in range(3))
        divergence_D, *teacher = (hidden_RH.new_empty(count - job.plain_rows, dtype=dtype) for _ in range(3))
        teacher_entropy_D, teacher_logprobs_D = teacher
        logits, overwrite = _Logits(job, dtype, hidden_RH, weight_VH), not job.keeps_logits
        for chunk in job.chunks():
            student_CV, teacher_CV = logits.student(chunk, bias_V), logits.teacher(chunk)
            for block, rows in job.blocks(chunk):
                student_BV, temperature_B, targets_B = student_CV[block], job.temperature(rows), job.targets_R[rows]
                if teacher_CV is not None and job.teacher is not None:
                    student_BV, temperature_B = job.cooled(student_BV, rows), None
                    teacher_BV, taught = job.cooled(teacher_CV[block], rows), job.teacher_rows(rows)
                    divergence_D[taught] = job.teacher.divergence(student_BV, teacher_BV, targets_B)
                    row = row_statistics(teacher_BV, targets_B, None, overwrite=overwrite)
                    teacher_logprobs_D[taught], teacher_entropy_D[taught], _ = row
                row = row_statistics(student_BV, targets_B, temperature_B, overwrite=overwrite)
                logprobs_R[rows], entropy_R[rows], log_sum_R[rows] = row
            if job.keeps_logits:
                job.kept_logits.append((student_CV, teacher_CV))
        ctx.save_for_backward(hidden_RH, weight_VH, bias_V, log_sum_R, entropy_R)
        ctx.job = job
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(teacher_entropy_D, teacher_logprobs_D)
        return logprobs_R, entropy_R, divergence_D, teacher_entropy_D, teacher_logprobs_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):
        hidden_RH, weight_VH, bias_V, log_sum_R, entropy_R = ctx.saved_tensors
        job, dtype = ctx.job, log_sum_R.dtype
        logprob_grad_R, entropy_grad_R, divergence_grad_D, *_ = gradients
        if logprob_grad_R is None:
            logprob_grad_R = torch.zeros_like(log_sum_R)
        logits = _Logits(job, dtype, hidden_RH, weight_VH)
        hidden_grad = torch.empty_like(hidden_RH, dtype=dtype)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight_grad = torch.zeros_like(weight_VH, dtype=dtype) if needs_weight else None
        bias_grad = torch.zeros_like(bias_V, dtype=dtype) if needs_bias else None
        for index, chunk in enumerate(job.chunks()):
            if job.keeps_logits:
                kept_CV, teacher_CV = job.kept_logits[index]
                student_CV = kept_CV.clone()
            else:
                student_CV, teacher_CV = logits.student(chunk, bias_V), logits.teacher(chunk)
            for block, rows in job.blocks(chunk):
                student_BV = student_CV[block]
                divergence_grad_BV = _divergence_gradient(job, student_BV, teacher_CV, block, rows, divergence_grad_D)
                gradients_R = logprob_grad_R, entropy_grad_R
                turn_into_gradient(job, rows, student_BV, (log_sum_R, entropy_R), gradients_R, divergence_grad_BV)
            _multiply(student_CV, logits.weight_VH, hidden_grad[chunk])
            if weight_grad is not None:
                _multiply(student_CV.t(), logits.hidden_RH[chunk], weight_grad, add=True)
            if bias_grad is not None:
                bias_grad += student_CV.sum(0)
        return (
            hidden_grad.to(hidden_RH.dtype),
            _in_type_of(weight_VH, weight_grad),
            _in_type_of(bias_V, bias_grad),
            None,
        )


def _in_type_of(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to(parameter.dtype)


def _divergence_gradient(
    job: _Job, student_BV: Tensor, teacher_CV: Tensor | None, block: slice, rows: slice, coming_D: Tensor | None
) -> Tensor | None:
    """`block`: the rows, counted from the chunk's first."""
    if job.teacher is None or teacher_CV is None or coming_D is None:
        return None
    leaf = job.cooled(student_BV, rows, copy=True).requires_grad_()
    with torch.enable_grad():
        divergence_B = job.teacher.divergence(leaf, job.cooled(teacher_CV[block], rows), job.targets_R[rows])
    return torch.autograd.grad(divergence_B, leaf, coming_D[job.teacher_rows(rows)])[0]


class _Logits:
    """Makes the logits of chunks, in memory that the next chunk reuses."""

    def __init__(self, job: _Job, dtype: torch.dtype, hidden_RH: Tensor, weight_VH: Tensor) -> None:
        self._job = job
        self._dtype = dtype
        self.hidden_RH = _operand(hidden_RH, dtype)
        self.weight_VH = _operand(weight_VH, dtype)
        self._memory: dict[str, Tensor] = {}
        self._teacher_VH = _operand(job.teacher.head.weight_VH.detach(), dtype) if job.teacher else None

    def student(self, chunk: slice, bias_V: Tensor | None) -> Tensor:
        """Return [C, V], scaled and capped, at temperature 1."""
        return self._make("student", self.hidden_RH[chunk], self.weight_VH, bias_V, self._job.head)

    def teacher(self, chunk: slice) -> Tensor | None:
        """Return [C, V] at temperature 1; None for rows without a teacher."""
        teacher = self._job.teacher
        if teacher is None or self._teacher_VH is None or chunk.start < self._job.plain_rows:
            return None
        hidden_CH = _operand(teacher.hidden_DH[self._job.teacher_rows(chunk)], self._dtype)
        return self._make("teacher", hidden_CH, self._teacher_VH, teacher.head.bias_V, teacher.head)

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
        """Return [rows, V] to write into: the previous chunk's memory, unless logits are kept."""
        memory = self._memory.get(name)
        if self._job.keeps_logits or memory is None or len(memory) < rows:
            memory = self._memory[name] = self.hidden_RH.new_empty(rows, vocabulary, dtype=self._dtype)
        return memory[:rows]


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a factor: a CPU does not multiply half precision with float32 sums."""
    return tensor if tensor.is_cuda else tensor.to(dtype)


def _multiply(one: Tensor, other: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Set out = one @ other, or add it to out; in out's type."""
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


# The element-wise work on a block of logits: x a row's as the head gives them, T its temperature.
#
#     statistics    x -> log p_y, H, Z      log p = x / T - Z,  Z = log sum exp(x / T),  H = -sum p log p
#     gradient      x -> d loss / d (h W^T + b), in place, from the gradients of log p_y and H
#
# A logit of -inf has probability 0 and does not enter the entropy. NaN or +inf makes the row's results NaN.


def row_statistics(
    logits_BV: Tensor, targets_B: Tensor, temperature_B: Tensor | None, *, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p_y, H and Z of B >= 1 rows of float32 or float64 logits, each [B] in their type.

    `targets_B` is int64 [B], `temperature_B` float [B] or None for 1. `overwrite` allows to reuse the block.
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
    logprob_B = shifted_BV.gather(1, targets_B[:, None]).squeeze(1) - log_sum_B
    return logprob_B, log_sum_B - moment_B / sum_B, log_sum_B + largest_B1.squeeze(1)


def turn_into_gradient(
    job: _Job,
    rows: slice,
    logits_BV: Tensor,
    statistics: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    divergence_grad_BV: Tensor | None,
) -> None:
    """Replace x by its gradient. In x / T: d log p_y = [j = y] - p_j, dH = -p_j (log p_j + H).

    `rows`: the block's. `statistics`: (Z, H), `gradients`: of log p_y and H, of all rows.
    `divergence_grad_BV`: in x / T; None without a teacher.
    """
    log_sum_B, entropy_B = (each[rows] for each in statistics)
    logprob_grad_B1, entropy_grad_R = gradients[0][rows, None], gradients[1]
    temperature_B = job.temperature(rows)
    slope = _slope(logits_BV, job.head, temperature_B)
    if temperature_B is not None:
        logits_BV.div_(temperature_B[:, None])
    logits_BV -= log_sum_B[:, None]
    if entropy_grad_R is None:
        logits_BV.exp_().mul_(-logprob_grad_B1)
    else:
        weights_BV = logits_BV.exp()
        logits_BV.clamp_(min=_LOG_ZERO).add_(entropy_B[:, None])
        logits_BV.mul_(-entropy_grad_R[rows, None]).sub_(logprob_grad_B1).mul_(weights_BV)
    logits_BV.scatter_add_(1, job.targets_R[rows, None], logprob_grad_B1)
    if divergence_grad_BV is not None:
        logits_BV += divergence_grad_BV
    if slope is not None:
        logits_BV *= slope


def _slope(logits_BV: Tensor, head: Head, temperature_B: Tensor | None) -> Tensor | float | None:
    """Return d(x / T) / d(h W^T + b); None for 1."""
    slope: Tensor | float | None = None if head.scale == 1.0 else head.scale
    if head.cap is not None:  # d tanh(x) = 1 - tanh(x)^2
        slope = (slope or 1.0) * (1.0 - (logits_BV / head.cap).square())
    if temperature_B is not None:
        slope = (1.0 if slope is None else slope) / temperature_B[:, None]
    return slope


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
