"""The report of a registered ladder: verdicts, every set of held-out tasks, what each arm used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from composer_prime.cli.ladder.preregistration import FILE, PlannedArm, Preregistration
from composer_prime.cli.ladder.verdicts import Comparison, arm_means, compare
from composer_prime.console import pluralize
from composer_prime.errors import LedgerError
from composer_prime.monitor.metrics_file import read_history
from composer_prime.monitor.progress import RunProgress
from composer_prime.run.costs import spent
from composer_prime.run.run_dir import RunDir


def finished_runs(folder: Path, registered: Preregistration) -> list[RunDir]:
    """Return the trained runs whose last evaluation is there, those of the baseline first."""
    return [run for arm in registered.base_first if arm.steps for run in _finished(folder, registered, arm)]


def _finished(folder: Path, registered: Preregistration, arm: PlannedArm) -> list[RunDir]:
    runs = [RunDir(folder / registered.run_name(arm.name, seed)) for seed in registered.seeds]
    return [run for run in runs if run.eval_rollouts(arm.steps).is_file()]


def result_lines(folder: Path, registered: Preregistration) -> list[str]:
    """Return the results in the order in which they decide: primary outcome, other tasks, compute."""
    base = registered.arm(registered.baseline)
    text = [
        f"{folder / FILE} of {registered.written}: {registered.primary_outcome};",
        f"smallest effect of interest {registered.minimal_effect:g}.",
        "Over tasks: these trained models on other tasks of this kind. Over seeds: these tasks, after training with",
        "other seeds. `composer ladder --help` has the rule of the verdicts.",
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
    """Yield the level of each arm on the primary set, arms without training among them."""
    yield ""
    for arm in registered.arms:
        means = arm_means(folder, registered, arm, registered.held_out)
        levels = [fmean(by_task.values()) for by_task in means.values()]
        state = f"{fmean(levels):.3f} in {pluralize(len(levels), 'run')}" if levels else "no finished run"
        yield f"  {arm.name:<28} {state}{'' if arm.steps else ', not trained'}"


def _primary(folder: Path, registered: Preregistration, base: PlannedArm, arm: PlannedArm) -> list[str]:
    result = _result(folder, registered, base, arm, registered.held_out)
    if result is None:
        return [f"{arm.name} - {base.name}: no seed that has both evaluations"]
    headline = (
        f"{arm.name} - {base.name}, held-out {registered.held_out} after step {arm.steps}: "
        f"{result.over_tasks.mean:+.3f} {result.verdict}: {result.meaning}"
    )
    return [headline, *(f"  {line}" for line in result.lines())]


def _elsewhere(folder: Path, registered: Preregistration, base: PlannedArm, source: str) -> Iterator[str]:
    """Yield each arm's difference on another set of held-out tasks; without a verdict, which only the primary has."""
    yield f"held-out {source}"
    for arm in registered.challengers:
        result = _result(folder, registered, base, arm, source)
        text = "no seed that has both evaluations" if result is None else "; ".join(result.lines())
        yield f"  {arm.name} - {base.name}: {text}"


def _compute(folder: Path, registered: Preregistration) -> Iterator[str]:
    """Yield what a run of each arm used, in the mean over its finished runs."""
    yield f"compute of a run, at equal optimizer steps ({registered.arm(registered.baseline).steps})"
    for arm in registered.base_first:
        try:
            used = [_used(run_dir) for run_dir in _finished(folder, registered, arm)]
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
    return sum(step.tokens or 0.0 for step in steps), sum(step.step_s or 0.0 for step in steps), usd
