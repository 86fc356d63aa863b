"""From the padded tensors [B, T] of other trainers to the flat tokens that the policy loss takes."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from composer_prime.channels.policy import PolicyConfig
from composer_prime.channels.tokens import PolicyTokens
from composer_prime.config.problems import wrong_config


def flat_tokens(
    logprobs_BT: Tensor,
    sampler_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    entropy_BT: Tensor | None = None,
    reference_BT: Tensor | None = None,
    weight_BT: Tensor | None = None,
) -> PolicyTokens:
    """Return the tokens where `mask_BT` is not 0; every row is one sequence. `advantages_BT` may be [B, 1].

    A sampler's log-probability that is NaN (the engine could not score the token) counts as the policy's own: ratio 1.
    """
    mask_BT = mask_BT.bool()
    rows_BT = torch.arange(mask_BT.shape[0], device=mask_BT.device)[:, None].expand_as(mask_BT)
    frozen_BT = logprobs_BT.detach()
    sampler_BT = torch.where(sampler_BT.isnan(), frozen_BT, sampler_BT)
    entropies_BT = torch.zeros_like(frozen_BT) if entropy_BT is None else entropy_BT
    return PolicyTokens(
        logprobs_T=logprobs_BT[mask_BT],
        sampler_logprobs_T=sampler_BT[mask_BT],
        advantages_T=advantages_BT.expand_as(mask_BT)[mask_BT],
        entropy_T=entropies_BT[mask_BT],
        sequence_T=rows_BT[mask_BT],
        sequences=mask_BT.shape[0],
        reference_logprobs_T=None if reference_BT is None else reference_BT[mask_BT],
        weight_T=None if weight_BT is None else weight_BT.expand_as(mask_BT)[mask_BT],
    )


def make_po_config(objective: str = "dr_grpo", **settings: Any) -> PolicyConfig:
    """Return the settings of `objective`: denominator, ratio, clip range and scaling of its paper unless given.

    Raises ConfigError for an unknown objective or setting (with the nearest known one) or a wrong value.
    """
    try:
        return PolicyConfig.model_validate({"objective": objective, **settings})
    except ValidationError as error:
        raise wrong_config(error, [], section=("channels", "policy")) from None
