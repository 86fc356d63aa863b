"""[channels]: the loss, one table a term: policy (in policy.py), sdpo, replay_dpo, sft; and the weights they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.config.policy import PolicyConfig


class WeightSchedule(BaseConfig):
    """Factor on a loss term's weight at each step: zero, ramp up, plateau, ramp down, zero. The default is 1."""

    start_step: int = Field(default=1, ge=1)
    """First step with a weight above 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the weight rises linearly to its value; 0 starts at the full weight."""
    end_step: int | None = Field(default=None, ge=1)
    """Last step at the full weight; None never ends."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps after end_step over which the weight falls linearly to 0."""

    def factor(self, step: int) -> float:
        """Return the factor at `step` (from 1), in 0..1."""
        if step < self.start_step:
            return 0.0
        rising = min(1.0, (step - self.start_step + 1) / (self.warmup_steps + 1))
        if self.end_step is None or step <= self.end_step:
            return rising
        return rising * max(0.0, 1.0 - (step - self.end_step) / (self.decay_steps + 1))

    @model_validator(mode="after")
    def _ends_after_its_start(self) -> WeightSchedule:
        full_step = self.start_step + self.warmup_steps
        if self.end_step is not None and self.end_step < full_step:
            raise ValueError(
                f"schedule.end_step is {self.end_step}, but the weight rises from start_step = {self.start_step} over "
                f"warmup_steps = {self.warmup_steps} steps: set end_step >= {full_step} or a shorter warm-up"
            )
        return self


class SelfTeacherConfig(BaseConfig):
    """The weights of the teacher, which sees the hint."""

    kind: Literal["live", "ema", "frozen", "trust_region"] = "live"
    """The trained weights, their moving average, the initial weights, or a mix of the live and initial distributions.
    """
    rate: float = Field(default=0.05, gt=0, le=1)
    """ema: share of the trained weights added to the average at each step."""
    mix: float = Field(default=0.05, gt=0, lt=1)
    """trust_region: share of the live logits in the mix with the initial weights' logits."""


class SdpoConfig(BaseConfig):
    """SDPO: the policy with a hint teaches the policy without it, at the turn where the error happened."""

    weight: float = Field(default=0.0, ge=0)
    """alpha: factor of SDPO in the loss; 0 turns it off."""
    schedule: WeightSchedule = WeightSchedule()
    """alpha over the run."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """Divergence: 0 is KL(teacher || student), 1 is KL(student || teacher). Between them it is the generalized JSD,
    which vanishes toward both ends: use 0, 1, or 0.05..0.95.
    """
    kind: Literal["full", "top_k", "sampled"] = "full"
    """Compare the full vocabulary, the student's most likely tokens plus a tail, or only the sampled token (needs beta
    = 1).
    """
    top_k: int = Field(default=100, ge=1)
    """top_k: number of the student's tokens to compare one by one."""
    denominator: Literal["tokens", "turns"] = "tokens"
    """Average over all distilled tokens of the step, or over the means of its turns."""
    is_clip: float | None = Field(default=2.0, gt=0)
    """Cap of a token's detached importance weight pi / mu, in every group; None uses weight 1."""
    skip_endorsed: bool = False
    """Give weight 0 to error turns that the hint makes more likely, where the teacher would teach the mistake. They
    still count in the denominator.
    """
    entropy_weighting: Literal["none", "confident"] = "none"
    """confident: weigh a token by exp(-H / entropy_scale), where H is the teacher's entropy (not the TAID target's)."""
    entropy_scale: float = Field(default=1.0, gt=0)
    """confident: entropy in nats at which a token has weight 1/e."""
    forward_above_entropy: float | None = Field(default=None, ge=0)
    """Use KL(target || student) where the target's entropy is above this many nats; None: nowhere. The target is the
    teacher, or during taid_steps the mix of student and teacher.
    """
    taid_steps: int = Field(default=0, ge=0)
    """Steps from schedule.start_step over which the target moves from the student's logits to the teacher's; 0 uses the
    teacher's at once.
    """
    taid_start: float = Field(default=0.2, ge=0, lt=1)
    """Share of the teacher's logits in the target before the first step."""
    teacher: SelfTeacherConfig = SelfTeacherConfig()
    """The self-teacher."""

    def weight_at(self, step: int) -> float:
        """Return alpha at `step` (from 1)."""
        return self.weight * self.schedule.factor(step)

    def teacher_share(self, step: int) -> float:
        """Return the share of the teacher's logits in the target at `step` (from 1), in 0..1."""
        if self.taid_steps == 0:
            return 1.0
        taken = max(0, step - self.schedule.start_step + 1)
        return self.taid_start + (1.0 - self.taid_start) * min(1.0, taken / self.taid_steps)

    @model_validator(mode="after")
    def _sampled_is_reverse(self) -> SdpoConfig:
        if self.kind == "sampled" and self.beta != 1.0:
            raise ValueError(
                f"channels.sdpo.beta is {self.beta}, but kind = sampled estimates KL(student || teacher) from the "
                "student's own tokens: set beta = 1, or kind = full or top_k"
            )
        if self.kind == "sampled" and self.forward_above_entropy is not None:
            raise ValueError(
                f"channels.sdpo.forward_above_entropy is {self.forward_above_entropy}, but kind = sampled has no "
                "KL(teacher || student): leave it out, or set kind = full or top_k"
            )
        return self


