"""The policy loss inside another trainer: a GRPOTrainer of TRL 1.16 whose loss is composer_prime.channels.policy.

    trainer = OwnLossTrainer(
        model, reward_funcs=reward, args=GRPOConfig(..., scale_rewards="none", beta=0.0), train_dataset=tasks,
        policy=PolicyConfig(objective="dr_grpo"),
    )

Every trainer needs the same three things: its padded rows as flat PolicyTokens, the counts of the whole optimizer step,
and the sum of the shares (TRL's ranks average, so each share is multiplied by their number). Advantages and reference
log-probabilities come from TRL. Without vLLM it has no sampler log-probabilities, and mu is the policy at generation.
TRL's own settings of the loss (`loss_type`, `epsilon`, ...) have no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_prime.channels.policy import PolicyConfig, policy_loss, policy_metrics
from composer_prime.channels.tokens import PolicyTokens
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals

SCALE_REWARDS = {"none": "none", "std": "group"}
"""TRL's name of each advantage scaling."""


class OwnLossTrainer(GRPOTrainer):
    """GRPOTrainer with the loss that `policy` describes; every other argument is TRL's.

    Raises ConfigError when TRL's arguments would produce advantages or reference log-probabilities that `policy` does
    not expect.
    """

    args: GRPOConfig
    model: Any

    def __init__(self, *args: Any, policy: PolicyConfig, **kwargs: Any) -> None:
        self.policy = policy
        super().__init__(*args, **kwargs)
        self.longest = policy.max_completion_length or self.max_completion_length or 0
        if not self.longest:
            raise ConfigError(
                "GRPOConfig.max_completion_length is None: dr_grpo divides by it; set it here or in `policy`"
            )
        scaling, expected = self.args.scale_rewards, SCALE_REWARDS[policy.advantage_scaling]
        if scaling != expected:
            raise ConfigError(
                f"GRPOConfig.scale_rewards is {scaling!r}, but objective {policy.objective} has advantage_scaling = "
                f"{policy.advantage_scaling}: set scale_rewards = {expected!r}, or advantage_scaling"
            )
        if policy.kl.weight != self.args.beta:
            raise ConfigError(
                f"GRPOConfig.beta is {self.args.beta}, but kl.weight is {policy.kl.weight}: set both to the same value"
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        tokens = self.tokens(model, inputs)
        loss, sums = policy_loss(tokens, self.totals(inputs, tokens), self.policy, self.longest)
        for name, value in policy_metrics({name: sum_.item() for name, sum_ in sums.items()}).items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        return loss * self.accelerator.num_processes

    def tokens(self, model: Any, inputs: dict[str, Any]) -> PolicyTokens:
        completion = inputs["completion_ids"]
        mask_BT = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask_BT &= inputs["tool_mask"].bool()
        logprobs_BT, entropy_BT, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion.size(1),
            compute_entropy=True,
        )
        recorded = (inputs.get(name) for name in ("sampling_per_token_logps", "old_per_token_logps"))
        sampler_BT = next((each for each in recorded if each is not None), logprobs_BT.detach())
        advantages = inputs["advantages"]
        reference_BT = inputs.get("ref_per_token_logps")
        return PolicyTokens(
            logprobs_T=logprobs_BT[mask_BT],
            sampler_logprobs_T=sampler_BT[mask_BT],
            advantages_T=advantages.view(len(mask_BT), -1).expand_as(mask_BT)[mask_BT],
            entropy_T=entropy_BT[mask_BT],
            sequence_T=mask_BT.nonzero()[:, 0],
            sequences=len(mask_BT),
            reference_logprobs_T=None if reference_BT is None else reference_BT[mask_BT],
        )

    def totals(self, inputs: dict[str, Any], tokens: PolicyTokens) -> StepTotals:
        """Return the counts of one optimizer step, or of one evaluation batch, over all processes."""
        training = self.model.training
        parts = (self.current_gradient_accumulation_steps if training else 1) * self.accelerator.num_processes
        share = 1.0
        if training:
            share = self.current_gradient_accumulation_steps / (self.args.steps_per_generation or 1)
        return StepTotals(
            samples=tokens.sequences * parts,
            tokens=round(float(inputs["num_items_in_batch"]) * share),
            micro_batches=parts,
        )
