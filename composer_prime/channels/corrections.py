"""Off-policy corrections: what to do about the gap between the sampler's policy mu and the trainer's policy pi.

Three roles, never mixed up:

    pi   the policy that is trained; its log-probability has the gradient
    mu   the policy as the inference engine sampled it: older by the staleness, computed by other kernels
    old  the base of the ratio r = pi / old that the objective clips

`none` and `dppo` take old = mu, so r alone carries the whole correction. `tis` takes old = the trainer's own value of
pi (a batch is used once, so r is 1 in value and only has a gradient) and puts the gap into a detached weight instead;
with old = mu the gap would count twice.

Departures from the sources:
1. dppo replaces the ratio clip, as in prime-rl: a token inside the trust region keeps its full importance ratio.
2. Log ratios are clamped to +-20 before exp, so that one broken token gives a large number and not an infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.config.channels import PolicyConfig

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How one set of tokens enters the objective. All tensors are [T]."""

    log_ratio_T: Tensor
    """log r, with gradient."""
    weight_T: Tensor
    """Detached factor of the token's loss; 0 drops the token."""
    clips: bool
    """Whether the objective's ratio clip applies."""


def bounded_exp(log_T: Tensor) -> Tensor:
    """exp of a log ratio [T] clamped to +-20 nats."""
    return log_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def correct(logprobs_T: Tensor, sampler_logprobs_T: Tensor, advantages_T: Tensor, config: PolicyConfig) -> Correction:
    """The correction that `config.correction` names, for tokens with log pi, log mu and advantage [T]."""
    ones_T = torch.ones_like(sampler_logprobs_T)
    if config.correction == "none":
        return Correction(log_ratio_T=logprobs_T - sampler_logprobs_T, weight_T=ones_T, clips=True)
    frozen_T = logprobs_T.detach()
    if config.correction == "tis":  # truncated importance sampling: min(pi / mu, C), arXiv 1802.01561 (rho-bar)
        weight_T = bounded_exp(frozen_T - sampler_logprobs_T).clamp(max=config.tis_cap)
        return Correction(log_ratio_T=logprobs_T - frozen_T, weight_T=weight_T, clips=True)
    keep_T = ~dppo_drops(frozen_T, sampler_logprobs_T, advantages_T, config.dppo_threshold)
    return Correction(log_ratio_T=logprobs_T - sampler_logprobs_T, weight_T=ones_T * keep_T, clips=False)


def dppo_drops(logprobs_T: Tensor, sampler_logprobs_T: Tensor, advantages_T: Tensor, threshold: float) -> Tensor:
    """Tokens (bool [T]) whose probability has already moved past the trust region in the direction of the advantage.

    A > 0 and pi - mu > threshold, or A <= 0 and pi - mu < -threshold: differences of probabilities, not ratios, so that
    rare tokens, whose ratio is noisy, are not the first to be dropped (the form that prime-rl uses by default).
    """
    moved_T = logprobs_T.exp() - sampler_logprobs_T.exp()
    return torch.where(advantages_T > 0, moved_T > threshold, moved_T < -threshold)
