"""[channels.sdpo]: channel 2, distillation of the hinted self-teacher at error turns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.config.weight_schedule import WeightSchedule


class SelfTeacherConfig(BaseConfig):
    """Which weights give the distribution under the hint."""

    kind: Literal["live", "ema", "frozen", "trust_region"] = "live"
    """The trained weights, their moving average, the start weights, or a mix of the live and the start distribution."""
    rate: float = Field(default=0.05, gt=0, le=1)
    """ema: share of the trained weights that enters the average at each step."""
    mix: float = Field(default=0.05, gt=0, lt=1)
    """trust_region: share of the live weights' logits in the mix with the start weights' logits."""


class SdpoConfig(BaseConfig):
    """Channel 2: the policy under a hint teaches the policy without it, at the turn where the error happened."""

    weight: float = Field(default=0.0, ge=0)
    """alpha: factor of this channel in the loss; 0 turns it off."""
    schedule: WeightSchedule = WeightSchedule()
    """alpha over the run."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """Divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), between them the generalised JSD, which
    goes to 0 towards both ends: take an end, or 0.05..0.95."""
    kind: Literal["full", "top_k", "sampled"] = "full"
    """The whole vocabulary, the student's likeliest tokens and a tail, or the sampled token alone (needs beta = 1)."""
    top_k: int = Field(default=100, ge=1)
    """top_k: tokens of the student that are compared one by one."""
    denominator: Literal["tokens", "turns"] = "tokens"
    """Mean over all distilled tokens of the step, or over its turns of each turn's mean."""
    is_clip: float | None = Field(default=2.0, gt=0)
    """Cap of the detached importance weight pi / mu of a token, in every group; None weighs all tokens by 1."""
    entropy_weighting: Literal["none", "confident"] = "none"
    """confident: a token weighs exp(-H / entropy_scale) with H the teacher's own entropy (never the TAID target's)."""
    entropy_scale: float = Field(default=1.0, gt=0)
    """confident: entropy in nats at which a token weighs 1/e."""
    forward_above_entropy: float | None = Field(default=None, ge=0)
    """Where the entropy of the target (the teacher; during taid_steps the mix of student and teacher that takes its
    place) is above this many nats, use KL(target || student); None nowhere."""
    taid_steps: int = Field(default=0, ge=0)
    """Steps, from schedule.start_step on, over which the target moves from the student's logits to the teacher's; 0
    takes the teacher's at once."""
    taid_start: float = Field(default=0.2, ge=0, lt=1)
    """Share of the teacher's logits in the target before the first step."""
    teacher: SelfTeacherConfig = SelfTeacherConfig()
    """The self-teacher."""

    def weight_at(self, step: int) -> float:
        """alpha at `step` (from 1)."""
        return self.weight * self.schedule.factor(step)

    def teacher_share(self, step: int) -> float:
        """Share of the teacher's logits in the target at `step` (from 1), in 0..1."""
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
