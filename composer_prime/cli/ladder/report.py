"""The report of a registered ladder: verdicts, every set of held-out tasks, what each arm used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from composer_prime.cli.ladder.preregistration import FILE, PlannedArm, Preregistration
from composer_prime.cli.ladder.verdicts import Comparison, RunCompute, arm_means, compare, run_compute
from composer_prime.console import pluralize
from composer_prime.errors import LedgerError
from composer_prime.run.run_dir import RunDir


def finished_runs(folder: Path, registered: Preregistration) -> list[RunDir]:
    """Return the runs whose last evaluation is there, those of the baseline first."""
    arms = sorted(registered.arms, key=lambda arm: arm.name != registered.baseline)
    found = []
    for arm in arms:
        for seed in registered.seeds:
            run_dir = RunDir(folder / registered.run_name(arm.name, seed))
            if run_dir.eval_rollouts(arm.steps).is_file() and arm.steps:
                found.append(run_dir)
    return found


def result_lines(folder: Path, registered: Preregistration) -> list[str]:
    """Return the results in the order in which they decide: primary outcome, other tasks, compute."""
    base = registered.arm(registered.baseline)
    text = [
        f"{folder / FILE} of {registered.written}: {registered.primary_outcome};",
        f"smallest effect of interest {registered.minimal_effect:g}, alpha {registered.alpha:g} an arm.",
        "Over tasks: these trained models on other tasks of this kind. Over seeds: these tasks, after training with",
        "other seeds. Both hold after every seed. `composer ladder --help` has the rule of the verdicts.",
    ]
    text += _levels(folder, registered)
    for arm in registered.challengers:
        text += ["", *_primary(folder, registered, base, arm)]
    for source in _other_sources(registered, base):
        text += ["", *_elsewhere(folder, registered, base, source)]
    return [*text, "", *_compute(folder, registered)]


def _other_sources(registered: Preregistration, base: PlannedArm) -> list[str]:
    return [name for name in base.sources if name != registered.held_out]


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
    kinds = {each["name"]: each["weight"] for each in base.settings["orchestrator"]["source"]}
    yield f"held-out {source}" + (", which is never trained on" if kinds[source] == 0 else "")
    for arm in registered.challengers:
        if source not in arm.sources:
            yield f"  {arm.name}: not evaluated on it"
            continue
        result = _result(folder, registered, base, arm, source)
        intervals = "no seed that has both evaluations"
        if result is not None:
            intervals = (
                f"over tasks {result.over_tasks.text(sign=True)}, over {pluralize(len(result.by_seed), 'seed')} "
                f"{result.over_seeds.text(sign=True)}"
            )
        yield f"  {arm.name} - {base.name}: {intervals}"


def _compute(folder: Path, registered: Preregistration) -> Iterator[str]:
    """Yield what a run of each arm used, and its ratio to the baseline's."""
    yield f"compute of a run, at equal optimizer steps ({registered.arm(registered.baseline).steps})"
    of_base: RunCompute | None = None
    total = 0.0
    for arm in sorted(registered.arms, key=lambda arm: arm.name != registered.baseline):
        used = []
        for seed in registered.seeds:
            run_dir = RunDir(folder / registered.run_name(arm.name, seed))
            if run_dir.eval_rollouts(arm.steps).is_file():
                try:
                    used.append(run_compute(run_dir))
                except LedgerError as error:
                    yield f"  {error}"
        if not used:
            continue
        mean = RunCompute(**{name: fmean(getattr(each, name) for each in used) for name in RunCompute.__slots__})
        of_base = of_base or mean
        total += sum(each.usd for each in used)
        ratios = [
            f"{own / base:.2f} x" if base and arm.steps else ""
            for own, base in ((mean.tokens, of_base.tokens), (mean.step_s, of_base.step_s))
        ]
        yield (
            f"  {arm.name:<28} {mean.tokens:>12,.0f} tokens trained {ratios[0]:>7}  {mean.step_s:>9,.0f} s of steps "
            f"{ratios[1]:>7}  {mean.wall_s / 3600:.3f} h  {mean.gpu_s / 3600:.3f} GPU h  ${mean.usd:,.2f}"
        )
    price = "" if total else "; the machine costs nothing unless run.usd_per_hour is set"
    yield f"  finished runs together ${total:,.2f}{price}"
