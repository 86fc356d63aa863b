"""Off-policy corrections for the gap between the sampler's policy mu and the trainer's policy pi.

Three roles, always kept apart:

    pi   the policy that is trained; its log-probability has the gradient
    mu   the policy as the inference engine sampled it: older by the staleness, computed by other kernels
    old  the base of the ratio r = pi / old that the objective clips

With rho = pi / mu, detached:

    none    old = mu; r and its clip carry the whole correction
    opsm    old = mu; drops sequences with A < 0 and mean log(1 / rho) > delta    DeepSeek-V3.2, arXiv 2512.02556 eq. 9
    dppo    old = mu; drops tokens outside a trust region, caps r elsewhere, no clip    arXiv 2602.04879
    tis     old = pi; weight min(rho, C)                                                arXiv 1802.01561 (rho-bar)
    mis     old = pi; weight rho where rho <= C, else 0
    icepop  old = pi; weight rho where low <= rho <= high, else 0                       IcePop, arXiv 2510.18855

old = pi means the trainer's own value of pi. A batch is used once, so r is 1 in value and only has a gradient; with
old = mu the gap would count twice.

Departures from the sources:
1. dppo replaces the ratio clip. A token that it does not drop may still have any ratio (pi - mu <= 0.2 holds for
   pi = 0.2, mu = 1e-5). prime-rl lets it count 20 000 times (`dppo_ratio_cap = None`). The paper (section 5.4) and verl
   truncate the ratio at a large value, and so does the default here, by a detached factor: the gradient is
   min(r, cap) A grad log pi.
2. Log ratios are clamped to +-20 before exp, so that one broken token gives a large number and not an infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.channels.tokens import PolicyTokens, bounded_exp, mean_by, sum_by
from composer_prime.config.policy import PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How tokens enter the objective. All tensors are [T]."""

    log_ratio_T: Tensor
    """log r of each token, with gradient."""
    weight_T: Tensor
    """Detached factor of the token's loss; 0 drops the token."""
    clips: bool
    """Whether the objective's ratio clip applies."""


def correct(tokens: PolicyTokens, advantages_T: Tensor, config: PolicyConfig) -> Correction:
    """Return the correction that `config.correction` names.

    `advantages_T` [T] are those that the objective multiplies with, penalties included: what decides which way a token
    is pushed also decides whether it has gone far enough.
    """
    frozen_T = tokens.logprobs_T.detach()
    from_sampler_T = tokens.logprobs_T - tokens.sampler_logprobs_T
    ones_T = torch.ones_like(tokens.sampler_logprobs_T)
    match config.correction:
        case "none":
            return Correction(log_ratio_T=from_sampler_T, weight_T=ones_T, clips=True)
        case "opsm":
            keep_T = ~opsm_drops(tokens, advantages_T, config.opsm_threshold)
            return Correction(log_ratio_T=from_sampler_T, weight_T=ones_T * keep_T, clips=True)
        case "dppo":
            drops_T = dppo_drops(frozen_T, tokens.sampler_logprobs_T, advantages_T, config.dppo_threshold)
            return Correction(log_ratio_T=from_sampler_T, weight_T=ones_T * ~drops_T, clips=False)
        case _:
            weight_T = _importance(tokens, config)
            return Correction(log_ratio_T=tokens.logprobs_T - frozen_T, weight_T=weight_T, clips=True)


def _importance(tokens: PolicyTokens, config: PolicyConfig) -> Tensor:
    """Return the detached weight [T] of tis, mis and icepop."""
    log_rho_T = tokens.logprobs_T.detach() - tokens.sampler_logprobs_T
    if config.correction == "icepop":
        rho_T = bounded_exp(log_rho_T)
        return rho_T * ((rho_T >= config.icepop_low) & (rho_T <= config.icepop_high))
    if config.correction_level == "sequence":
        log_rho_T = sum_by(log_rho_T, tokens.sequence_T, tokens.sequences)[tokens.sequence_T]
    rho_T = bounded_exp(log_rho_T)
    return rho_T.clamp(max=config.tis_cap) if config.correction == "tis" else rho_T * (rho_T <= config.mis_cap)


def dppo_drops(logprobs_T: Tensor, sampler_logprobs_T: Tensor, advantages_T: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool [T]) whose probability has moved past the trust region in the advantage's direction.

    A > 0 and pi - mu > threshold, or A <= 0 and pi - mu < -threshold. These are differences of probabilities, not
    ratios: the ratios of rare tokens are noisy, and they would be dropped first (prime-rl's default form).
    """
    moved_T = logprobs_T.exp() - sampler_logprobs_T.exp()
    return torch.where(advantages_T > 0, moved_T > threshold, moved_T < -threshold)


def opsm_drops(tokens: PolicyTokens, advantages_T: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool [T]) with A < 0 in a sequence whose mean log(mu / pi) is above `threshold` nats."""
    gap_T = tokens.sampler_logprobs_T - tokens.logprobs_T.detach()
    far = mean_by(gap_T, tokens.sequence_T, tokens.sequences) > threshold
    return (advantages_T < 0) & far[tokens.sequence_T]
