"""[channels]: the loss, one section a channel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_config import BaseConfig


class PolicyConfig(BaseConfig):
    """Channel 1: policy optimisation on verifiable rewards."""

    objective: Literal["dr_grpo", "grpo"] = "dr_grpo"
    """How token losses are normalised and advantages scaled."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped to >= 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped to <= 1 + clip_high."""
    correction: Literal["none", "tis", "dppo"] = "dppo"
    """Off-policy correction between the sampler's and the trainer's policy."""
    tis_cap: float = Field(default=2.0, gt=0)
    """tis: cap of the detached importance weight."""
    dppo_threshold: float = Field(default=0.2, gt=0, lt=1)
    """dppo: drop a token whose probability already moved this far the way its advantage pushes."""
    max_completion_length: int | None = Field(default=None, ge=1)
    """dr_grpo's constant length divisor in tokens; None takes model.max_context."""


class ChannelsConfig(BaseConfig):
    policy: PolicyConfig = PolicyConfig()
    """Channel 1."""
