"""The policy loss: policy optimization on verifiable rewards, as pure functions of a micro-batch's trained tokens.

Per token, with ratio r, advantage A, weight w of the off-policy correction and clip range [1 - low, 1 + high]:

    l = -w * min(r A, clip(r) A)                                     PPO, arXiv 1707.06347 eq. 7
    grpo     L = 1/B sum_i 1/L_i sum_t l                             GRPO, arXiv 2402.03300 eq. 3
    dr_grpo  L = 1/(B * max_completion_length) sum_i sum_t l         Dr. GRPO, arXiv 2503.20783; Composer 2, 2603.24477
    dapo     L = 1/T sum_i sum_t l, high = 0.28                      DAPO, arXiv 2503.14476
    bnpo     L = 1/M sum_m 1/T_m sum_t l                             a mean over micro-batches m of token means
    gspo     grpo with r = exp(mean_t log r_t), one for a sequence   GSPO, arXiv 2507.18071 eq. 5-7
    cispo    l = -w * detach(min(r, cap)) A log pi, L as in dapo     MiniMax-M1, arXiv 2506.13585 eq. 4-5

B and T count the sequences and trained tokens of the whole step (all ranks, all micro-batches). They are known before
the first backward pass, so the loss does not depend on how the step was cut into micro-batches; bnpo's does, by
definition. L_i counts the trained tokens of sequence i. The dual clip bounds r by c where A < 0 (arXiv 1912.09729).

Departures from the papers:
1. r compares with the sampler's log-probabilities or the trainer's own, depending on the correction (corrections.py).
2. A sequence is a root-to-leaf branch of a rollout; tokens that branches share are trained in one of them.
3. Objective, denominator, ratio level and correction are separate settings; an objective's name sets their defaults.
4. High-entropy tokens (arXiv 2506.01939) are chosen by a floor in nats. A quantile of the micro-batch would make the
   loss depend on how the step was cut.
5. DAPO leaves out answers that a limit cut short. Here the orchestrator does so (orchestrator.train_truncated).
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer_prime.channels.corrections import Correction, correct
from composer_prime.channels.kl import estimate, kl_loss, penalized_advantages
from composer_prime.channels.tokens import PolicyTokens, Sums, bounded, bounded_exp, capped, lengths_of, mean_by
from composer_prime.config.policy import PolicyConfig
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals


def policy_loss(tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int) -> tuple[Tensor, Sums]:
    """Return this micro-batch's share of the step's policy loss (a scalar; shares add up) and its metric sums.

    Without tokens the loss is a zero that is attached to the graph: every rank runs its backward pass. Raises
    ConfigError when reference log-probabilities or an entropy gradient are configured, but missing.
    """
    advantages_T = penalized_advantages(tokens, config)
    correction = correct(tokens, advantages_T, config)
    ratio_T = bounded_exp(_at_level(correction.log_ratio_T, tokens, config))
    gain_T, binds_T = _surrogate(tokens, advantages_T, ratio_T, correction, config)
    weight_T = correction.weight_T
    if config.entropy_floor > 0:
        weight_T = weight_T * (tokens.entropy_T.detach() >= config.entropy_floor)
    token_loss_T = -(weight_T * gain_T)
    penalty_T = kl_loss(tokens, ratio_T if correction.clips else capped(ratio_T, config.dppo_ratio_cap), config)
    if penalty_T is not None:
        token_loss_T = token_loss_T + penalty_T
    if config.drift_weight > 0:
        drift_T = (tokens.logprobs_T - tokens.sampler_logprobs_T).square()
        token_loss_T = token_loss_T + config.drift_weight * drift_T
    loss = (token_loss_T * _token_scale(tokens, totals, config, max_length)).sum()
    if config.entropy_weight > 0:
        loss = loss - config.entropy_weight * _entropy(tokens).sum() / max(totals.tokens, 1)
    return loss, _sums(tokens, weight_T, binds_T)


def _token_scale(tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int) -> Tensor:
    """Return the factor [T] of each token's loss: its own weight over what `config.denominator` divides by."""
    scale_T = _inverse_denominator(tokens, totals, config, max_length)
    return scale_T if tokens.weight_T is None else scale_T * tokens.weight_T


