"""This project's loss inside TRL: a GRPOTrainer whose loss is the sum of the loss terms.

    trainer = ComposerGRPOTrainer(
        model, reward_funcs=reward, args=GRPOConfig(..., scale_rewards="none"), train_dataset=tasks,
        channels=ChannelsConfig(policy=make_po_config("dr_grpo")),
    )

The loss and its denominators are ours. SDPO and replay-DPO enter through `other_channels`, which a subclass overrides:
TRL's batches carry neither hints nor pairs. Without vLLM TRL has no sampler log-probabilities, and mu is the policy at
generation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_prime.channels.replay_dpo import PairTokens
from composer_prime.channels.sdpo import SdpoTokens
from composer_prime.channels.term import channel_metrics, total_loss
from composer_prime.channels.tokens import PolicyTokens
from composer_prime.config.channels import ChannelsConfig
from composer_prime.errors import ConfigError
from composer_prime.integrations.padded import flat_tokens
from composer_prime.wire.types import StepTotals

SCALE_REWARDS = {"none": "none", "std": "group"}
"""TRL's name of each advantage scaling."""


class ComposerGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with the loss of `channels`; every other argument is TRL's.

    Raises ConfigError when TRL's arguments would produce advantages or reference log-probabilities that `channels` does
    not expect.
    """

    args: GRPOConfig
    model: Any

    def __init__(self, *args: Any, channels: ChannelsConfig | None = None, **kwargs: Any) -> None:
        self.channels = channels or ChannelsConfig()
        super().__init__(*args, **kwargs)
        _check(self.channels, self.args)

    def other_channels(self, model: Any, inputs: dict[str, Any]) -> tuple[SdpoTokens | None, PairTokens | None]:
        """Return the tokens of SDPO and replay-DPO for this micro-batch; override it to provide them.

        The step's denominators assume the same counts in every micro-batch.
        """
        return None, None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        sdpo, replay_dpo = self.other_channels(model, inputs)
        tokens = self._policy_tokens(model, inputs)
        totals = self._totals(inputs, tokens, replay_dpo)
        terms = self.channels.terms(self._max_length())
        given = {"policy": tokens, "sdpo": sdpo, "replay_dpo": replay_dpo}
        given = {name: value for name, value in given.items() if value is not None}
        parts = total_loss(terms, given, totals, self.state.global_step + 1)
        metrics = channel_metrics(terms, {name: value.item() for name, value in parts.sums.items()})
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        return parts.total * self.accelerator.num_processes  # TRL's ranks average their gradients

    def _max_length(self) -> int:
        length = self.channels.policy.max_completion_length or self.max_completion_length
        if length is None:
            raise ConfigError(
                "neither channels.policy.max_completion_length nor GRPOConfig.max_completion_length is set: "
                "dr_grpo divides by it; set one of them"
            )
        return length

    def _policy_tokens(self, model: Any, inputs: dict[str, Any]) -> PolicyTokens:
        completion, mask_BT = inputs["completion_ids"], inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask_BT = mask_BT * inputs["tool_mask"]
        logprobs_BT, entropy_BT, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion.size(1),
            compute_entropy=True,
        )
        sampler_BT = inputs.get("sampling_per_token_logps")
        if sampler_BT is None:
            sampler_BT = inputs.get("old_per_token_logps")
        advantages = inputs["advantages"]
        return flat_tokens(
            logprobs_BT,
            logprobs_BT.detach() if sampler_BT is None else sampler_BT,
            advantages[:, None] if advantages.dim() == 1 else advantages,
            mask_BT,
            entropy_BT=entropy_BT,
            reference_BT=inputs.get("ref_per_token_logps"),
        )

    def _totals(self, inputs: dict[str, Any], tokens: PolicyTokens, pairs: PairTokens | None) -> StepTotals:
        """Return the counts of one optimizer step, or of one evaluation batch, over all processes."""
        training = self.model.training
        parts = (self.current_gradient_accumulation_steps if training else 1) * self.accelerator.num_processes
        share = 1.0
        if training:
            share = self.current_gradient_accumulation_steps / (self.args.steps_per_generation or 1)
        return StepTotals(
            samples=tokens.sequences * parts,
            tokens=round(float(inputs["num_items_in_batch"]) * share),
            units={} if pairs is None else {"replay_dpo": pairs.epsilon_P.numel() * parts},
            micro_batches=parts,
        )


def _check(channels: ChannelsConfig, args: GRPOConfig) -> None:
    policy = channels.policy
    scaling, expected = args.scale_rewards, SCALE_REWARDS[policy.advantage_scaling]
    if scaling != expected:
        raise ConfigError(
            f"GRPOConfig.scale_rewards is {scaling!r}, but objective {policy.objective} has advantage_scaling = "
            f"{policy.advantage_scaling}: set scale_rewards = {expected!r}, or advantage_scaling"
        )
    if policy.kl.weight != args.beta:
        raise ConfigError(
            f"GRPOConfig.beta is {args.beta}, but the KL penalty's weight is {policy.kl.weight}: set both to the "
            "same value"
        )
