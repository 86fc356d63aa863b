"""The result of a registered ladder: differences from the baseline arm, their intervals, verdicts, compute.

rollouts/eval_*.jsonl of each run -> mean reward by task -> paired differences
    mean over seeds, by task -> interval over tasks: these trained models, on other tasks of this kind
    mean over tasks, by seed -> interval over seeds: these tasks, after training with other seeds
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from composer_prime.cli.ladder.preregistration import PlannedArm, Preregistration
from composer_prime.cli.ladder.sequential import seeds_interval, tasks_interval
from composer_prime.console import pluralize
from composer_prime.errors import ConfigError
from composer_prime.monitor.metrics_file import read_history
from composer_prime.monitor.progress import RunProgress
from composer_prime.monitor.rollouts import scores
from composer_prime.run.costs import spent
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import Interval

TaskMeans = dict[str, float]
"""Mean reward by held-out task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm against another on one set of held-out tasks, at one step, as far as it is known."""

    by_seed: dict[int, float]
    """Difference over all tasks, of each seed that both arms have finished."""
    over_tasks: Interval
    """Over tasks, of the mean over seeds: what these trained models do on other tasks of this kind."""
    over_seeds: Interval
    """Over seeds: what training again does on these tasks. No bounds for one seed."""
    planned_seeds: int
    minimal_effect: float

    @property
    def verdict(self) -> str:
        """Apply preregistration.RULE."""
        low, high, least = self.over_tasks.low, self.over_tasks.high, self.minimal_effect
        assert low is not None and high is not None
        if self.over_seeds.low is not None and self.over_seeds.high is not None:
            if low > 0 and self.over_seeds.low > 0 and self.over_tasks.mean >= least:
                return "VALIDATED"
            if high < least and self.over_seeds.high < least:
                return "REFUTED"
        return "PARTIAL" if low > 0 else "UNDECIDED"

    @property
    def meaning(self) -> str:
        """The verdict in words, as plain for a loss as for a gain."""
        verdict, least = self.verdict, f"{self.minimal_effect:.3f}"
        low, high = self.over_tasks.low or 0.0, self.over_tasks.high or 0.0
        lost = self.over_seeds.high is not None and self.over_seeds.high < 0
        seeds = len(self.by_seed)
        few = f" ({seeds} are few)" if seeds == 2 else ""
        others = "one seed says nothing of others" if seeds == 1 else f"not shown for other seeds{few}"
        if verdict == "VALIDATED":
            return f"better, on other tasks and with other seeds, and by at least {least} here"
        if verdict == "REFUTED" and high < 0 and lost:
            return "worse, on other tasks and with other seeds"
        if verdict == "REFUTED":
            return f"a gain of {least} is excluded" + ("; a smaller one is shown over tasks" if low > 0 else "")
        if verdict == "PARTIAL" and self.over_tasks.mean < self.minimal_effect:
            return f"these models are better, but by less than the {least} of interest"
        if low > 0:
            return f"these models are better; {others}"
        if high < 0:
            return f"these models are worse; {others}"
        if high < self.minimal_effect:
            return f"neither a gain nor a loss is shown; over tasks a gain of {least} is excluded, {others}"
        return f"neither a gain nor a loss is shown, and one of {least} is not excluded"

    def lines(self) -> list[str]:
        seeds = f"{len(self.by_seed)} of {pluralize(self.planned_seeds, 'seed')}"
        of_each = ", ".join(f"{value:+.3f} with seed {seed}" for seed, value in sorted(self.by_seed.items()))
        tasks = pluralize(self.over_tasks.count, "task")
        return [
            f"over tasks  {self.over_tasks.text(sign=True)}  {tasks}, mean of {seeds}",
            f"over seeds  {self.over_seeds.text(sign=True)}  {of_each}",
        ]


def task_means(run_dir: RunDir, source: str, step: int, registered: Preregistration) -> TaskMeans | None:
    """Return each held-out task's mean reward of the evaluation after `step`; None before it.

    Raises ConfigError for a reward outside the registered range.
    """
    path = run_dir.eval_rollouts(step)
    if not path.is_file():
        return None
    by_task = {task: rewards for task, rewards in scores(path).items() if task.startswith(f"{source}/")}
    low, high = registered.reward_range
    for task, rewards in by_task.items():
        if min(rewards) < low or max(rewards) > high:
            outside = next(reward for reward in rewards if not low <= reward <= high)
            raise ConfigError(
                f"{path}: {task} has the reward {outside:g}, but the ladder is registered for rewards from {low:g} to "
                f"{high:g}, on which its intervals rest: start another ladder with --rewards, in another folder"
            )
    return {task: fmean(rewards) for task, rewards in by_task.items()}


def arm_means(folder: Path, registered: Preregistration, arm: PlannedArm, source: str) -> dict[int, TaskMeans]:
    """Return the task means of every seed of `arm` after its last step, as far as they are there."""
    found = {}
    for seed in registered.seeds:
        run_dir = RunDir(folder / registered.run_name(arm.name, seed))
        if means := task_means(run_dir, source, arm.steps, registered):
            found[seed] = means
    return found


def compare(
    registered: Preregistration, base: Mapping[int, TaskMeans], other: Mapping[int, TaskMeans]
) -> Comparison | None:
    """Return other - base over the seeds that both have and the tasks that all of them share; None without any.

    Tasks are taken in the order of a hash of their names, which no result can influence.
    """
    seeds = [seed for seed in registered.seeds if seed in base and seed in other]
    if not seeds:
        return None
    shared = set.intersection(*(set(means[seed]) for means in (base, other) for seed in seeds))
    if not shared:
        return None
    tasks = sorted(shared, key=lambda task: hashlib.sha256(task.encode()).digest())
    by_seed = {seed: fmean(other[seed][task] - base[seed][task] for task in tasks) for seed in seeds}
    by_task = [fmean(other[seed][task] - base[seed][task] for seed in seeds) for task in tasks]
    planned, alpha = len(registered.seeds), registered.alpha
    return Comparison(
        by_seed=by_seed,
        over_tasks=tasks_interval(by_task, span=registered.span, alpha=alpha / planned, horizon=registered.tasks),
        over_seeds=seeds_interval(list(by_seed.values()), alpha=alpha, planned=planned),
        planned_seeds=planned,
        minimal_effect=registered.minimal_effect,
    )


def decided(folder: Path, registered: Preregistration) -> bool:
    """Return whether every arm is VALIDATED or REFUTED by the runs that are finished."""
    base = arm_means(folder, registered, registered.arm(registered.baseline), registered.held_out)
    others = (arm_means(folder, registered, arm, registered.held_out) for arm in registered.challengers)
    results = [compare(registered, base, means) for means in others]
    return bool(results) and all(each is not None and each.verdict in ("VALIDATED", "REFUTED") for each in results)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCompute:
    """What one run used, as far as it noted it."""

    tokens: float
    """Trained by the optimizer steps that count."""
    step_s: float
    """Of these steps."""
    wall_s: float
    """Of the launcher's starts, start-up and evaluations included."""
    gpu_s: float
    usd: float
    """The machine at run.usd_per_hour, nodes at their prices, teachers and hints."""


def run_compute(run_dir: RunDir) -> RunCompute:
    """Raises LedgerError for a costs.jsonl that cannot be summed."""
    progress = RunProgress()
    progress.update(read_history(run_dir.metrics))
    paid = spent(run_dir.root / "costs.jsonl")
    return RunCompute(
        tokens=sum(step.tokens or 0.0 for step in progress.steps.values()),
        step_s=sum(step.step_s or 0.0 for step in progress.steps.values()),
        wall_s=paid.machine_s,
        gpu_s=paid.gpu_s,
        usd=paid.machine_usd + paid.node_usd + paid.usd + paid.hint_usd,
    )