def _inverse_denominator(tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int) -> Tensor:
    like_T = tokens.sampler_logprobs_T
    match config.denominator:
        case "constant":
            return torch.full_like(like_T, 1.0 / (max(totals.samples, 1) * max_length))
        case "tokens":
            return torch.full_like(like_T, 1.0 / max(totals.tokens, 1))
        case "micro_batch":
            return torch.full_like(like_T, 1.0 / (max(like_T.numel(), 1) * max(totals.micro_batches, 1)))
        case "sequence":
            lengths = lengths_of(tokens.sequence_T, tokens.sequences, like_T.dtype)
            return 1.0 / (lengths[tokens.sequence_T] * max(totals.samples, 1))


def _at_level(log_ratio_T: Tensor, tokens: PolicyTokens, config: PolicyConfig) -> Tensor:
    """Return log r [T]: each token's own, or its sequence's mean (GSPO eq. 7)."""
    if config.ratio_level == "token":
        return log_ratio_T
    return mean_by(log_ratio_T, tokens.sequence_T, tokens.sequences)[tokens.sequence_T]


def _surrogate(
    tokens: PolicyTokens, advantages_T: Tensor, ratio_T: Tensor, correction: Correction, config: PolicyConfig
) -> tuple[Tensor, Tensor]:
    """Return each token's gain before its weight [T], and where a bound of the ratio binds (bool [T])."""
    if config.objective == "cispo":
        frozen_T = ratio_T.detach()
        gain_T = frozen_T.clamp(max=config.cispo_cap) * advantages_T * tokens.logprobs_T  # CISPO, 2506.13585 eq. 4-5
        return gain_T, frozen_T > config.cispo_cap
    if not correction.clips:
        capped_T = capped(ratio_T, config.dppo_ratio_cap)
        return capped_T * advantages_T, capped_T.detach() < ratio_T.detach()
    bounded_T = ratio_T if config.dual_clip is None else ratio_T.clamp(max=config.dual_clip)  # 1912.09729
    gain_T = bounded_T * advantages_T
    clipped_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_T
    binds_T = (clipped_T.detach() < gain_T.detach()) | (bounded_T.detach() < ratio_T.detach())
    return torch.minimum(gain_T, clipped_T), binds_T  # PPO, 1707.06347 eq. 7


def _entropy(tokens: PolicyTokens) -> Tensor:
    """Return the entropies [T] after a check for a gradient."""
    if tokens.logprobs_T.requires_grad and not tokens.entropy_T.requires_grad:
        raise ConfigError(
            "channels.policy.entropy_weight is above 0, but the entropies came without a gradient: set it to 0, or "
            "compute the entropies with one"
        )
    return tokens.entropy_T


@torch.no_grad()
def _sums(tokens: PolicyTokens, weight_T: Tensor, binds_T: Tensor) -> Sums:
    gap_T = bounded(tokens.logprobs_T - tokens.sampler_logprobs_T)
    importance_T = gap_T.exp()
    sums = {
        "tokens": torch.ones_like(gap_T).sum(),
        "mismatch": (gap_T.expm1() - gap_T).sum(),
        "importance": importance_T.sum(),
        "importance_squared": importance_T.square().sum(),
        "masked": (weight_T == 0).to(gap_T.dtype).sum(),
        "clipped": binds_T.to(gap_T.dtype).sum(),
        "entropy": tokens.entropy_T.sum(),
    }
    if tokens.reference_logprobs_T is not None:
        sums["reference_kl"] = estimate("k3", tokens.logprobs_T, tokens.reference_logprobs_T).sum()
    return sums


def policy_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics from its sums; empty when the step trained no token.

    policy/mismatch_kl is k3(mu, pi) = E_mu[pi/mu - log(pi/mu) - 1], nats a token: an estimate of KL(mu || pi) that is
    never negative (http://joschu.net/blog/kl-approx.html). policy/ess is (sum w)^2 / (T sum w^2) of w = pi/mu, in 0..1.
    policy/clip_fraction counts tokens where the clip, the dual clip or a cap of the ratio binds.
    """
    count = sums["tokens"]
    if count == 0:
        return {}
    metrics = {
        "policy/mismatch_kl": sums["mismatch"] / count,
        "policy/ess": sums["importance"] ** 2 / (count * sums["importance_squared"]),
        "policy/masked_fraction": sums["masked"] / count,
        "policy/clip_fraction": sums["clipped"] / count,
        "policy/entropy": sums["entropy"] / count,
    }
    if "reference_kl" in sums:
        metrics["policy/reference_kl"] = sums["reference_kl"] / count
    return metrics
