"""One optimizer step: forward and backward over the micro-batches, one read of the numbers, one update.

    for each micro-batch:  L_k = share of the step's loss (global denominators);  backward accumulates sum_k dL_k
    last micro-batch:      FSDP sums the gradients over ranks
    then, once:            sums and gradient norm to the host; all finite -> clip, update; else -> NonFiniteStepError

The host reads no number between micro-batches, so an accelerator never waits for it. The update comes after the read,
so a step that fails leaves the parameters untouched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from composer_prime.channels.term import LossParts, TaughtTokens, Term, TermTokens, channel_metrics, total_loss
from composer_prime.config.trainer import ScheduleConfig
from composer_prime.errors import NonFiniteStepError
from composer_prime.wire.types import StepTotals
from trainer.data.rows import PackedRow
from trainer.head import TokenStatistics
from trainer.model.policy_model import Policy
from trainer.teacher import AuxiliaryLogprobs
from trainer.world import gather_texts


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    rows: Sequence[PackedRow],
    totals: StepTotals,
    terms: Sequence[Term],
    *,
    step: int,
    auxiliary: Sequence[AuxiliaryLogprobs] | None = None,
) -> dict[str, float]:
    """Take one step, and return metrics of the whole step, all ranks.

    `terms` are those of the loss that are on, the policy loss first; `step` sets their weights. Every rank must bring
    the same number of rows; `auxiliary` has one entry a row. Raises NonFiniteStepError, on all ranks alike, before
    anything is changed.
    """
    assert isinstance(policy, FSDPModule)
    started = time.monotonic()
    losses: list[Tensor] = []
    not_finite: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    for index, (row, of_row) in enumerate(zip(rows, auxiliary or [None] * len(rows), strict=True)):
        # A GPU sums its gradients over the ranks beside the next row's work; CPU ranks once, after the last row.
        policy.set_requires_gradient_sync(row.input_ids.is_cuda or index == len(rows) - 1)
        parts, bad = loss_of(policy, row, totals, terms, step=step, auxiliary=of_row)
        parts.total.backward()
        losses.append(parts.total.detach())
        not_finite.append(bad)
        for name, value in parts.sums.items():
            sums[name] = sums[name] + value if name in sums else value.double()
    norm = optimizer.grad_norm()
    sums = dict(sorted(sums.items()))  # a policy loss of the user's may give its sums in another order on each rank
    stacked = torch.stack(list(sums.values()))
    dist.all_reduce(stacked)
    *summed, grad_norm = torch.cat([stacked, norm.double().reshape(1)]).tolist()
    values = dict(zip(sums, summed, strict=True))
    if not (math.isfinite(grad_norm) and math.isfinite(values["loss/total"])):
        optimizer.zero_grad()
        raise _blame(rows, losses, not_finite, grad_norm)
    computed = time.monotonic()
    lr = optimizer.step(norm)
    return (
        {"sdpo/turns": 0.0, "dpo/pairs": 0.0}
        | channel_metrics(terms, values)
        | {
            "tokens/trained": values["policy/tokens"] + values.get("sft/tokens", 0.0),
            "optim/grad_norm": grad_norm,
            "optim/lr": lr,
            "time/forward_backward_s": computed - started,
            "time/optimizer_s": time.monotonic() - computed,
        }
    )


def score_held_out(policy: Policy, rows: Sequence[PackedRow]) -> dict[str, float]:
    """Return loss (nats a token) and token accuracy of held-out demonstrations, over all ranks. A collective."""
    sums = torch.zeros(3, dtype=torch.float64, device=next(policy.parameters()).device)
    was_training = policy.training
    policy.eval()
    for row in rows:
        logprobs_R, hits_R = policy.grades(row)
        sums += torch.stack([logprobs_R.double().sum(), hits_R.double().sum(), sums.new_tensor(float(len(hits_R)))])
    policy.train(was_training)
    dist.all_reduce(sums)
    logprobs, hits, tokens = sums.tolist()
    name = "eval/demonstrations"
    return {f"{name}/loss": -logprobs / tokens, f"{name}/token_accuracy": hits / tokens, f"{name}/tokens": tokens}


def loss_of(
    policy: Policy,
    row: PackedRow,
    totals: StepTotals,
    terms: Sequence[Term],
    *,
    step: int = 1,
    auxiliary: AuxiliaryLogprobs | None = None,
) -> tuple[LossParts, Tensor]:
    """Return one row's share of the step's loss, and how many statistics of each of its documents are not finite."""
    auxiliary = auxiliary or AuxiliaryLogprobs()
    statistics = policy(row, auxiliary.teacher)
    inputs = {
        term.name: term.inputs(_tokens(term, row, statistics, auxiliary.references.get(term.name))) for term in terms
    }
    parts = total_loss(terms, inputs, totals, step)
    bad_R = ~torch.isfinite(statistics.logprobs_R.detach())
    if statistics.divergence_D is not None:
        bad_R[len(bad_R) - len(statistics.divergence_D) :] |= ~torch.isfinite(statistics.divergence_D.detach())
    not_finite = torch.zeros(len(row.names), device=bad_R.device).index_add_(0, row.document_R, bad_R.float())
    return parts, not_finite


def _tokens(term: Term, row: PackedRow, statistics: TokenStatistics, reference: Tensor | None) -> TermTokens:
    """Return the statistics of the term's own tokens; without any in this row they are empty, but have a gradient."""
    own, taught = row.terms[term.name], None
    chosen = slice(None) if own.head_rows is None else own.head_rows
    if term.is_taught and statistics.divergence_D is not None:
        assert statistics.teacher_entropy_D is not None and statistics.teacher_logprobs_D is not None
        taught = TaughtTokens(
            divergence=statistics.divergence_D,
            teacher_entropy=statistics.teacher_entropy_D,
            teacher_logprobs=statistics.teacher_logprobs_D,
        )
    return TermTokens(
        logprobs=statistics.logprobs_R[chosen],
        entropy=statistics.entropy_R[chosen],
        arrays=own.arrays,
        counts=own.counts,
        reference=reference,
        taught=taught,
    )


