"""The whole loss: the sum of the channels, each over its own tokens and its own global denominator.

    L = L_policy + alpha(step) L_sdpo + beta(step) L_replay_dpo

A channel whose weight is 0 at a step adds nothing at all, so that alpha = beta = 0 is channel 1 to the last bit. A
channel with a weight but without tokens in this micro-batch is a zero that is attached to the graph, so that FSDP ranks
stay in step. Metric sums of a channel are there whenever its input is, whatever its weight at the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from composer_prime.channels.policy import policy_loss, policy_metrics
from composer_prime.channels.replay_dpo import PairTokens, replay_dpo_loss, replay_dpo_metrics
from composer_prime.channels.sdpo import SdpoTokens, sdpo_loss, sdpo_metrics
from composer_prime.channels.tokens import PolicyTokens, Sums
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelInputs:
    """What one forward pass gave each channel; None for a channel that the configuration turns off."""

    policy: PolicyTokens
    sdpo: SdpoTokens | None = None
    replay_dpo: PairTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """One micro-batch's share of the step's loss."""

    total: Tensor
    """Scalar, with gradient."""
    sums: Sums
    """Detached scalars that add up over micro-batches and ranks: `loss/...` and each channel's own, prefixed."""


def total_loss(
    inputs: ChannelInputs, totals: StepTotals, config: ChannelsConfig, max_length: int, step: int = 1
) -> LossParts:
    """Sum of the channels at `step` (from 1). `max_length` is the constant length divisor of channel 1, in tokens
    (`max_completion_length(config, context)`).

    Raises ConfigError when a channel has a weight, but no input.
    """
    _check(inputs, config)
    total, sums = policy_loss(inputs.policy, totals, config.policy, max_length)
    losses = {"loss/policy": total.detach()}
    sums = _prefixed("policy", sums)
    if inputs.sdpo is not None:
        loss, own = sdpo_loss(inputs.sdpo, totals, config.sdpo)
        total = _plus(total, config.sdpo.weight_at(step), loss)
        losses, sums = losses | {"loss/sdpo": loss.detach()}, sums | _prefixed("sdpo", own)
    if inputs.replay_dpo is not None:
        loss, own = replay_dpo_loss(inputs.replay_dpo, totals, config.replay_dpo)
        total = _plus(total, config.replay_dpo.weight_at(step), loss)
        losses, sums = losses | {"loss/replay_dpo": loss.detach()}, sums | _prefixed("dpo", own)
    return LossParts(total=total, sums=losses | sums | {"loss/total": total.detach()})


def _plus(total: Tensor, weight: float, loss: Tensor) -> Tensor:
    return total if weight == 0 else total + weight * loss


def _prefixed(channel: str, sums: Sums) -> Sums:
    return {f"{channel}/{name}": value for name, value in sums.items()}


def _check(inputs: ChannelInputs, config: ChannelsConfig) -> None:
    for name, weight, given in (
        ("sdpo", config.sdpo.weight, inputs.sdpo),
        ("replay_dpo", config.replay_dpo.weight, inputs.replay_dpo),
    ):
        if weight > 0 and given is None:
            raise ConfigError(
                f"channels.{name}.weight is {weight}, but this trainer brought no input for the channel: set "
                f"channels.{name}.weight = 0"
            )


def channel_metrics(sums: dict[str, float]) -> dict[str, float]:
    """A step's metrics from sums that were added over all its micro-batches and ranks."""
    metrics = {name: value for name, value in sums.items() if name.startswith("loss/")}
    figures = {"policy": policy_metrics, "sdpo": sdpo_metrics, "dpo": replay_dpo_metrics}
    for channel, of_channel in figures.items():
        prefix = f"{channel}/"
        own = {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
        metrics |= of_channel(own) if own else {}
    return metrics


def max_completion_length(config: ChannelsConfig, max_context: int) -> int:
    """Channel 1's constant length divisor in tokens: the configured one, else the model's context."""
    return config.policy.max_completion_length or max_context
