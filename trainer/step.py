"""One optimizer step: forward and backward over the micro-batches, one look at the numbers, one update.

    for each micro-batch:  L_k = share of the step's loss (global denominators);  backward accumulates sum_k dL_k
    last micro-batch:      FSDP sums the gradients over ranks
    then, once:            sums and gradient norm to the host; all finite -> clip, update; else -> NonFiniteError

No number is read between micro-batches, so an accelerator never waits for the host; and the update happens only after
the look, so parameters are untouched when a step fails.

From the statistics of a row to what each channel takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

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
from trainer.data.rows import HintedTurnsRow, PackedRow, PairsRow
from trainer.head.head import TokenStatistics
from trainer.model.policy import Policy
from trainer.optim import Optimizer
from trainer.teacher.self_teacher import AuxiliaryLogprobs
from trainer.world import gather_texts


def channel_inputs(row: PackedRow, statistics: TokenStatistics, aid: AuxiliaryLogprobs) -> ChannelInputs:
    """Inputs of the channels that are on; one without tokens in this row is empty, and attached to the graph."""
    return ChannelInputs(
        policy=PolicyTokens(
            logprobs_T=_picked(statistics.logprobs_R, row.policy_T),
            sampler_logprobs_T=row.sampler_logprobs_T,
            advantages_T=row.advantages_T,
            entropy_T=_picked(statistics.entropy_R, row.policy_T),
            sequence_T=row.sequence_T,
            sequences=row.sequences,
            reference_logprobs_T=aid.reference_logprobs_T,
        ),
        sdpo=None if row.distilled is None else _distil_tokens(row.distilled, statistics),
        replay_dpo=None if row.pairs is None else _pair_tokens(row.pairs, statistics, aid),
    )


def _picked(values_R: Tensor, rows: Tensor | None) -> Tensor:
    return values_R if rows is None else values_R[rows]


def _distil_tokens(distilled: HintedTurnsRow, statistics: TokenStatistics) -> SdpoTokens:
    """The head's last D rows; all of them were sampled, whether or not channel 1 trains them."""
    count = len(distilled.turn_D)
    logprobs_D = statistics.logprobs_R[len(statistics.logprobs_R) - count :]
    nothing = statistics.logprobs_R[:0]
    return SdpoTokens(
        divergence_D=nothing if statistics.divergence_D is None else statistics.divergence_D,
        logprobs_D=logprobs_D,
        sampler_logprobs_D=distilled.sampler_logprobs_D,
        weight_D=distilled.weight_D,
        turn_D=distilled.turn_D,
        turns=distilled.turns,
        teacher_entropy_D=nothing.detach() if statistics.divergence_D is None else statistics.teacher_entropy_D,
    )


def _pair_tokens(pairs: PairsRow, statistics: TokenStatistics, aid: AuxiliaryLogprobs) -> PairTokens:
    sums_S = sum_by(statistics.logprobs_R[pairs.answer_A], pairs.side_A, 2 * pairs.pairs)
    reference_S = aid.reference_S
    return PairTokens(
        chosen_logprobs_P=sums_S[0::2],
        rejected_logprobs_P=sums_S[1::2],
        chosen_length_P=pairs.length_S[0::2],
        rejected_length_P=pairs.length_S[1::2],
        reference_chosen_P=None if reference_S is None else reference_S[0::2],
        reference_rejected_P=None if reference_S is None else reference_S[1::2],
        epsilon_P=pairs.epsilon_P,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss needs besides the row."""

    channels: ChannelsConfig
    max_length: int
    """dr_grpo's length divisor, tokens."""
    reduce_each: bool = False
    """Sum gradients over ranks after each row instead of after the last."""


@dataclass(slots=True)
class _Passed:
    """What the rows left behind, still on the device."""

    shares: list[Tensor]
    """Each row's loss share."""
    broken: list[Tensor]
    """Of each row, how many statistics of each document are NaN or infinite."""
    sums: dict[str, Tensor]
    """Metric sums of this rank."""


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    rows: Sequence[PackedRow],
    totals: StepTotals,
    settings: LossSettings,
    *,
    step: int,
    ratio: float,
    aids: Sequence[AuxiliaryLogprobs] | None = None,
) -> dict[str, float]:
    """Take step `step` with the learning rate at `ratio` of its peak; metrics are of the whole step, all ranks.

    Every rank must bring the same number of rows; `aids`, one a row, hold what other weights say of them. Raises
    NonFiniteError, on all ranks, before anything is changed.
    """
    started = time.monotonic()
    passed = _accumulate(policy, rows, aids or [AuxiliaryLogprobs() for _ in rows], totals, settings, step)
    norm = optimizer.grad_norm()
    values = _reduce(passed.sums, norm)
    if not (math.isfinite(values["grad_norm"]) and math.isfinite(values["loss/total"])):
        optimizer.zero_grad()
        raise NonFiniteError(_blame(step, rows, passed, values["grad_norm"]))
    computed = time.monotonic()
    lr = optimizer.step(ratio, norm)
    figures = channel_metrics({name: value for name, value in values.items() if name != "grad_norm"})
    return (
        {"sdpo/turns": 0.0, "dpo/pairs": 0.0}
        | figures
        | {
            "tokens/trained": values["policy/tokens"],
            "optim/grad_norm": values["grad_norm"],
            "optim/lr": lr,
            "time/forward_backward_s": computed - started,
            "time/optimizer_s": time.monotonic() - computed,
        }
    )


