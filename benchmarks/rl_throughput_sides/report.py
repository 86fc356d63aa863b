"""The result of one side's run, and tables of a case: rates, times by phase, the path to a common held-out reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

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


Pair = tuple[SideResult, SideResult]
"""Ours and TRL's run of one repeat."""


def case_lines(plan: Plan, pairs: list[Pair]) -> list[str]:
    """Medians over the repeats, each side's profile of its last repeat, and the curves."""
    ours, theirs = pairs[-1]

    def row(name: str, value: Callable[[SideResult], float]) -> str:
        return _row(name, [value(side) for side, _ in pairs], [value(side) for _, side in pairs])

    return [
        f"{'':<38}{'ours':>12}{'TRL':>12}{'ours/TRL':>12}{'TRL/ours':>12}",
        row("samples/s", lambda side: side.samples_per_s(plan)),
        row("samples/s after the first step", lambda side: side.steady_per_s(plan)),
        row(f"seconds for {plan.steps} steps", lambda side: side.training_s),
        *_reached(pairs),
        row("start-up, seconds (not in the rates)", lambda side: side.start_s),
        row("cores in use", lambda side: side.cores_used()),
        *_profile(plan, ours),
        *_profile(plan, theirs),
        *_curves(pairs),
    ]


def figures(plan: Plan, pairs: list[Pair]) -> dict[str, Any]:
    """The same as plain values, for --out."""
    return {
        "steps": plan.steps,
        "rollouts_per_step": plan.rollouts,
        "ours_over_trl": median(o.samples_per_s(plan) for o, _ in pairs)
        / median(t.samples_per_s(plan) for _, t in pairs),
        "repeats": [[_plain(plan, side) for side in pair] for pair in pairs],
        "common_reward": [_common(pair) for pair in pairs],
    }


def _row(name: str, ours: list[float], theirs: list[float]) -> str:
    first, second = median(ours), median(theirs)
    return f"{name:<38}{first:>12.2f}{second:>12.2f}{_ratio(first, second):>12}{_ratio(second, first):>12}"


def _ratio(first: float, second: float) -> str:
    return f"{first / second:.2f}" if second else "-"


def _common(pair: Pair) -> float:
    """The lower of the two final held-out rewards: the best that both sides reached."""
    return min(side.heldout[max(side.heldout)] for side in pair)


def _reached(pairs: list[Pair]) -> list[str]:
    lines = []
    for number, pair in enumerate(pairs):
        reward = _common(pair)
        name = f"seconds to held-out {reward:.3f}" + (f" (#{number + 1})" if len(pairs) > 1 else "")
        first, second = (side.seconds_to(reward) for side in pair)
        if first is None or second is None:
            words = ["not reached" if value is None else f"{value:.2f}" for value in (first, second)]
            lines.append(f"{name:<38}{words[0]:>12}{words[1]:>12}")
        else:
            lines.append(_row(name, [first], [second]))
    return lines


def _profile(plan: Plan, side: SideResult) -> list[str]:
    samples = plan.rollouts * plan.steps
    spent = ", ".join(f"{name} {100 * value / side.training_s:.0f} %" for name, value in side.spent_s.items())
    cpu = ", ".join(f"{name} {1000 * value / samples:.1f}" for name, value in side.cpu_s.items())
    return [f"{side.side} ({side.how})", f"    time of training: {spent}", f"    CPU ms a sample:  {cpu}"]


def _curves(pairs: list[Pair]) -> list[str]:
    """Held-out reward against training seconds, one line a side and repeat."""
    lines = ["held-out reward at training seconds:"]
    for pair in pairs:
        for side in pair:
            points = (f"{side.seconds[step - 1] if step else 0:.0f} s {side.heldout[step]:.3f}"
                      for step in sorted(side.heldout))  # fmt: skip
            lines.append(f"    {side.side:<5}" + "  ".join(points))
    return lines


def _plain(plan: Plan, side: SideResult) -> dict[str, Any]:
    return {
        "side": side.side,
        "how": side.how,
        "samples_per_s": side.samples_per_s(plan),
        "samples_per_s_after_first_step": side.steady_per_s(plan),
        "training_s": side.training_s,
        "start_s": side.start_s,
        "cores_used": side.cores_used(),
        "step_s": side.seconds,
        "training_reward": side.rewards,
        "heldout_reward": side.heldout,
        "spent_s": side.spent_s,
        "cpu_s": side.cpu_s,
    }
