"""[orchestrator.behaviour]: rewards for how a task was done, beside whether it was (Composer 2, arXiv 2603.24477)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from pydantic_config import BaseConfig


class AuxiliaryConfig(BaseConfig):
    """A scalar of the rollout that counts towards its reward."""

    name: str
    """Name of the reward part."""
    scalar: str
    """tool_errors, turn_error_rate, calls, turns, truncated, or a metric or reward part of the environment."""
    weight: float
    """Reward for one unit of the scalar; negative for what is to be avoided."""


class EffortWeights(BaseConfig):
    """How much each kind of effort adds to x."""

    thinking_tokens: float = Field(default=1.0, ge=0)
    """Per token of thinking."""
    tool_call_tokens: float = Field(default=1.0, ge=0)
    """Per sampled token, thinking aside, of a turn that calls tools."""
    tool_output_tokens: float = Field(default=0.0, ge=0)
    """Per token that tools added to the context."""
    final_message_tokens: float = Field(default=1.0, ge=0)
    """Per sampled token, thinking aside, of a turn that calls no tool."""
    calls: float = Field(default=0.0, ge=0)
    """Per tool call."""
    turns: float = Field(default=0.0, ge=0)
    """Per assistant turn."""


class BehaviourConfig(BaseConfig):
    penalty: float = Field(default=0.0, ge=0)
    """Reward lost per unit of C(x); 0 switches the effort penalty off."""
    k: float = Field(default=0.001, gt=0)
    """Scale of effort: the penalty bends at x of about 1 / k."""
    q: float = Field(default=1.0, ge=0)
    """Curvature of C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)): 0 is linear, 1 logarithmic, above 1 bounded."""
    effort: EffortWeights = EffortWeights()
    """x, as a weighted sum."""
    applies_to: Literal["all", "passed"] = "all"
    """Whether every rollout pays for effort, or only those whose own reward is above 0."""
    auxiliary: list[AuxiliaryConfig] = []
    """Further scalars."""

    @field_validator("auxiliary")
    @classmethod
    def _unique_names(cls, auxiliary: list[AuxiliaryConfig]) -> list[AuxiliaryConfig]:
        names = ["effort", *(scalar.name for scalar in auxiliary)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"orchestrator.behaviour.auxiliary uses the names {twice} twice ('effort' is the penalty's): rename one"
            )
        return auxiliary

    @property
    def active(self) -> bool:
        return self.penalty > 0 or bool(self.auxiliary)
