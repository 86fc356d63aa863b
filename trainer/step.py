"""One optimizer step: forward and backward over the micro-batches, one look at the numbers, one update.

    for each micro-batch:  L_k = share of the step's loss (global denominators);  backward accumulates sum_k dL_k
    last micro-batch:      FSDP sums the gradients over ranks
    then, once:            sums and gradient norm to the host; all finite -> clip, update; else -> NonFiniteError

No number is read between micro-batches, so an accelerator never waits for the host; and the update happens only after
the look, so parameters are untouched when a step fails.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from composer_prime.channels.total import ChannelInputs, LossParts, channel_metrics, total_loss
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import NonFiniteError
from composer_prime.wire.types import StepTotals
from trainer.optim import Optimizer
from trainer.policy import Policy
from trainer.rows import PackedRow
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
) -> dict[str, float]:
    """Take step `step` with the learning rate at `ratio` of its peak; metrics are of the whole step, all ranks.

    Every rank must bring the same number of rows. Raises NonFiniteError, on all ranks, before anything is changed.
    """
    started = time.monotonic()
    shares, sums = _accumulate(policy, rows, totals, settings)
    norm = optimizer.grad_norm()
    values = _reduce(sums, norm)
    if not (math.isfinite(values["grad_norm"]) and math.isfinite(values["loss/total"])):
        optimizer.zero_grad()
        raise NonFiniteError(_blame(step, rows, shares, values["grad_norm"]))
    computed = time.monotonic()
    lr = optimizer.step(ratio, norm)
    return channel_metrics({name: value for name, value in values.items() if name != "grad_norm"}) | {
        "tokens/trained": values["policy/tokens"],
        "optim/grad_norm": values["grad_norm"],
        "optim/lr": lr,
        "time/forward_backward_s": computed - started,
        "time/optimizer_s": time.monotonic() - computed,
    }


def _accumulate(
    policy: Policy, rows: Sequence[PackedRow], totals: StepTotals, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each row's loss share [rows] and the summed metric sums of this rank; gradients lie in the parameters."""
    shares: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    for index, row in enumerate(rows):
        policy.set_requires_gradient_sync(settings.reduce_each or index == len(rows) - 1)
        parts = loss_of(policy, row, totals, settings)
        parts.total.backward()
        shares.append(parts.total.detach())
        sums = {name: sums[name] + value if name in sums else value.double() for name, value in parts.sums.items()}
    return torch.stack(shares), sums


def loss_of(policy: Policy, row: PackedRow, totals: StepTotals, settings: LossSettings) -> LossParts:
    """One row's share of the step's loss: forward pass, then the channels."""
    inputs = ChannelInputs(policy=row.policy_tokens(policy(row)))
    return total_loss(inputs, totals, settings.channels, settings.max_length)


def _reduce(sums: dict[str, Tensor], norm: Tensor) -> dict[str, float]:
    """Sums over ranks and the norm as numbers: one collective, one read."""
    stacked = torch.stack(list(sums.values()))
    dist.all_reduce(stacked)
    numbers = torch.cat([stacked, norm.double().reshape(1)]).tolist()
    return dict(zip([*sums, "grad_norm"], numbers, strict=True))


def _blame(step: int, rows: Sequence[PackedRow], shares: Tensor, norm: float) -> str:
    """Which micro-batches of which rank went wrong; every rank comes here together and gives the same text."""
    bad = [index for index, share in enumerate(shares.tolist()) if not math.isfinite(share)]
    own = "; ".join(
        f"micro-batch {index} of rank {dist.get_rank()} (samples {', '.join(rows[index].sample_ids)})" for index in bad
    )
    named = [text for text in gather_texts(own) if text]
    culprits = "loss of " + "; ".join(named) if named else "gradient, although every micro-batch's loss is finite"
    return (
        f"step {step}: NaN or infinity in the {culprits} (gradient norm {norm}). The parameters are unchanged; lower "
        "trainer.optim.lr or look at these samples, then go on with --resume"
    )