def _accumulate(
    policy: Policy,
    rows: Sequence[PackedRow],
    aids: Sequence[AuxiliaryLogprobs],
    totals: StepTotals,
    settings: LossSettings,
    step: int,
) -> _Passed:
    """Forward and backward of each row; gradients then lie in the parameters."""
    passed = _Passed([], [], {})
    for index, (row, aid) in enumerate(zip(rows, aids, strict=True)):
        policy.set_requires_gradient_sync(settings.reduce_each or index == len(rows) - 1)
        parts, broken = loss_of(policy, row, totals, settings, step=step, aid=aid)
        parts.total.backward()
        passed.shares.append(parts.total.detach())
        passed.broken.append(broken)
        for name, value in parts.sums.items():
            passed.sums[name] = passed.sums[name] + value if name in passed.sums else value.double()
    return passed


def loss_of(
    policy: Policy,
    row: PackedRow,
    totals: StepTotals,
    settings: LossSettings,
    *,
    step: int = 1,
    aid: AuxiliaryLogprobs | None = None,
) -> tuple[LossParts, Tensor]:
    """One row's share of the step's loss (forward pass, then the channels), and its documents' broken statistics."""
    aid = aid or AuxiliaryLogprobs()
    statistics = policy(row, aid.teaching)
    inputs = channel_inputs(row, statistics, aid)
    parts = total_loss(inputs, totals, settings.channels, settings.max_length, step)
    bad_R = ~torch.isfinite(statistics.logprobs_R.detach())
    if statistics.divergence_D is not None:
        bad_R[len(bad_R) - len(statistics.divergence_D) :] |= ~torch.isfinite(statistics.divergence_D.detach())
    broken = torch.zeros(len(row.names), device=bad_R.device).index_add_(0, row.document_R, bad_R.float())
    return parts, broken


def _reduce(sums: dict[str, Tensor], norm: Tensor) -> dict[str, float]:
    """Sums over ranks and the norm as numbers: one collective, one read."""
    stacked = torch.stack(list(sums.values()))
    dist.all_reduce(stacked)
    numbers = torch.cat([stacked, norm.double().reshape(1)]).tolist()
    return dict(zip([*sums, "grad_norm"], numbers, strict=True))


def _blame(step: int, rows: Sequence[PackedRow], passed: _Passed, norm: float) -> str:
    """Which micro-batches of which rank went wrong; every rank comes here together and gives the same text."""
    bad = [index for index, share in enumerate(torch.stack(passed.shares).tolist()) if not math.isfinite(share)]
    own = "; ".join(
        f"micro-batch {index} of rank {dist.get_rank()} ({_culprits(rows[index], passed.broken[index])})"
        for index in bad
    )
    named = [text for text in gather_texts(own) if text]
    culprits = "loss of " + "; ".join(named) if named else "gradient, although every micro-batch's loss is finite"
    return (
        f"step {step}: NaN or infinity in the {culprits} (gradient norm {norm}). The parameters are unchanged; lower "
        "trainer.optim.lr or look at these samples, then go on with --resume"
    )


def _culprits(row: PackedRow, broken: Tensor) -> str:
    """The samples and pairs whose logits are not finite; all of the row's where every logit is."""
    named = dict.fromkeys(name for name, count in zip(row.names, broken.tolist(), strict=True) if count)
    return f"logits of {', '.join(named)}" if named else f"samples {', '.join(row.sample_ids)}"
