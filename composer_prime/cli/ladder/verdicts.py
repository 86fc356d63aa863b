"""The result of a registered ladder: differences from the baseline, intervals, verdicts and compute.

rollouts/eval_*.jsonl of each run -> mean reward by task -> paired differences
    mean over seeds, by task -> interval over tasks: these models, on other tasks
    mean over tasks, by seed -> interval over seeds: these tasks, with other seeds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from composer_prime.cli.ladder.preregistration import FILE, PlannedArm, Preregistration
from composer_prime.console import pluralize
from composer_prime.errors import LedgerError
from composer_prime.monitor.metrics_file import numeric_field, read_history
from composer_prime.monitor.progress import RunProgress
from composer_prime.monitor.rollouts import scores
from composer_prime.plan.check_run_dir import changed_settings
from composer_prime.run.costs import spent
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import Interval, difference_interval, seeds_interval

TaskMeans = dict[str, float]
"""Mean reward by held-out task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm against another on one set of held-out tasks, at one step."""

    by_seed: dict[int, float]
    """Difference over all tasks, for each seed that both arms have finished."""
    over_tasks: Interval
    over_seeds: Interval
    """Without bounds for fewer than three seeds."""
    planned_seeds: int
    minimal_effect: float

    @property
    def verdict(self) -> str:
        """Apply RULE, after the last seed only: earlier looks would err more often."""
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
                seeds = pluralize(self.planned_seeds, "seed")
                return f"{len(self.by_seed)} of {seeds}; the verdict follows the last"
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
    """Return the bounds, or those that show and exclude nothing."""
    if interval.low is None or interval.high is None:
        return float("-inf"), float("inf")
    return interval.low, interval.high


def arm_means(folder: Path, registered: Preregistration, arm: PlannedArm, source: str) -> dict[int, TaskMeans]:
    """Return each finished seed's mean rewards by held-out task of `source` after the last step."""
    found = {}
    for seed in registered.seeds:
        path = RunDir(folder / registered.run_name(arm.name, seed)).eval_rollouts(arm.steps)
        rewards = scores(path) if path.is_file() else {}
        means = {task: fmean(each) for task, each in rewards.items() if task.startswith(f"{source}/")}
        if means:
            found[seed] = means
    return found


def compare(
    registered: Preregistration, base: Mapping[int, TaskMeans], other: Mapping[int, TaskMeans]
) -> Comparison | None:
    """Return other - base over the seeds and tasks that both have; None without any."""
    seeds = [seed for seed in registered.seeds if seed in base and seed in other]
    shared = [set(means[seed]) for means in (base, other) for seed in seeds]
    tasks = sorted(set.intersection(*shared)) if shared else []
    if not tasks:
        return None
    by_seed = {seed: fmean(other[seed][task] - base[seed][task] for task in tasks) for seed in seeds}
    before, after = (_by_task(means, seeds, tasks) for means in (base, other))
    return Comparison(
        by_seed=by_seed,
        over_tasks=difference_interval(before, after),
        over_seeds=seeds_interval(list(by_seed.values())),
        planned_seeds=len(registered.seeds),
        minimal_effect=registered.minimal_effect,
    )


def _by_task(means: Mapping[int, TaskMeans], seeds: list[int], tasks: list[str]) -> dict[str, list[float]]:
    return {task: [means[seed][task] for seed in seeds] for task in tasks}


def result_lines(folder: Path, registered: Preregistration) -> list[str]:
    """Return the results: the primary outcome, then other tasks, then compute."""
    base = registered.arm(registered.baseline)
    text = [
        f"{folder / FILE} of {registered.written}: {registered.primary_outcome};",
        f"smallest effect of interest {registered.minimal_effect:g}.",
        "Over tasks: these models on other tasks of this kind. Over seeds: these tasks with other seeds.",
        "`composer ladder --help` has the rule of the verdicts.",
        "",
        *_levels(folder, registered),
    ]
    for arm in registered.challengers:
        text += ["", *_primary(folder, registered, base, arm)]
    for source in (name for name in base.sources if name != registered.held_out):
        text += ["", *_elsewhere(folder, registered, base, source)]
    return [*text, "", *_compute(folder, registered)]


def _result(
    folder: Path, registered: Preregistration, base: PlannedArm, arm: PlannedArm, source: str
) -> Comparison | None:
    return compare(registered, *(arm_means(folder, registered, each, source) for each in (base, arm)))


def _levels(folder: Path, registered: Preregistration) -> Iterator[str]:
    """Yield each arm's level on the primary set, untrained arms too."""
    for arm in registered.arms:
        means = arm_means(folder, registered, arm, registered.held_out)
        levels = [fmean(by_task.values()) for by_task in means.values()]
        state = f"{fmean(levels):.3f} in {pluralize(len(levels), 'run')}" if levels else "no finished run"
        yield f"  {arm.name:<28} {state}{'' if arm.steps else ', not trained'}"


def _primary(folder: Path, registered: Preregistration, base: PlannedArm, arm: PlannedArm) -> Iterator[str]:
    """Yield an arm's verdict, both intervals, and the settings that differ from the baseline."""
    result = _result(folder, registered, base, arm, registered.held_out)
    if result is None:
        yield f"{arm.name} - {base.name}: no seed that has both evaluations"
    else:
        yield (
            f"{arm.name} - {base.name}, held-out {registered.held_out} after step {arm.steps}: "
            f"{result.over_tasks.mean:+.3f} {result.verdict}: {result.meaning}"
        )
        yield from (f"  {line}" for line in result.lines())
    for name, old, new in changed_settings(base.settings, arm.settings):
        yield f"  {name}: {old} -> {new}"


def _elsewhere(folder: Path, registered: Preregistration, base: PlannedArm, source: str) -> Iterator[str]:
    """Yield each arm's difference on another set. Only the primary one has a verdict."""
    yield f"held-out {source}"
    for arm in registered.challengers:
        result = _result(folder, registered, base, arm, source)
        text = "no seed that has both evaluations" if result is None else "; ".join(result.lines())
        yield f"  {arm.name} - {base.name}: {text}"


def _compute(folder: Path, registered: Preregistration) -> Iterator[str]:
    """Yield what a run of each arm used, as the mean over its finished runs."""
    yield f"compute of a run, at equal optimizer steps ({registered.arm(registered.baseline).steps})"
    for arm in registered.arms:
        runs = [RunDir(folder / registered.run_name(arm.name, seed)) for seed in registered.seeds]
        try:
            used = [_used(run) for run in runs if run.eval_rollouts(arm.steps).is_file()]
        except LedgerError as error:
            yield f"  {error}"
            continue
        if used:
            tokens, step_s, usd = (fmean(column) for column in zip(*used, strict=True))
            yield f"  {arm.name:<28} {tokens:>12,.0f} tokens trained  {step_s:>9,.0f} s of steps  ${usd:,.2f}"


def _used(run_dir: RunDir) -> tuple[float, float, float]:
    """Return trained tokens, seconds of optimizer steps and dollars. Raises LedgerError."""
    progress = RunProgress()
    progress.update(read_history(run_dir.metrics))
    steps = progress.steps.values()
    usd = spent(run_dir.root / "costs.jsonl").total_usd
    tokens = sum(numeric_field(line, "tokens/trained") or 0.0 for line in steps)
    return tokens, sum(numeric_field(line, "time/step_s") or 0.0 for line in steps), usd
