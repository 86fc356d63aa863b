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
definition. L_i counts the trained tokens of sequence i.

Off-policy corrections close the gap between three roles, always kept apart:

    pi   the policy that is trained; its log-probability has the gradient
    mu   the policy as the inference engine sampled it: older by the staleness, computed by other kernels
    old  the base of the ratio r = pi / old that the objective clips

With rho = pi / mu, detached:

    none    old = mu; r and its clip carry the whole correction
    dppo    old = mu; drops tokens outside a trust region, caps r elsewhere, no clip    arXiv 2602.04879
    tis     old = pi; weight min(rho, C)                                                arXiv 1802.01561 (rho-bar)

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
3. Objective, denominator and correction are separate settings; an objective's name sets their defaults.
4. DAPO leaves out answers that a limit cut short. Here the orchestrator does so (orchestrator.train_truncated).
5. dppo replaces the ratio clip. A token that it does not drop may still have any ratio (pi - mu <= 0.2 holds for
   pi = 0.2, mu = 1e-5). prime-rl lets it count 20 000 times (`dppo_ratio_cap = None`). The paper (section 5.4) and verl
   truncate the ratio at a large value, and so does the default here, by a detached factor: the gradient is
   min(r, cap) A grad log pi.
6. Log ratios are clamped to +-20 before exp, so that one broken token gives a large number and not an infinity.
7. k1 reduces the advantage of its own token, not of the tokens before it in the sequence as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.channels.term import Sums, Term, TermRows, TermTokens, checked_loss
from composer_prime.channels.tokens import (
    PolicyTokens,
    bounded,
    bounded_exp,
    capped,
    mean_by,
    sum_by,
    torch,
    without_gradient,
)
from composer_prime.errors import ConfigError
from composer_prime.import_path import PartConfig, find_part, one_of
from composer_prime.packing.pack import Row
from composer_prime.wire.types import StepTotals

if TYPE_CHECKING:
    from torch import Tensor

DPPO_THRESHOLD = 0.2
"""dppo drops a token whose probability already moved this far in the direction of its advantage."""
TIS_CAP = 2.0
"""The cap of tis's detached importance weight."""
CISPO_CAP = 5.0
"""The absolute upper bound of cispo's detached ratio; there is no lower bound. With tis the ratio is 1."""

Objective = Literal["dr_grpo", "grpo", "bnpo", "dapo", "gspo", "cispo"]
AdvantageScaling = Literal["none", "std"]
OF_OBJECTIVE: dict[str, dict[str, Any]] = {
    "dr_grpo": {"denominator": "constant", "advantage_scaling": "none", "correction": "dppo"},
    "grpo": {"denominator": "sequence"},
    "bnpo": {"denominator": "micro_batch"},
    "dapo": {"denominator": "tokens", "clip_high": 0.28},
    "gspo": {"denominator": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"denominator": "tokens"},
}
"""Settings of each objective's paper; a value in the configuration wins."""
_OTHERS = {"advantage_scaling": "std", "correction": "none"}


class KlConfig(BaseConfig):
    """A KL penalty to a reference policy, estimated from log-probabilities of the sampled tokens."""

    weight: float = Field(default=0.0, ge=0)
    """Factor of the penalty; 0 computes no reference."""
    estimator: Literal["k1", "k2", "k3", "k3_ratio"] = "k1"
    """k1 is subtracted from the advantage (Composer 2); k2, k3 and k3_ratio (k3 times the ratio, as in TRL) are added
    to the loss.
    """
    reference: Literal["frozen", "ema"] = "frozen"
    """The initial weights, or a moving average of the trained ones."""


