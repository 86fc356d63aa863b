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

Off-policy corrections close the gap between three roles, always kept apart:

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

KL(pi || reference) is estimated from the log-probabilities of sampled tokens, d = log ref - log pi:

    k1 = -d              unbiased; in the advantage, never in the loss
    k2 = d^2 / 2         its gradient is that of KL(pi || ref) on-policy
    k3 = e^d - 1 - d     unbiased, never negative, low variance
    k3 r                 k3 weighted by the ratio: its gradient is unbiased off-policy too (arXiv 2512.02556)

(http://joschu.net/blog/kl-approx.html.) In the loss, k1 has an expected gradient of zero on-policy: E[grad log pi] = 0.
Composer 2's report (arXiv 2603.24477) describes k1 in the reward; TRL 1.16 uses k3 r. Where correction = dppo caps the
ratio, r in k3 r is capped alike.

Departures from the papers:
1. r compares with the sampler's log-probabilities or the trainer's own, depending on the correction.
2. A sequence is a root-to-leaf branch of a rollout; tokens that branches share are trained in one of them.
3. Objective, denominator, ratio level and correction are separate settings; an objective's name sets their defaults.
4. High-entropy tokens (arXiv 2506.01939) are chosen by a floor in nats. A quantile of the micro-batch would make the
   loss depend on how the step was cut.
5. DAPO leaves out answers that a limit cut short. Here the orchestrator does so (orchestrator.train_truncated).
6. dppo replaces the ratio clip. A token that it does not drop may still have any ratio (pi - mu <= 0.2 holds for
   pi = 0.2, mu = 1e-5). prime-rl lets it count 20 000 times (`dppo_ratio_cap = None`). The paper (section 5.4) and verl
   truncate the ratio at a large value, and so does the default here, by a detached factor: the gradient is
   min(r, cap) A grad log pi.
7. Log ratios are clamped to +-20 before exp, so that one broken token gives a large number and not an infinity.
8. k1 reduces the advantage of its own token, not of the tokens before it in the sequence as well.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from composer_prime.channels.tokens import PolicyTokens, Sums, bounded, bounded_exp, capped, mean_by, sum_by
from composer_prime.config.policy import PolicyConfig
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals


class PolicyLoss(Protocol):
    """A policy loss: `policy_loss`, or one of the user's.

    Pure. Returns the micro-batch's share of the step's loss, attached to the graph without tokens too, and sums over
    tokens; `policy_metrics` reports each of them as a mean. Every micro-batch must give the same names, in any order:
    ranks add them up together. Where it has nothing to add, a sum is 0.
    """

    def __call__(
        self, tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int
    ) -> tuple[Tensor, Sums]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How tokens enter the objective. All tensors are [T]."""

    log_ratio_T: Tensor
    """log r of each token, with gradient."""
    weight_T: Tensor
    """Detached factor of the token's loss; 0 drops the token."""
    clips: bool
    """Whether the objective's ratio clip applies."""


def load_policy_loss(config: PolicyConfig) -> PolicyLoss:
    """Return the policy loss of `config`: `policy_loss`, or the function that `import_path` names.

    Raises ConfigError when there is no such function, or when it does not take policy_loss's arguments.
    """
    if config.import_path is None:
        return policy_loss
    module_name, _, name = config.import_path.partition(":")
    where = f"channels.policy.import_path is {config.import_path!r}"
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{where}, which cannot be imported: {error}; give `module:function`, and the module's folder in "
            "run.import_from"
        ) from None
    try:
        inspect.signature(function).bind(tokens=None, totals=None, config=config, max_length=1)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}; it does not take (tokens, totals, config, max_length): {error}; see "
            "composer_prime.channels.policy.policy_loss"
        ) from None

    def own_loss(
        tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int
    ) -> tuple[Tensor, Sums]:
        loss, sums = function(tokens=tokens, totals=totals, config=config, max_length=max_length)
        plain = torch.ones_like(tokens.sampler_logprobs_T)
        return loss, _sums(tokens, plain, torch.zeros_like(plain)) | {key: sum_.detach() for key, sum_ in sums.items()}

    return own_loss


def policy_loss(tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int) -> tuple[Tensor, Sums]:
    """Return this micro-batch's share of the step's policy loss (a scalar; shares add up) and its metric sums.

    Without tokens the loss is a zero that is attached to the graph: every rank runs its backward pass. Raises
    ConfigError when reference log-probabilities or an entropy gradient are configured, but missing.
    """
    reference_T = _reference(tokens, config)
    advantages_T = tokens.advantages_T
    if reference_T is not None and config.kl.estimator == "k1":
        advantages_T = advantages_T - config.kl.weight * estimate("k1", tokens.logprobs_T.detach(), reference_T)
    correction = _correct(tokens, advantages_T, config)
    log_ratio_T = correction.log_ratio_T
    if config.ratio_level == "sequence":  # GSPO eq. 7
        log_ratio_T = mean_by(log_ratio_T, tokens.sequence_T, tokens.sequences)[tokens.sequence_T]
    ratio_T = bounded_exp(log_ratio_T)
    gain_T, binds_T = _surrogate(tokens, advantages_T, ratio_T, correction, config)
    weight_T = correction.weight_T
    if config.entropy_floor > 0:
        weight_T = weight_T * (tokens.entropy_T.detach() >= config.entropy_floor)
    token_loss_T = -(weight_T * gain_T)
    if reference_T is not None and config.kl.estimator != "k1":
        token_loss_T = token_loss_T + _kl_loss(tokens, reference_T, ratio_T, correction, config)
    if config.drift_weight > 0:
        drift_T = (tokens.logprobs_T - tokens.sampler_logprobs_T).square()
        token_loss_T = token_loss_T + config.drift_weight * drift_T
    loss = (token_loss_T * _token_scale(tokens, totals, config, max_length)).sum()
    if config.entropy_weight > 0:
        loss = loss - config.entropy_weight * _entropy(tokens).sum() / max(totals.tokens, 1)
    return loss, _sums(tokens, weight_T, binds_T)


