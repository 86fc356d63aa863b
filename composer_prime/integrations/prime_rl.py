"""This project's policy losses as a custom loss of prime-rl:

    [trainer.loss]
    type = "custom"
    import_path = "composer_prime.integrations.prime_rl.composer_loss"

    [trainer.loss.kwargs]
    objective = "dapo"

prime-rl calls the function once a sequence with LossInputs (its docs/algorithms.md, "Custom Loss"), sums the results
and divides by the step's trained tokens. So the denominator is always `tokens`, and any other is refused; dr_grpo then
divides by the tokens of the step instead of a constant. Advantages come from prime-rl's algorithm: its grpo only
subtracts the mean. Its own default loss is objective = "dr_grpo" with correction = "dppo" and dppo_ratio_cap = None,
with a small pull toward the sampler.
"""

from __future__ import annotations

from typing import Any

import torch
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from composer_prime.channels.policy import policy_loss
from composer_prime.errors import ConfigError
from composer_prime.integrations.padded import flat_tokens, make_po_config
from composer_prime.wire.types import StepTotals


def composer_loss(inputs: LossInputs, objective: str = "dr_grpo", **settings: Any) -> LossOutputs:
    """Return the summed loss of one sequence's tokens; `settings` are those of [channels.policy].

    The metrics are means over the sequence: mismatch_kl, masked_fraction, clip_fraction. Raises ConfigError for an
    unknown objective or setting, another denominator than `tokens`, or one that LossInputs has no data for.
    """
    config = make_po_config(objective, **{"denominator": "tokens"} | settings)
    if config.denominator != "tokens":
        raise ConfigError(
            f"denominator is {config.denominator}, but prime-rl divides a custom loss by the tokens of the "
            "step: leave it out"
        )

    def row(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[None]

    tokens = flat_tokens(
        inputs.trainer_logprobs[None],
        inputs.inference_logprobs[None],
        inputs.advantages[None],
        inputs.loss_mask[None],
        reference_BT=row(inputs.ref_logprobs),
        weight_BT=row(inputs.loss_weights),
    )
    loss, sums = policy_loss(tokens, StepTotals(samples=1, tokens=1), config, 1)
    count = sums["tokens"].clamp(min=1)
    names = ("mismatch_kl", "masked_fraction", "clip_fraction")
    return LossOutputs(loss=loss, metrics={name: sums[name] / count for name in names})