class PolicyConfig(BaseConfig):
    """Policy optimization on verifiable rewards. Defaults marked * are dr_grpo's; other objectives set their own."""

    objective: Objective = "dr_grpo"
    """Which policy loss; sets the defaults of the keys marked *."""
    loss: Annotated[PartConfig | None, one_of("channels.policy.loss")] = None
    """Your own policy loss: `module:function` with the parameters (tokens, totals, config, max_length) and the result
    type of composer_prime.channels.policy.policy_loss; settings are further keyword arguments. None uses the objective.
    """
    advantage_scaling: AdvantageScaling = "none"
    """* Whether advantages are divided by their group's standard deviation (dr_grpo: none; others: std)."""
    denominator: Literal["constant", "sequence", "tokens", "micro_batch"] = "constant"
    """* constant: B x max_completion_length; sequence: the sequence's length, then B (grpo, gspo); tokens (dapo,
    cispo); micro_batch: its tokens, then the number of micro-batches (bnpo).
    """
    max_completion_length: int | None = Field(default=None, ge=1)
    """denominator = constant: the length divisor in tokens. None uses the maximum that a rollout can sample:
    orchestrator.sampling.max_tokens times the harness's max_turns, at most model.max_context. A resume keeps the
    original value.
    """
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """* The ratio is clipped to >= 1 - clip_low (gspo: 0.0003)."""
    clip_high: float = Field(default=0.2, gt=0)
    """* The ratio is clipped to <= 1 + clip_high (dapo: 0.28, gspo: 0.0004)."""
    correction: Literal["none", "dppo", "tis"] = "dppo"
    """* Off-policy correction between the sampler's and the trainer's policy (none except for dr_grpo)."""
    dppo_ratio_cap: float | None = Field(default=20.0, gt=1)
    """dppo: cap of the importance ratio of kept tokens; None: no cap (as in prime-rl)."""
    kl: KlConfig = KlConfig()
    """KL penalty to a reference policy."""
    weight: float = Field(default=1.0, ge=0)
    """Factor of the term in the loss; 0 leaves the loss to the other terms, as SDPO and OPSD do."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_objective(cls, values: Any) -> Any:
        objective = values.get("objective", "dr_grpo") if isinstance(values, dict) else None
        if not isinstance(objective, str) or objective not in OF_OBJECTIVE:
            return values
        return _OTHERS | OF_OBJECTIVE[objective] | values


PolicyLoss = Callable[[PolicyTokens, StepTotals, PolicyConfig, int], tuple["Tensor", Sums]]
"""(tokens, totals, config, max_length) -> (loss, sums): `policy_loss`, or one of the user's.

Pure. The loss is the micro-batch's share of the step's, attached to the graph without tokens too. `policy_metrics`
reports each sum over tokens as a mean. Every micro-batch must give the same names, in any order: ranks add them up
together. Where it has nothing to add, a sum is 0.
"""


class PolicyTerm(Term):
    """The policy loss as a term."""

    name = "policy"

    def __init__(self, config: PolicyConfig, max_length: int) -> None:
        """`max_length` is dr_grpo's length divisor, in tokens. Raises ConfigError as `load_policy_loss` does."""
        self._config = config
        self._loss = load_policy_loss(config)
        self._max_length = max_length

    def weight_at(self, step: int) -> float:
        return self._config.weight

    def divisor(self, totals: StepTotals, row_tokens: int, sequence_tokens_K: Tensor | None) -> Tensor | float:
        """Return what the loss of a token is divided by, for SDPO to divide alike: see `divisor`."""
        return divisor(self._config, totals, self._max_length, row_tokens, sequence_tokens_K)

    def rows(self, row: Row) -> TermRows:
        trained = row.trained
        arrays = {
            "sampler_logprobs": row.sampler_logprobs[trained],
            "advantages": row.advantages[trained],
            "sequence": row.document_of(trained),
        }
        return TermRows(positions=trained, arrays=arrays, counts={"sequences": row.samples})

    def inputs(self, tokens: TermTokens) -> PolicyTokens:
        return PolicyTokens(
            logprobs_T=tokens.logprobs,
            sampler_logprobs_T=tokens.arrays["sampler_logprobs"],
            advantages_T=tokens.arrays["advantages"],
            entropy_T=tokens.entropy,
            sequence_T=tokens.arrays["sequence"],
            sequences=tokens.counts["sequences"],
            reference_logprobs_T=tokens.reference,
        )

    def loss(self, inputs: PolicyTokens, totals: StepTotals) -> tuple[Tensor, Sums]:
        return self._loss(inputs, totals, self._config, self._max_length)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return policy_metrics(sums)


