"""One optimizer step: forward and backward over the micro-batches, one read of the numbers, one update.

    for each micro-batch:  L_k = share of the step's loss (global denominators);  backward accumulates sum_k dL_k
    last micro-batch:      FSDP sums the gradients over ranks
    then, once:            sums and gradient norm to the host; all finite -> clip, update; else -> NonFiniteError

The host reads no number between micro-batches, so an accelerator never waits for it. The update comes after the read,
so a step that fails leaves the parameters untouched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from composer_prime.channels.replay_dpo import PairTokens
from composer_prime.channels.sdpo import SdpoTokens
from composer_prime.channels.tokens import PolicyTokens, sum_by
from composer_prime.channels.total import ChannelInputs, LossParts, channel_metrics, total_loss
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import NonFiniteError
from composer_prime.wire.types import StepTotals
from trainer.data.rows import PackedRow, PairsRow
from trainer.head.fused import TokenStatistics
from trainer.model.policy import Policy
from trainer.optim import Optimizer
from trainer.teacher.self_teacher import AuxiliaryLogprobs
from trainer.world import gather_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss needs besides the row."""

    channels: ChannelsConfig
    max_length: int
    """dr_grpo's length divisor, tokens."""
    reduce_each: bool = False
    """Sum gradients over ranks after each row instead of after the last."""


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    rows: Sequence[PackedRow],
    totals: StepTotals,
    settings: LossSettings,
    *,
    step: int,
    ratio: float,
    auxiliary: Sequence[AuxiliaryLogprobs] | None = None,
) -> dict[str, float]:
    """Take step `step` with the learning rate at `ratio` of its peak. Return metrics of the whole step, all ranks.

    Every rank must bring the same number of rows; `auxiliary` has one entry a row. Raises NonFiniteError, on all ranks,
    before anything is changed.
    """
    started = time.monotonic()
    sums = _accumulate(policy, rows, auxiliary or [AuxiliaryLogprobs() for _ in rows], totals, settings, step)
    norm = optimizer.grad_norm()
    values = _reduce(sums.metrics, norm)
    if not (math.isfinite(values["grad_norm"]) and math.isfinite(values["loss/total"])):
        optimizer.zero_grad()
        raise NonFiniteError(_blame(step, rows, sums, values["grad_norm"]))
    computed = time.monotonic()
    lr = optimizer.step(ratio, norm)
    metrics = channel_metrics({name: value for name, value in values.items() if name != "grad_norm"})
    return (
        {"sdpo/turns": 0.0, "dpo/pairs": 0.0}
        | metrics
        | {
            "tokens/trained": values["policy/tokens"],
            "optim/grad_norm": values["grad_norm"],
            "optim/lr": lr,
            "time/forward_backward_s": computed - started,
            "time/optimizer_s": time.monotonic() - computed,
        }
    )


@dataclass(slots=True)
class _RowSums:
    """Results of the rows, still on the device."""

    losses: list[Tensor] = field(default_factory=list)
    """Each row's share of the loss."""
    not_finite: list[Tensor] = field(default_factory=list)
    """For each row, how many statistics of each document are NaN or infinite."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Metric sums of this rank."""


def _accumulate(
    policy: Policy,
    rows: Sequence[PackedRow],
    auxiliary: Sequence[AuxiliaryLogprobs],
    totals: StepTotals,
    settings: LossSettings,
    step: int,
) -> _RowSums:
    """Run forward and backward of each row; the gradients then lie in the parameters."""
    sums = _RowSums()
    for index, (row, of_row) in enumerate(zip(rows, auxiliary, strict=True)):
        policy.set_requires_gradient_sync(settings.reduce_each or index == len(rows) - 1)
        parts, not_finite = loss_of(policy, row, totals, settings, step=step, auxiliary=of_row)
        parts.total.backward()
        sums.losses.append(parts.total.detach())
        sums.not_finite.append(not_finite)
        for name, value in parts.sums.items():
            sums.metrics[name] = sums.metrics[name] + value if name in sums.metrics else value.double()
    return sums


def loss_of(
    policy: Policy,
    row: PackedRow,
    totals: StepTotals,
    settings: LossSettings,
    *,
    step: int = 1,
    auxiliary: AuxiliaryLogprobs | None = None,
) -> tuple[LossParts, Tensor]:
    """Return one row's share of the step's loss, and how many statistics of each of its documents are not finite."""
    auxiliary = auxiliary or AuxiliaryLogprobs()
    statistics = policy(row, auxiliary.teacher)
    inputs = channel_inputs(row, statistics, auxiliary, settings.channels)
    parts = total_loss(inputs, totals, settings.channels, settings.max_length, step)
    bad_R = ~torch.isfinite(statistics.logprobs_R.detach())
    if statistics.divergence_D is not None:
        bad_R[len(bad_R) - len(statistics.divergence_D) :] |= ~torch.isfinite(statistics.divergence_D.detach())
    not_finite = torch.zeros(len(row.names), device=bad_R.device).index_add_(0, row.document_R, bad_R.float())
    return parts, not_finite


