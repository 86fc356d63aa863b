"""The whole loss: the sum of the channels, each over its own tokens and its own global denominator.

    L = L_policy

A channel is a module with a token noun, a pure loss and a metrics function. One that is to join the sum gets a field in
`ChannelInputs`, a term in `total_loss` and its metrics in `channel_metrics`; without tokens it must give a zero that is
attached to the graph, so that FSDP ranks stay in step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from composer_prime.channels.policy import PolicyTokens, Sums, policy_loss, policy_metrics
from composer_prime.config.channels import ChannelsConfig
from composer_prime.wire.types import StepTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelInputs:
    """What one forward pass gave each channel."""

    policy: PolicyTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """One micro-batch's share of the step's loss."""

    total: Tensor
    """Scalar, with gradient."""
    sums: Sums
    """Detached scalars that add up over micro-batches and ranks: `loss/...` and each channel's own, prefixed."""


def total_loss(inputs: ChannelInputs, totals: StepTotals, config: ChannelsConfig, max_length: int) -> LossParts:
    """Sum of the channels. `max_length` is dr_grpo's constant divisor, `max_completion_length(config, context)`."""
    policy, policy_sums = policy_loss(inputs.policy, totals, config.policy, max_length)
    sums = {"loss/policy": policy.detach()} | {f"policy/{name}": value for name, value in policy_sums.items()}
    return LossParts(total=policy, sums=sums | {"loss/total": policy.detach()})


def channel_metrics(sums: dict[str, float]) -> dict[str, float]:
    """A step's metrics from sums that were added over all its micro-batches and ranks."""
    policy = {name.removeprefix("policy/"): value for name, value in sums.items() if name.startswith("policy/")}
    losses = {name: value for name, value in sums.items() if name.startswith("loss/")}
    return losses | policy_metrics(policy)


def max_completion_length(config: ChannelsConfig, max_context: int) -> int:
    """dr_grpo's length divisor in tokens: the configured one, else the model's context."""
    return config.policy.max_completion_length or max_context