def _correct(tokens: PolicyTokens, advantages_T: Tensor, config: PolicyConfig) -> Correction:
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
            keep_T = ~_opsm_drops(tokens, advantages_T, config.opsm_threshold)
            return Correction(log_ratio_T=from_sampler_T, weight_T=ones_T * keep_T, clips=True)
        case "dppo":
            drops_T = _dppo_drops(frozen_T, tokens.sampler_logprobs_T, advantages_T, config.dppo_threshold)
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


def _dppo_drops(logprobs_T: Tensor, sampler_logprobs_T: Tensor, advantages_T: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool [T]) whose probability has moved past the trust region in the advantage's direction.

    A > 0 and pi - mu > threshold, or A <= 0 and pi - mu < -threshold. These are differences of probabilities, not
    ratios: the ratios of rare tokens are noisy, and they would be dropped first (prime-rl's default form).
    """
    moved_T = logprobs_T.exp() - sampler_logprobs_T.exp()
    return torch.where(advantages_T > 0, moved_T > threshold, moved_T < -threshold)


def _opsm_drops(tokens: PolicyTokens, advantages_T: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool [T]) with A < 0 in a sequence whose mean log(mu / pi) is above `threshold` nats."""
    gap_T = tokens.sampler_logprobs_T - tokens.logprobs_T.detach()
    far = mean_by(gap_T, tokens.sequence_T, tokens.sequences) > threshold
    return (advantages_T < 0) & far[tokens.sequence_T]


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


def _reference(tokens: PolicyTokens, config: PolicyConfig) -> Tensor | None:
    """Return log ref [T] when a penalty is configured, else None. Raises ConfigError when it is missing then."""
    if config.kl.weight == 0:
        return None
    if tokens.reference_logprobs_T is None:
        raise ConfigError(
            f"channels.policy.kl.weight is {config.kl.weight}, but the tokens came without reference "
            "log-probabilities: set kl.weight = 0, or compute them"
        )
    return tokens.reference_logprobs_T


def _kl_loss(
    tokens: PolicyTokens, reference_T: Tensor, ratio_T: Tensor, correction: Correction, config: PolicyConfig
) -> Tensor:
    """Return kl.weight * k2, k3 or k3 r of each token [T], with gradient."""
    if config.kl.estimator == "k3_ratio":
        ratio_T = ratio_T if correction.clips else capped(ratio_T, config.dppo_ratio_cap)
        return config.kl.weight * ratio_T * estimate("k3", tokens.logprobs_T, reference_T)
    return config.kl.weight * estimate(config.kl.estimator, tokens.logprobs_T, reference_T)


def estimate(estimator: Literal["k1", "k2", "k3"], logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return the estimator's value for each token [T], nats; differentiable."""
    d_T = reference_logprobs_T - logprobs_T
    match estimator:
        case "k1":
            return -d_T
        case "k2":
            return d_T.square() / 2
        case "k3":
            return bounded(d_T).expm1() - d_T


def _token_scale(tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int) -> Tensor:
    """Return the factor [T] of each token's loss: its own weight over what `config.denominator` divides by."""
    like_T = tokens.sampler_logprobs_T
    match config.denominator:
        case "constant":
            scale_T = torch.full_like(like_T, 1.0 / (max(totals.samples, 1) * max_length))
        case "tokens":
            scale_T = torch.full_like(like_T, 1.0 / max(totals.tokens, 1))
        case "micro_batch":
            scale_T = torch.full_like(like_T, 1.0 / (max(like_T.numel(), 1) * max(totals.micro_batches, 1)))
        case "sequence":
            lengths = sum_by(torch.ones_like(like_T), tokens.sequence_T, tokens.sequences)
            scale_T = 1.0 / (lengths[tokens.sequence_T] * max(totals.samples, 1))
    return scale_T if tokens.weight_T is None else scale_T * tokens.weight_T


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
        "mismatch_kl": (gap_T.expm1() - gap_T).sum(),
        "importance": importance_T.sum(),
        "importance_squared": importance_T.square().sum(),
        "masked_fraction": (weight_T == 0).to(gap_T.dtype).sum(),
        "clip_fraction": binds_T.to(gap_T.dtype).sum(),
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
    ess = sums["importance"] ** 2 / (count * sums["importance_squared"])
    means = sums.keys() - {"tokens", "importance", "importance_squared"}
    return {"policy/ess": ess} | {f"policy/{name}": sums[name] / count for name in sums if name in means}