def load_policy_loss(config: PolicyConfig) -> PolicyLoss:
    """Return the policy loss of `config`: `policy_loss`, or the user's own.

    Raises ConfigError when there is no such function, or when it does not take policy_loss's arguments and its own
    settings.
    """
    if config.loss is None:
        return policy_loss
    name, settings = config.loss.name, config.loss.settings
    function: Callable[..., tuple[Tensor, Sums]] = find_part(name, {}, "channels.policy.loss")
    try:
        inspect.signature(function).bind(tokens=None, totals=None, config=config, max_length=1, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"channels.policy.loss is {name!r}; it does not take (tokens, totals, config, max_length) and settings "
            f"{sorted(settings)}: {error}; see composer_prime.channels.policy.policy_loss"
        ) from None
    return partial(_own_loss, partial(function, **settings))


def _own_loss(
    function: Callable[..., tuple[Tensor, Sums]],
    tokens: PolicyTokens,
    totals: StepTotals,
    config: PolicyConfig,
    max_length: int,
) -> tuple[Tensor, Sums]:
    """Return what the user's function gives, with the sums that every policy loss reports."""
    given = function(tokens=tokens, totals=totals, config=config, max_length=max_length)
    loss, sums = checked_loss(given, function, tokens.logprobs_T.requires_grad)
    plain = torch.ones_like(tokens.sampler_logprobs_T)
    return loss, _sums(tokens, plain, torch.zeros_like(plain)) | {key: sum_.detach() for key, sum_ in sums.items()}


def policy_loss(tokens: PolicyTokens, totals: StepTotals, config: PolicyConfig, max_length: int) -> tuple[Tensor, Sums]:
    """Return this micro-batch's share of the step's policy loss (a scalar; shares add up) and its metric sums.

    Without tokens the loss is a zero that is attached to the graph: every rank runs its backward pass. Raises
    ConfigError when reference log-probabilities are configured, but missing.
    """
    reference_T = _reference(tokens, config)
    advantages_T = tokens.advantages_T
    if reference_T is not None and config.kl.estimator == "k1":
        advantages_T = advantages_T - config.kl.weight * estimate("k1", tokens.logprobs_T.detach(), reference_T)
    log_ratio_T, weight_T, clips = _correct(tokens, advantages_T, config)
    if config.objective == "gspo":  # GSPO eq. 7
        log_ratio_T = mean_by(log_ratio_T, tokens.sequence_T, tokens.sequences)[tokens.sequence_T]
    ratio_T = bounded_exp(log_ratio_T)
    gain_T, binds_T = _surrogate(tokens, advantages_T, ratio_T, clips, config)
    token_loss_T = -(weight_T * gain_T)
    if reference_T is not None and config.kl.estimator != "k1":
        token_loss_T = token_loss_T + _kl_loss(tokens, reference_T, ratio_T, clips, config)
    loss = (token_loss_T * _token_scale(tokens, totals, config, max_length)).sum()
    return loss, _sums(tokens, weight_T, binds_T)


def _correct(tokens: PolicyTokens, advantages_T: Tensor, config: PolicyConfig) -> tuple[Tensor, Tensor, bool]:
    """Return log r of each token [T] with gradient, the detached factor of its loss [T], where 0 drops the token, and
    whether the objective's ratio clip applies; by `config.correction`.

    `advantages_T` [T] are those that the objective multiplies with, penalties included: what decides which way a token
    is pushed also decides whether it has gone far enough.
    """
    frozen_T = tokens.logprobs_T.detach()
    from_sampler_T = tokens.logprobs_T - tokens.sampler_logprobs_T
    ones_T = torch.ones_like(tokens.sampler_logprobs_T)
    match config.correction:
        case "none":
            return from_sampler_T, ones_T, True
        case "dppo":
            drops_T = _dppo_drops(frozen_T, tokens.sampler_logprobs_T, advantages_T, DPPO_THRESHOLD)
            return from_sampler_T, ones_T * ~drops_T, False
        case "tis":
            weight_T = bounded_exp(frozen_T - tokens.sampler_logprobs_T).clamp(max=TIS_CAP)
            return tokens.logprobs_T - frozen_T, weight_T, True


