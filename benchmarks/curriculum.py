"""Curricula against a uniform order, on a synthetic learner: python benchmarks/curriculum.py

A policy of skill s passes task i with probability logistic(12 (s - b_i)). The true difficulties b_i are spread over
[0, 1]; the curriculum sees an estimate of each: b_i and noise. Each step plays groups, and skill grows by what the
groups teach. How they teach is an assumption, so the benchmark runs two of them:

    gradient   a group teaches in proportion to the variance of its rewards, as group-relative advantages do
    practice   every played task teaches in proportion to how near its difficulty is to the skill, passed or not

All curricula meet the same learner with the same seeds. The figure is the mean pass rate over all tasks, on average
over the run. Differences are paired over seeds, with 95 % intervals of a bootstrap. A curriculum may lose.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, GroupPlan
from orchestrator.tasks.curriculum import Curriculum, Frontier, Shuffled

STEEPNESS = 12.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    tasks: int
    steps: int
    groups: int
    size: int
    noise: float
    rate: float
    learner: str


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def taught(setting: Setting, pass_share: float, gap: float) -> float:
    """Return what one group teaches, in [0, 1]. `gap`: true difficulty minus skill."""
    if setting.learner == "gradient":
        return 4 * pass_share * (1 - pass_share)
    return math.exp(-((gap / 0.2) ** 2))


def simulate(setting: Setting, seed: int, build: Callable[[Sequence[float]], Curriculum]) -> tuple[float, float, float]:
    """Return the mean pass rate over the run, the one at its end, and the share of groups with signal."""
    rng = random.Random(seed)
    true = [rng.random() for _ in range(setting.tasks)]
    estimates = [min(1.0, max(0.0, value + rng.gauss(0, setting.noise))) for value in true]
    curriculum = build(estimates)
    skill, rates, with_signal, number = 0.1, [], 0, 0
    for _ in range(setting.steps):
        plans = [(number + at, curriculum.next_task()) for at in range(setting.groups)]
        number += setting.groups
        gain = 0.0
        for group, task in plans:
            gap = true[task] - skill
            rewards = [float(rng.random() < logistic(-STEEPNESS * gap)) for _ in range(setting.size)]
            share = sum(rewards) / setting.size
            gain += taught(setting, share, gap)
            with_signal += 0 < share < 1
            curriculum.observe(finished(group, task, rewards))
        skill += setting.rate * gain / setting.groups
        rates.append(statistics.fmean(logistic(STEEPNESS * (skill - value)) for value in true))
    return statistics.fmean(rates), rates[-1], with_signal / number


def finished(group: int, task: int, rewards: list[float]) -> FinishedGroup:
    plan = GroupPlan(group=group, source="s", task_index=task, seed=0, size=len(rewards))
    rollouts = [
        FinishedRollout(rollout_id=f"{group}/{at}", sibling=at, task_id=str(task), seed=0, reward=reward)
        for at, reward in enumerate(rewards)
    ]
    return FinishedGroup(plan=plan, outcome=GroupOutcome.READY, rollouts=rollouts)


def interval(differences: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by 4,000 draws with replacement."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(differences, k=len(differences))) for _ in range(4000))
    return means[100], means[3899]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--groups", type=int, default=8, help="groups of a step")
    parser.add_argument("--size", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.1, 0.3], help="of the estimates")
    parser.add_argument("--rate", type=float, default=0.012, help="skill that a step of full signal adds")
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    count = arguments.tasks
    for learner in ("gradient", "practice"):
        for noise in arguments.noise:
            setting = Setting(
                tasks=count,
                steps=arguments.steps,
                groups=arguments.groups,
                size=arguments.size,
                noise=noise,
                rate=arguments.rate,
                learner=learner,
            )
            results = {
                name: [
                    simulate(setting, seed, lambda estimates, f=build, s=seed: f(estimates, s))
                    for seed in range(arguments.seeds)
                ]
                for name, build in CURRICULA.items()
            }
            uniform = results["uniform"]
            print(f"learner {learner}, noise of estimates {noise:g}, {count} tasks, {arguments.seeds} seeds")
            for name, runs in results.items():
                means = [statistics.fmean(column) for column in zip(*runs, strict=True)]
                low, high = interval([run[0] - base[0] for run, base in zip(runs, uniform, strict=True)])
                print(
                    f"  {name:<22} pass rate over the run {means[0]:.3f}, at the end {means[1]:.3f}, groups with "
                    f"signal {means[2]:.2f}, minus uniform [{low:+.3f}, {high:+.3f}]"
                )


CURRICULA: dict[str, Callable[[Sequence[float], int], Curriculum]] = {
    "uniform": lambda estimates, seed: Shuffled(num_tasks=len(estimates), seed=seed),
    "frontier, no estimates": lambda estimates, seed: Frontier(num_tasks=len(estimates), seed=seed),
    "frontier, estimates": lambda estimates, seed: Frontier(num_tasks=len(estimates), seed=seed, difficulty=estimates),
    "frontier, misled": lambda estimates, seed: Frontier(
        num_tasks=len(estimates), seed=seed, difficulty=[1 - estimate for estimate in estimates]
    ),
}

if __name__ == "__main__":
    main()
