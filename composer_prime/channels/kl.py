"""KL(pi || reference) from the log-probabilities of sampled tokens, d = log ref - log pi.

    k1 = -d              unbiased; in the advantage, never in the loss
    k2 = d^2 / 2         its gradient is that of KL(pi || ref) on-policy
    k3 = e^d - 1 - d     unbiased, never negative, low variance
    k3 r                 k3 weighted by the ratio: its gradient is unbiased off-policy too (arXiv 2512.02556)

(http://joschu.net/blog/kl-approx.html.) In the loss, k1 has an expected gradient of zero on-policy: E[grad log pi] = 0.
Composer 2's report (arXiv 2603.24477) describes k1 in the reward; TRL 1.16 uses k3 r. Where correction = dppo caps the
ratio, r in k3 r is capped alike.

Departures:
1. k1 reduces the advantage of its own token, not of the tokens before it in the sequence as well.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from composer_prime.channels.tokens import PolicyTokens, bounded
from composer_prime.config.policy import PolicyConfig
from composer_prime.errors import ConfigError


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


def reference_of(tokens: PolicyTokens, config: PolicyConfig) -> Tensor | None:
    """Return log ref [T] when a penalty is configured, else None. Raises ConfigError when it is missing then."""
    if config.kl.weight == 0:
        return None
    if tokens.reference_logprobs_T is None:
        raise ConfigError(
            f"channels.policy.kl.weight is {config.kl.weight}, but the tokens came without reference "
            "log-probabilities: set kl.weight = 0, or compute them"
        )
    return tokens.reference_logprobs_T


def penalized_advantages(tokens: PolicyTokens, config: PolicyConfig) -> Tensor:
    """Return the advantages [T], less kl.weight * k1 where the estimator is k1."""
    reference_T = reference_of(tokens, config)
    if reference_T is None or config.kl.estimator != "k1":
        return tokens.advantages_T
    with torch.no_grad():
        return tokens.advantages_T - config.kl.weight * estimate("k1", tokens.logprobs_T, reference_T)


def kl_loss(tokens: PolicyTokens, ratio_T: Tensor, config: PolicyConfig) -> Tensor | None:
    """Return kl.weight * k2, k3 or k3 r of each token [T], with gradient; None where nothing enters the loss."""
    reference_T = reference_of(tokens, config)
    if reference_T is None or config.kl.estimator == "k1":
        return None
    if config.kl.estimator == "k3_ratio":
        return config.kl.weight * ratio_T * estimate("k3", tokens.logprobs_T, reference_T)
    return config.kl.weight * estimate(config.kl.estimator, tokens.logprobs_T, reference_T)
