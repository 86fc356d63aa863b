"""[channels.policy]: the policy loss."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

Objective = Literal["dr_grpo", "grpo", "bnpo", "dapo", "gspo", "cispo"]
AdvantageScaling = Literal["none", "std"]
Correction = Literal["none", "tis", "mis", "icepop", "dppo", "opsm"]

OF_OBJECTIVE: dict[str, dict[str, Any]] = {
    "dr_grpo": {"denominator": "constant", "advantage_scaling": "none", "correction": "dppo"},
    "grpo": {"denominator": "sequence"},
    "bnpo": {"denominator": "micro_batch"},
    "dapo": {"denominator": "tokens", "clip_high": 0.28},
    "gspo": {"denominator": "sequence", "ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"denominator": "tokens"},
}
"""Settings of each objective's paper; a value in the configuration wins. Sources: composer_prime/channels/policy.py."""

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
    ema_rate: float = Field(default=0.01, gt=0, le=1)
    """ema: share of the trained weights added to the average at each step."""


class PolicyConfig(BaseConfig):
    """Policy optimization on verifiable rewards. Defaults marked * are dr_grpo's; other objectives set their own."""

    objective: Objective = "dr_grpo"
    """Which policy loss; sets the defaults of the keys marked *."""
    import_path: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Your own policy loss: `module:function` with the parameters (tokens, totals, config, max_length) and the result
    type of composer_prime.channels.policy.policy_loss. None uses the objective.
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
    ratio_level: Literal["token", "sequence"] = "token"
    """* One ratio per token, or the geometric mean of a sequence's ratios for all its tokens (gspo)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """* The ratio is clipped to >= 1 - clip_low (gspo: 0.0003)."""
    clip_high: float = Field(default=0.2, gt=0)
    """* The ratio is clipped to <= 1 + clip_high (dapo: 0.28, gspo: 0.0004)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio for negative advantages; None: no bound."""
    cispo_cap: float = Field(default=5.0, gt=0)
    """cispo: absolute upper bound of the detached ratio; there is no lower bound."""
    correction: Correction = "dppo"
    """* Off-policy correction between the sampler's and the trainer's policy (none except for dr_grpo)."""
    correction_level: Literal["token", "sequence"] = "token"
    """tis, mis: weigh tokens, or whole sequences by the product of their ratios (which masks nearly all long traces).
    """
    tis_cap: float = Field(default=2.0, gt=0)
    """tis: cap of the detached importance weight."""
    mis_cap: float = Field(default=3.0, gt=0)
    """mis: drop tokens or sequences with a larger importance weight."""
    icepop_low: float = Field(default=0.5, ge=0)
    """icepop: drop tokens with a smaller importance weight."""
    icepop_high: float = Field(default=5.0, gt=0)
    """icepop: drop tokens with a larger importance weight."""
    dppo_threshold: float = Field(default=0.2, gt=0, lt=1)
    """dppo: drop a token whose probability already moved this far in the direction of its advantage."""
    dppo_ratio_cap: float | None = Field(default=20.0, gt=1)
    """dppo: cap of the importance ratio of kept tokens; None: no cap (as in prime-rl)."""
    opsm_threshold: float = Field(default=0.5, gt=0)
    """opsm: drop a sequence with negative advantage if its mean log(mu / pi) is larger, in nats per token."""
    drift_weight: float = Field(default=0.0, ge=0)
    """Factor of log(pi / mu)^2 per token, a pull toward the sampler (prime-rl uses 0.001)."""
    kl: KlConfig = KlConfig()
    """KL penalty to a reference policy."""
    entropy_weight: float = Field(default=0.0, ge=0)
    """Factor of the mean entropy per token, a bonus."""
    entropy_floor: float = Field(default=0.0, ge=0)
    """Train only tokens with at least this entropy, in nats; 0 trains all."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_objective(cls, values: Any) -> Any:
        objective = values.get("objective", "dr_grpo") if isinstance(values, dict) else None
        if not isinstance(objective, str) or objective not in OF_OBJECTIVE:
            return values
        return _OTHERS | OF_OBJECTIVE[objective] | values

    @model_validator(mode="after")
    def _clips_agree(self) -> PolicyConfig:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"channels.policy.dual_clip is {self.dual_clip}, but the ratio is clipped to 1 + clip_high = "
                f"{1 + self.clip_high} already: set dual_clip above it"
            )
        if self.dual_clip is not None and (self.correction == "dppo" or self.objective == "cispo"):
            reason = "objective = cispo caps" if self.objective == "cispo" else "correction = dppo trusts"
            raise ValueError(
                f"channels.policy.dual_clip is {self.dual_clip}, but {reason} ratios without a clip: leave dual_clip "
                "out or choose another objective or correction"
            )
        return self

    @model_validator(mode="after")
    def _corrections_agree(self) -> PolicyConfig:
        if self.correction_level == "sequence" and self.correction not in ("tis", "mis"):
            raise ValueError(
                f"channels.policy.correction_level is sequence, but correction is {self.correction}: only tis and mis "
                "weigh whole sequences; set correction_level = token, or one of these"
            )
        if self.icepop_low >= self.icepop_high:
            raise ValueError(
                f"channels.policy.icepop_low is {self.icepop_low}, but icepop_high is {self.icepop_high}: no token "
                "would be kept; set icepop_low < icepop_high"
            )
        return self
