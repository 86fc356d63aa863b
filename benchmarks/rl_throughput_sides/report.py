"""The result of one side's run, and the table of a case: rates, and the time to a common held-out reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rl_throughput_sides.plan import Plan


@dataclass(frozen=True, kw_only=True)
class SideResult:
    how: str
    """How the side uses its cores."""
    start_s: float
    """From the process's start to the moment when the first rollout can begin."""
    seconds: list[float]
    """[steps]: when each step was done, since that moment."""
    folders: dict[int, Path]
    """Model folder of each evaluated step."""
    heldout: dict[int, float] = field(default_factory=dict)
    """Held-out reward of each evaluated step; filled in afterwards."""

    def samples_per_s(self, plan: Plan) -> float:
        """Rollouts that were played and trained, a second."""
        return len(self.seconds) * plan.rollouts / self.seconds[-1]

    def steady_per_s(self, plan: Plan) -> float:
        """The same without the first step, which warms both sides up."""
        return (len(self.seconds) - 1) * plan.rollouts / (self.seconds[-1] - self.seconds[0])

    def seconds_to(self, reward: float) -> float | None:
        """Training seconds until an evaluated step has the held-out `reward`; None if none has."""
        reached = [step for step in sorted(self.heldout) if self.heldout[step] >= reward]
        return None if not reached else self.seconds[reached[0] - 1] if reached[0] else 0.0


def figures(plan: Plan, ours: SideResult, theirs: SideResult) -> dict[str, tuple[float | None, float | None]]:
    """(ours, TRL's) figures of a case, by name."""
    common = min(side.heldout[max(side.heldout)] for side in (ours, theirs))
    return {
        "samples/s": (ours.samples_per_s(plan), theirs.samples_per_s(plan)),
        "samples/s after the first step": (ours.steady_per_s(plan), theirs.steady_per_s(plan)),
        f"seconds to held-out {common:.3f}": (ours.seconds_to(common), theirs.seconds_to(common)),
        "held-out reward at the end": (ours.heldout[plan.steps], theirs.heldout[plan.steps]),
        "start-up, seconds (not in the rates)": (ours.start_s, theirs.start_s),
    }


def table(found: dict[str, tuple[float | None, float | None]]) -> list[str]:
    rows = [f"{'':<38}{'ours':>12}{'TRL':>12}{'ours/TRL':>12}"]
    for name, pair in found.items():
        first, second = ("not reached" if value is None else f"{value:.2f}" for value in pair)
        ratio = f"{pair[0] / pair[1]:.2f}" if pair[0] is not None and pair[1] else "-"
        rows.append(f"{name:<38}{first:>12}{second:>12}{ratio:>12}")
    return rows