def _dppo_drops(logprobs_T: Tensor, sampler_logprobs_T: Tensor, advantages_T: Tensor, threshold: float) -> Tensor:
    """Return the tokens (bool [T]) whose probability has moved past the trust region in the advantage's direction.

    A > 0 and pi - mu > threshold, or A <= 0 and pi - mu < -threshold. These are differences of probabilities, not
    ratios: the ratios of rare tokens are noisy, and they would be dropped first (prime-rl's default form).
    """
    moved_T = logprobs_T.exp() - sampler_logprobs_T.exp()
    return torch.where(advantages_T > 0, moved_T > threshold, moved_T < -threshold)


def _surrogate(
    tokens: PolicyTokens, advantages_T: Tensor, ratio_T: Tensor, clips: bool, config: PolicyConfig
) -> tuple[Tensor, Tensor]:
    """Return each token's gain before its weight [T], and where a bound of the ratio binds (bool [T])."""
    if config.objective == "cispo":
        frozen_T = ratio_T.detach()
        gain_T = frozen_T.clamp(max=CISPO_CAP) * advantages_T * tokens.logprobs_T  # CISPO, 2506.13585 eq. 4-5
        return gain_T, frozen_T > CISPO_CAP
    if not clips:
        capped_T = capped(ratio_T, config.dppo_ratio_cap)
        return capped_T * advantages_T, capped_T.detach() < ratio_T.detach()
    gain_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_T
    return torch.minimum(gain_T, clipped_T), clipped_T.detach() < gain_T.detach()  # PPO, 1707.06347 eq. 7


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


def _kl_loss(tokens: PolicyTokens, reference_T: Tensor, ratio_T: Tensor, clips: bool, config: PolicyConfig) -> Tensor:
    """Return kl.weight * k2, k3 or k3 r of each token [T], with gradient."""
    if config.kl.estimator == "k3_ratio":
        ratio_T = ratio_T if clips else capped(ratio_T, config.dppo_ratio_cap)
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
    """Return the factor [T] of each token's loss: one over what `config.denominator` divides by."""
    ones_T = torch.ones_like(tokens.sampler_logprobs_T)
    lengths_T = None
    if config.denominator == "sequence":
        lengths_T = sum_by(ones_T, tokens.sequence_T, tokens.sequences)[tokens.sequence_T]
    return ones_T * (1.0 / divisor(config, totals, max_length, ones_T.numel(), lengths_T))


def divisor(
    config: PolicyConfig, totals: StepTotals, max_length: int, row_tokens: int, sequence_tokens_T: Tensor | None
) -> Tensor | float:
    """Return what the loss of a token is divided by: [T] with denominator = sequence, else one number.

    `row_tokens` counts the tokens of the micro-batch, `sequence_tokens_T` [T] those of each token's sequence.
    """
    samples = max(totals.samples, 1)
    match config.denominator:
        case "constant":
            return samples * max_length
        case "tokens":
            return max(totals.tokens, 1)
        case "micro_batch":
            return max(row_tokens, 1) * max(totals.micro_batches, 1)
        case "sequence":
            assert sequence_tokens_T is not None
            return sequence_tokens_T * samples


@without_gradient
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
    policy/clip_fraction counts tokens where the clip or a cap of the ratio binds.
    """
    count = sums["tokens"]
    if count == 0:
        return {}
    ess = sums["importance"] ** 2 / (count * sums["importance_squared"])
    means = sums.keys() - {"tokens", "importance", "importance_squared"}
    return {"policy/ess": ess} | {f"policy/{name}": sums[name] / count for name in sums if name in means}
