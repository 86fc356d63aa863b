"""The result of one side's training run, in terms that both sides share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rl_throughput_sides.plan import Plan


@dataclass(frozen=True, kw_only=True)
class SideResult:
    side: str
    how: str
    """How the side uses its cores."""
    start_s: float
    """From the process's start to the moment when the first rollout can begin."""
    seconds: list[float]
    """[steps]: when each step was done, since that moment."""
    rewards: list[float]
    """[steps]: mean training reward."""
    spent_s: dict[str, float]
    """Seconds by phase, as the side reports them."""
    cpu_s: dict[str, float]
    """CPU seconds by process over the training time."""
    folders: dict[int, Path]
    """Model folder of each evaluated step."""
    heldout: dict[int, float] = field(default_factory=dict)
    """Held-out reward of each evaluated step; filled in afterwards."""

    @property
    def training_s(self) -> float:
        return self.seconds[-1]

    def samples_per_s(self, plan: Plan) -> float:
        """Rollouts that were played and trained, a second."""
        return len(self.seconds) * plan.rollouts / self.training_s

    def steady_per_s(self, plan: Plan) -> float:
        """The same without the first step, which warms both sides up."""
        return (len(self.seconds) - 1) * plan.rollouts / (self.seconds[-1] - self.seconds[0])

    def cores_used(self) -> float:
        return sum(self.cpu_s.values()) / self.training_s

    def seconds_to(self, reward: float) -> float | None:
        """Training seconds until the held-out reward reaches `reward`; None if it never does.

        Linear between evaluated steps.
        """
        before = (0.0, self.heldout[0])
        for step in sorted(self.heldout):
            now = (self.seconds[step - 1] if step else 0.0, self.heldout[step])
            if now[1] >= reward:
                share = 1.0 if now[1] == before[1] else (reward - before[1]) / (now[1] - before[1])
                return before[0] + share * (now[0] - before[0]) if step else 0.0
            before = now
        return None