def _blame(
    rows: Sequence[PackedRow], losses: list[Tensor], not_finite: list[Tensor], grad_norm: float
) -> NonFiniteStepError:
    """Name the micro-batches that are not finite. A collective; every rank gets the same error.

    Blames the samples and pairs whose logits are not finite, all samples of a micro-batch whose logits all are (all
    pairs where it has no sample), and all samples of the step where every loss is (all rows where it has no sample).
    """
    texts, blamed = [], []
    for index in torch.stack(losses).isfinite().logical_not().nonzero()[:, 0].tolist():
        what, names = _blamed(rows[index], not_finite[index].tolist())
        texts.append(f"micro-batch {index} of rank {dist.get_rank()} ({what} {', '.join(names)})")
        blamed += names
    culprits = "loss of " + "; ".join(filter(None, gather_texts("; ".join(texts))))
    samples = _gather_lines(blamed)
    if not samples:
        culprits = "gradient, although every micro-batch's loss is finite"
        samples = _gather_lines([sample_id for row in rows for sample_id in row.sample_ids])
        names = dict.fromkeys(name for row in rows for name in row.names if name != "none")
        samples = samples or _gather_lines(list(names))
    return NonFiniteStepError(
        f"NaN or infinity in the {culprits} (gradient norm {grad_norm}). The parameters are unchanged",
        samples,
    )


def _blamed(row: PackedRow, bad_counts: list[int]) -> tuple[str, list[str]]:
    """Return what is wrong with a row whose loss is not finite, and the names of its culprits."""
    bad = [name for name, count in zip(row.names, bad_counts, strict=True) if count]
    what = "logits of" if bad else "samples" if row.sample_ids else "all of"
    return what, list(dict.fromkeys(bad or row.sample_ids or row.names))


def _gather_lines(lines: Sequence[str]) -> list[str]:
    return [line for text in gather_texts("\n".join(lines)) for line in text.splitlines()]


def rate(step: int, schedule: ScheduleConfig, max_steps: int) -> float:
    """Return the learning rate of step `step` (from 1), relative to the peak.

    Linear warm-up that reaches 1 at step warmup_steps, then constant, or a cosine down to final_ratio at max_steps.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.type == "constant":
        return 1.0
    done = min(1.0, (step - schedule.warmup_steps) / max(1, max_steps - schedule.warmup_steps))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


class Optimizer:
    """One or two torch optimizers that step together. It keeps the peak rates, so each step can set its own."""

    def __init__(self, parts: list[torch.optim.Optimizer], max_grad_norm: float | None) -> None:
        self.parts = parts
        self._peaks = [[group["lr"] for group in part.param_groups] for part in parts]
        self._max_grad_norm = max_grad_norm
        self.skipped = 0
        """How many of the latest steps in a row were skipped."""

    def scale_rates(self, ratio: float) -> None:
        """Set each learning rate to `ratio` of its peak."""
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * ratio

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.groups() for parameter in group["params"])

    def groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def settings(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each group but its rate, which each step sets."""
        left_out = ("params", "param_names", "lr")
        return [{name: value for name, value in group.items() if name not in left_out} for group in self.groups()]

    def grad_norm(self) -> Tensor:
        """Return the global L2 norm of the gradients over all ranks; a scalar on the device."""
        norm = get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, norm: Tensor) -> float:
        """Clip by `norm`, update, drop the gradients. Return AdamW's rate."""
        if self._max_grad_norm is not None:
            clip_grads_with_norm_(list(self.parameters()), self._max_grad_norm, norm)
        for part in self.parts:
            part.step()
        self.skipped = 0
        self.zero_grad()
        return self.parts[0].param_groups[0]["lr"]

    def skip(self) -> None:
        """Run the hooks of a step without changing anything: other clusters count the steps of this one."""
        self.skipped += 1
        self.zero_grad()
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)
