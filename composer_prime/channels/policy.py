"""Channel 1: policy optimisation on verifiable rewards, as pure functions of the trained tokens of a micro-batch.

Per token, with ratio r, advantage A, weight w of the off-policy correction and clip range [1 - low, 1 + high]:

    l = -w * min(r A, clip(r) A)                                     PPO, arXiv 1707.06347 eq. 7
    grpo     L = 1/B sum_i 1/L_i sum_t l                             GRPO, arXiv 2402.03300 eq. 3
    dr_grpo  L = 1/(B * max_completion_length) sum_i sum_t l         Dr. GRPO, arXiv 2503.20783; Composer 2, 2603.24477

B counts the sequences of the whole step (all ranks, all micro-batches) and is known before the first backward, so the
loss does not depend on how the step was cut into micro-batches. L_i counts the trained tokens of sequence i.

Departures from the papers:
1. r compares with the sampler's log-probabilities or the trainer's own, as the correction says (corrections.py).
2. A sequence is a root-to-leaf branch of a rollout; tokens that branches share are trained in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer_prime.channels.corrections import bounded_exp, correct
from composer_prime.config.channels import PolicyConfig
from composer_prime.wire.types import StepTotals

Sums = dict[str, Tensor]
"""Scalars that add up over micro-batches and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The trained tokens of one micro-batch, laid end to end; T may be 0."""

    logprobs_T: Tensor
    """float [T], with gradient: log pi under the sampling temperature."""
    sampler_logprobs_T: Tensor
    """float [T]: log mu, what the inference engine recorded."""
    advantages_T: Tensor
    """float [T]."""
    entropy_T: Tensor
    """float [T], detached: entropy of pi at the token, in nats."""
    sequence_T: Tensor
    """int64 [T]: which sequence of the micro-batch the token belongs to."""
    sequences: int
    """Sequences in the micro-batch."""


def token_scale(tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int) -> Tensor:
    """The factor [T] of each token's loss: 1 / (L_i B) or 1 / (B * max_length)."""
    like_T = tokens.sampler_logprobs_T
    if config.objective == "dr_grpo":
        return torch.full_like(like_T, 1.0 / (max(totals.samples, 1) * max_length))
    lengths = torch.bincount(tokens.sequence_T, minlength=tokens.sequences).to(like_T.dtype)
    return 1.0 / (lengths[tokens.sequence_T] * max(totals.samples, 1))


def policy_loss(
    tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int
) -> tuple[Tensor, Sums]:
    """This micro-batch's share of the step's loss (scalar; shares add up to the loss) and its metric sums.

    Without tokens the loss is a zero that is attached to the graph: every rank runs its backward pass.
    """
    correction = correct(tokens.logprobs_T, tokens.sampler_logprobs_T, tokens.advantages_T, config)
    ratio_T = bounded_exp(correction.log_ratio_T)
    gain_T = ratio_T * tokens.advantages_T
    if correction.clips:
        clipped_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * tokens.advantages_T
        binds_T = clipped_T.detach() < gain_T.detach()
        gain_T = torch.minimum(gain_T, clipped_T)
    else:
        binds_T = torch.zeros_like(tokens.advantages_T, dtype=torch.bool)
    loss = -(correction.weight_T * gain_T * token_scale(tokens, totals, config, max_length)).sum()
    return loss, _sums(tokens, correction.weight_T, binds_T)


@torch.no_grad()
def _sums(tokens: PolicyTokens, weight_T: Tensor, binds_T: Tensor) -> Sums:
    gap_T = (tokens.logprobs_T - tokens.sampler_logprobs_T).clamp(-20.0, 20.0)
    importance_T = gap_T.exp()
    return {
        "tokens": torch.ones_like(gap_T).sum(),
        "mismatch": (importance_T - gap_T - 1.0).sum(),
        "importance": importance_T.sum(),
        "importance_squared": importance_T.square().sum(),
        "masked": (weight_T == 0).to(gap_T.dtype).sum(),
        "clipped": binds_T.to(gap_T.dtype).sum(),
        "entropy": tokens.entropy_T.sum(),
    }


def policy_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Figures of a step from its summed sums; empty when the step trained no token.

    policy/mismatch_kl is k3(mu, pi) = E_mu[pi/mu - log(pi/mu) - 1], nats a token: an estimate of KL(mu || pi) that is
    never negative (http://joschu.net/blog/kl-approx.html). policy/ess is (sum w)^2 / (T sum w^2) of w = pi/mu, in 0..1.
    """
    count = sums["tokens"]
    if count == 0:
        return {}
    return {
        "policy/mismatch_kl": sums["mismatch"] / count,
        "policy/ess": sums["importance"] ** 2 / (count * sums["importance_squared"]),
        "policy/masked_fraction": sums["masked"] / count,
        "policy/clip_fraction": sums["clipped"] / count,
        "policy/entropy": sums["entropy"] / count,
    }
