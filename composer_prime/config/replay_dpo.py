"""[channels.replay_dpo]: channel 3, preferences that teachers gave on recorded traces."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.config.weight_schedule import WeightSchedule

SIMPO_TEMPERATURE = 2.0
"""SimPO, arXiv 2405.14734: beta of 2.0 to 2.5."""


class ReplayDpoConfig(BaseConfig):
    """Channel 3: direct preference optimisation on pairs of answers to a recorded state (this project's own)."""

    weight: float = Field(default=0.0, ge=0)
    """beta of the total loss: factor of this channel; 0 turns it off."""
    schedule: WeightSchedule = WeightSchedule()
    """The weight over the run."""
    loss: Literal["cdpo", "sigmoid", "robust", "ipo", "sigmoid_norm", "simpo"] = "cdpo"
    """How a pair's margin becomes a loss; cdpo and robust use each pair's own epsilon. simpo has no reference:
    no start weights are kept, and dpo/displacement is not reported."""
    temperature: float = Field(default=0.1, gt=0)
    """beta of DPO: how strongly a log-probability against the reference counts (ipo: its tau). simpo's own default is
    2.0, as its margin is a mean a token: at 0.1 it would hardly tell answers apart."""
    simpo_margin: float = Field(default=0.5, ge=0)
    """simpo: gamma, the margin that the chosen answer's reward is to have."""
    nll_weight: float = Field(default=0.05, ge=0)
    """Factor of the chosen answer's negative log-likelihood a token, which holds it in place."""

    def weight_at(self, step: int) -> float:
        """The weight at `step` (from 1)."""
        return self.weight * self.schedule.factor(step)

    @model_validator(mode="before")
    @classmethod
    def _default_of_simpo(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("loss") == "simpo":
            return {"temperature": SIMPO_TEMPERATURE} | values
        return values
