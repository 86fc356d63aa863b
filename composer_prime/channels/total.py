"""The whole loss: the sum of its terms, each over its own tokens and its own global denominator.

    L = L_policy + alpha(step) L_sdpo + beta(step) L_replay_dpo + gamma(step) L_sft

A term whose weight is 0 at a step adds nothing at all, so alpha = beta = gamma = 0 is the policy loss to the last bit.
A term with a weight but without tokens in this micro-batch is a zero that is attached to the graph, so FSDP ranks stay
in step. A term's metric sums are there whenever its input is, whatever its weight at the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from composer_prime.channels.policy import PolicyLoss, policy_loss, policy_metrics
from composer_prime.channels.replay_dpo import PairTokens, replay_dpo_loss, replay_dpo_metrics
from composer_prime.channels.sdpo import SdpoTokens, sdpo_loss, sdpo_metrics
from composer_prime.channels.sft import sft_loss, sft_metrics
from composer_prime.channels.tokens import PolicyTokens, Sums
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelInputs:
    """The tokens of each loss term, from one forward pass; None for a term that the configuration turns off."""

    policy: PolicyTokens
    sdpo: SdpoTokens | None = None
    replay_dpo: PairTokens | None = None
    sft_logprobs_E: Tensor | None = None
    """float [E], with gradient: log-probabilities of demonstrated tokens at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """One micro-batch's share of the step's loss."""

    total: Tensor
    """Scalar, with gradient."""
    sums: Sums
    """Detached scalars that add up over micro-batches and ranks: `loss/...` and those of each term, prefixed."""


def total_loss(
    inputs: ChannelInputs,
    totals: StepTotals,
    config: ChannelsConfig,
    max_length: int,
    step: int = 1,
    policy: PolicyLoss = policy_loss,
) -> LossParts:
    """Return the sum of the terms at `step` (from 1).

    `max_length` is the policy loss's constant length divisor, in tokens; `policy` the policy loss.
    Raises ConfigError when a term has a weight, but no input.
    """
    _check(inputs, config)
    total, sums = policy(inputs.policy, totals, config.policy, max_length)
    losses = {"loss/policy": total.detach()}
    sums = _prefixed("policy", sums)
    if inputs.sdpo is not None:
        loss, sdpo_sums = sdpo_loss(inputs.sdpo, totals, config.sdpo)
        alpha = config.sdpo.weight_at(step)
        total = total if alpha == 0 else total + alpha * loss
        losses, sums = losses | {"loss/sdpo": loss.detach()}, sums | _prefixed("sdpo", sdpo_sums)
    if inputs.replay_dpo is not None:
        loss, dpo_sums = replay_dpo_loss(inputs.replay_dpo, totals, config.replay_dpo)
        beta = config.replay_dpo.weight_at(step)
        total = total if beta == 0 else total + beta * loss
        losses, sums = losses | {"loss/replay_dpo": loss.detach()}, sums | _prefixed("dpo", dpo_sums)
    if inputs.sft_logprobs_E is not None:
        loss, sft_sums = sft_loss(inputs.sft_logprobs_E, totals)
        gamma = config.sft.weight_at(step)
        total = total if gamma == 0 else total + gamma * loss
        losses, sums = losses | {"loss/sft": loss.detach()}, sums | _prefixed("sft", sft_sums)
    return LossParts(total=total, sums=losses | sums | {"loss/total": total.detach()})


def _prefixed(term: str, sums: Sums) -> Sums:
    return {f"{term}/{name}": value for name, value in sums.items()}


def _check(inputs: ChannelInputs, config: ChannelsConfig) -> None:
    for name, weight, tokens in (
        ("sdpo", config.sdpo.weight, inputs.sdpo),
        ("replay_dpo", config.replay_dpo.weight, inputs.replay_dpo),
        ("sft", config.sft.weight, inputs.sft_logprobs_E),
    ):
        if weight > 0 and tokens is None:
            raise ConfigError(
                f"channels.{name}.weight is {weight}, but the batch has no input for this loss term: set "
                f"channels.{name}.weight = 0"
            )


def channel_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics from sums that were added over all its micro-batches and ranks."""
    metrics = {name: value for name, value in sums.items() if name.startswith("loss/")}
    of_terms = {"policy": policy_metrics, "sdpo": sdpo_metrics, "dpo": replay_dpo_metrics, "sft": sft_metrics}
    for term, term_metrics in of_terms.items():
        prefix = f"{term}/"
        term_sums = {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
        metrics |= term_metrics(term_sums) if term_sums else {}
    return metrics
