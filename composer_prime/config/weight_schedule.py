"""The weight of a loss channel as a function of the step: zero, a ramp, a plateau, a ramp down, zero again."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_config import BaseConfig


class WeightSchedule(BaseConfig):
    """Factor of a channel's weight at each step; without settings it is 1 throughout."""

    start_step: int = Field(default=1, ge=1)
    """First step with a weight above 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the weight rises linearly to its value; 0 begins with it."""
    end_step: int | None = Field(default=None, ge=1)
    """Last step at the full weight; None never ends. The washout probe sets it."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps after end_step over which the weight falls linearly to 0."""

    def factor(self, step: int) -> float:
        """In 0..1 at `step` (from 1)."""
        if step < self.start_step:
            return 0.0
        rising = min(1.0, (step - self.start_step + 1) / (self.warmup_steps + 1))
        if self.end_step is None or step <= self.end_step:
            return rising
        return rising * max(0.0, 1.0 - (step - self.end_step) / (self.decay_steps + 1))

    @model_validator(mode="after")
    def _ends_after_its_start(self) -> WeightSchedule:
        risen = self.start_step + self.warmup_steps
        if self.end_step is not None and self.end_step < risen:
            raise ValueError(
                f"schedule.end_step is {self.end_step}, but the weight rises from start_step = {self.start_step} over "
                f"warmup_steps = {self.warmup_steps} steps: set end_step >= {risen} or a shorter warm-up"
            )
        return self