class ReplayDpoConfig(BaseConfig):
    """Replay-DPO: direct preference optimization on pairs of answers to a recorded state (this project's own)."""

    weight: float = Field(default=0.0, ge=0)
    """beta: factor of replay-DPO in the loss; 0 turns it off."""
    schedule: WeightSchedule = WeightSchedule()
    """The weight over the run."""
    loss: Literal["cdpo", "sigmoid", "robust", "ipo", "sigmoid_norm", "simpo"] = "cdpo"
    """Loss function of a pair's margin; cdpo and robust use the pair's epsilon. simpo has no reference: no initial
    weights are kept, and dpo/displacement is not reported.
    """
    temperature: float = Field(default=0.1, gt=0)
    """beta of DPO: scale of the log-ratio to the reference (ipo: tau). The default for simpo is 2.0, because its margin
    is a mean per token; 0.1 would hardly separate answers.
    """
    simpo_margin: float = Field(default=0.5, ge=0)
    """simpo: gamma, the target margin of the chosen answer's reward."""
    nll_weight: float = Field(default=0.05, ge=0)
    """Factor of the chosen answer's negative log-likelihood per token, which keeps its probability from falling."""

    def weight_at(self, step: int) -> float:
        """Return the weight at `step` (from 1)."""
        return self.weight * self.schedule.factor(step)

    @model_validator(mode="before")
    @classmethod
    def _default_of_simpo(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("loss") == "simpo":
            return {"temperature": 2.0} | values  # SimPO, arXiv 2405.14734: beta of 2.0 to 2.5
        return values


class SftConfig(BaseConfig):
    """SFT: cross-entropy on the assistant tokens of recorded conversations."""

    weight: float = Field(default=0.0, ge=0)
    """Factor of SFT in the loss; 0 turns it off."""
    schedule: WeightSchedule = WeightSchedule()
    """The weight over the run."""

    def weight_at(self, step: int) -> float:
        """Return the weight at `step` (from 1)."""
        return self.weight * self.schedule.factor(step)


class ChannelsConfig(BaseConfig):
    """The terms of the loss, and their weights."""

    policy: PolicyConfig = PolicyConfig()
    """The policy loss."""
    sdpo: SdpoConfig = SdpoConfig()
    """SDPO: distillation of hints at error turns."""
    replay_dpo: ReplayDpoConfig = ReplayDpoConfig()
    """Replay-DPO: preference pairs from teachers' votes."""
    sft: SftConfig = SftConfig()
    """SFT: recorded conversations to imitate."""


WeightSet = Literal["frozen", "teacher", "reference"]
"""The start weights, or a moving average of the trained ones: the teacher, or the KL penalty's reference."""
AVERAGES: tuple[WeightSet, ...] = ("teacher", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSets:
    """The weights that a run keeps besides the trained ones."""

    teacher: WeightSet | None
    """The self-teacher, or a part of it; None for the live weights alone, and without SDPO."""
    reference: WeightSet | None
    """The origin of the KL penalty; None without a penalty."""
    scores_pairs: bool
    """Whether preference pairs need log-probabilities under the start weights; simpo's margin has no reference."""

    @property
    def needed(self) -> set[WeightSet]:
        names: list[WeightSet | None] = [self.teacher, self.reference, "frozen" if self.scores_pairs else None]
        return {name for name in names if name is not None}


def weight_sets(channels: ChannelsConfig) -> WeightSets:
    """Return the weights that `channels` needs; a term of weight 0 needs none."""
    kl, sdpo = channels.policy.kl, channels.sdpo
    teachers: dict[str, WeightSet | None] = {"live": None, "ema": "teacher"}
    return WeightSets(
        teacher=teachers.get(sdpo.teacher.kind, "frozen") if sdpo.weight > 0 else None,
        reference=None if kl.weight == 0 else "reference" if kl.reference == "ema" else "frozen",
        scores_pairs=channels.replay_dpo.weight > 0 and channels.replay_dpo.loss != "simpo",
    )