def channel_inputs(
    row: PackedRow, statistics: TokenStatistics, auxiliary: AuxiliaryLogprobs, channels: ChannelsConfig
) -> ChannelInputs:
    """Return the inputs of the loss terms that are on; one without tokens in this row is empty but has a gradient."""
    return ChannelInputs(
        policy=PolicyTokens(
            logprobs_T=_picked(statistics.logprobs_R, row.policy_T),
            sampler_logprobs_T=row.sampler_logprobs_T,
            advantages_T=row.advantages_T,
            entropy_T=_picked(statistics.entropy_R, row.policy_T),
            sequence_T=row.sequence_T,
            sequences=row.sequences,
            reference_logprobs_T=auxiliary.reference_logprobs_T,
        ),
        sdpo=_sdpo_tokens(row, statistics) if channels.sdpo.weight > 0 else None,
        replay_dpo=None if row.pairs is None else _pair_tokens(row.pairs, statistics, auxiliary.reference_S),
    )


def _picked(values_R: Tensor, rows: Tensor | None) -> Tensor:
    return values_R if rows is None else values_R[rows]


def _sdpo_tokens(row: PackedRow, statistics: TokenStatistics) -> SdpoTokens:
    """Take the head's last D rows. All of them were sampled, whether or not the policy loss trains them."""
    empty = statistics.logprobs_R[:0]
    return SdpoTokens(
        divergence_D=empty if statistics.divergence_D is None else statistics.divergence_D,
        logprobs_D=statistics.logprobs_R[len(statistics.logprobs_R) - len(row.turn_D) :],
        sampler_logprobs_D=row.sampler_logprobs_D,
        weight_D=row.weight_D,
        turn_D=row.turn_D,
        turns=row.turns,
        teacher_entropy_D=empty.detach() if statistics.divergence_D is None else statistics.teacher_entropy_D,
    )


def _pair_tokens(pairs: PairsRow, statistics: TokenStatistics, reference_S: Tensor | None) -> PairTokens:
    sums_S = sum_by(statistics.logprobs_R[pairs.answer_A], pairs.side_A, 2 * pairs.pairs)
    return PairTokens(
        chosen_logprobs_P=sums_S[0::2],
        rejected_logprobs_P=sums_S[1::2],
        chosen_length_P=pairs.length_S[0::2],
        rejected_length_P=pairs.length_S[1::2],
        reference_chosen_P=None if reference_S is None else reference_S[0::2],
        reference_rejected_P=None if reference_S is None else reference_S[1::2],
        epsilon_P=pairs.epsilon_P,
    )


def _reduce(metrics: dict[str, Tensor], norm: Tensor) -> dict[str, float]:
    """Sum over ranks and bring the sums and the norm to the host: one collective, one read."""
    stacked = torch.stack(list(metrics.values()))
    dist.all_reduce(stacked)
    values = torch.cat([stacked, norm.double().reshape(1)]).tolist()
    return dict(zip([*metrics, "grad_norm"], values, strict=True))


def _blame(step: int, rows: Sequence[PackedRow], sums: _RowSums, norm: float) -> str:
    """Name the micro-batches that are not finite. A collective; every rank gets the same text."""
    bad = [index for index, loss in enumerate(torch.stack(sums.losses).tolist()) if not math.isfinite(loss)]
    text = "; ".join(
        f"micro-batch {index} of rank {dist.get_rank()} ({_culprits(rows[index], sums.not_finite[index])})"
        for index in bad
    )
    texts = [text for text in gather_texts(text) if text]
    culprits = "loss of " + "; ".join(texts) if texts else "gradient, although every micro-batch's loss is finite"
    return (
        f"step {step}: NaN or infinity in the {culprits} (gradient norm {norm}). The parameters are unchanged; lower "
        "trainer.optim.lr or look at these samples, then continue with --resume"
    )


def _culprits(row: PackedRow, not_finite: Tensor) -> str:
    """Name the samples and pairs whose logits are not finite; all of the row's where every logit is."""
    names = dict.fromkeys(name for name, count in zip(row.names, not_finite.tolist(), strict=True) if count)
    return f"logits of {', '.join(names)}" if names else f"samples {', '.join(row.sample_ids)}"
