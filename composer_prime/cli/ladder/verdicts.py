"""The result of a registered ladder: differences from the baseline arm, their intervals, verdicts.

rollouts/eval_*.jsonl of each run -> mean reward by task -> paired differences
    mean over seeds, by task -> interval over tasks: these trained models, on other tasks of this kind
    mean over tasks, by seed -> interval over seeds: these tasks, after training with other seeds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from composer_prime.cli.ladder.preregistration import PlannedArm, Preregistration
from composer_prime.cli.ladder.seeds import over_seeds
from composer_prime.console import pluralize
from composer_prime.monitor.rollouts import scores
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import Interval, difference_interval

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
    """Over seeds: what training again does on these tasks. No bounds for fewer than three seeds."""
    planned_seeds: int
    minimal_effect: float

    @property
    def verdict(self) -> str:
        """Apply preregistration.RULE, after the last seed only: intervals of earlier looks would err more often."""
        if len(self.by_seed) < self.planned_seeds:
            return "so far"
        low, high = _bounds(self.over_tasks)
        seeds_low, seeds_high = _bounds(self.over_seeds)
        if low > 0 and seeds_low > 0 and self.over_tasks.mean >= self.minimal_effect:
            return "VALIDATED"
        if high < self.minimal_effect and seeds_high < self.minimal_effect:
            return "REFUTED"
        return "PARTIAL" if low > 0 else "UNDECIDED"

    @property
    def meaning(self) -> str:
        """The verdict in words, as plain for a loss as for a gain."""
        low, high = _bounds(self.over_tasks)
        least = f"{self.minimal_effect:.3f}"
        match self.verdict:
            case "so far":
                return f"{len(self.by_seed)} of {pluralize(self.planned_seeds, 'seed')}; the verdict follows the last"
            case "VALIDATED":
                return f"better, on other tasks and with other seeds, and by at least {least} here"
            case "REFUTED" if high < 0 and _bounds(self.over_seeds)[1] < 0:
                return "worse, on other tasks and with other seeds"
            case "REFUTED":
                return f"a gain of {least} is excluded"
        if low > 0 and self.over_tasks.mean < self.minimal_effect:
            return f"these models are better, but by less than the {least} of interest"
        if low > 0 or high < 0:
            return f"these models are {'better' if low > 0 else 'worse'}; not shown for other seeds"
        return f"neither a gain nor a loss is shown, and one of {least} is not excluded"

    def lines(self) -> list[str]:
        of_each = ", ".join(f"{value:+.3f} with seed {seed}" for seed, value in sorted(self.by_seed.items()))
        return [
            f"over tasks  {self.over_tasks.text(sign=True)}  {pluralize(self.over_tasks.count, 'task')}",
            f"over seeds  {self.over_seeds.text(sign=True)}  {of_each}",
        ]


def _bounds(interval: Interval) -> tuple[float, float]:
    """Return the bounds; where there are none, those that show and exclude nothing."""
    if interval.low is None or interval.high is None:
        return float("-inf"), float("inf")
    return interval.low, interval.high


def arm_means(folder: Path, registered: Preregistration, arm: PlannedArm, source: str) -> dict[int, TaskMeans]:
    """Return each seed's mean rewards by held-out task of `source` after the last step, as far as they are there."""
    found = {}
    for seed in registered.seeds:
        path = RunDir(folder / registered.run_name(arm.name, seed)).eval_rollouts(arm.steps)
        rewards = scores(path) if path.is_file() else {}
        if means := {task: fmean(of_task) for task, of_task in rewards.items() if task.startswith(f"{source}/")}:
            found[seed] = means
    return found


def compare(
    registered: Preregistration, base: Mapping[int, TaskMeans], other: Mapping[int, TaskMeans]
) -> Comparison | None:
    """Return other - base over the seeds that both have and the tasks that all of them share; None without any."""
    seeds = [seed for seed in registered.seeds if seed in base and seed in other]
    tasks = sorted(set.intersection(*(set(means[seed]) for means in (base, other) for seed in seeds))) if seeds else []
    if not tasks:
        return None
    by_seed = {seed: fmean(other[seed][task] - base[seed][task] for task in tasks) for seed in seeds}
    before, after = ({task: [means[seed][task] for seed in seeds] for task in tasks} for means in (base, other))
    spread = over_seeds(by_seed)
    assert spread is not None
    return Comparison(
        by_seed=by_seed,
        over_tasks=difference_interval(before, after),
        over_seeds=spread,
        planned_seeds=len(registered.seeds),
        minimal_effect=registered.minimal_effect,
    )
