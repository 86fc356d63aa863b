"""The report of a registered ladder: verdicts, washouts, every set of held-out tasks, what each arm used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from composer_prime.console import pluralize
from composer_prime.errors import LedgerError
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.comparison import Comparison, RunCompute, arm_means, compare, run_compute
from composer_prime.stats.preregistration import FILE, PlannedArm, Preregistration


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
    """Return the results in the order in which they decide: primary outcome, washouts, other tasks, compute."""
    base = registered.arm(registered.baseline)
    text = [
        f"{folder / FILE} of {registered.written}: {registered.primary_outcome};",
        f"smallest effect of interest {registered.minimal_effect:g}, alpha {registered.alpha:g} an arm.",
        "Over tasks: these trained models on other tasks of this kind. Over seeds: these tasks, after training with",
        "other seeds. Both hold after every seed. `composer ladder --help` has the rule of the verdicts.",
    ]
    text += _levels(folder, registered)
    for arm in registered.challengers:
        if arm.washout is None:
            text += ["", *_primary(folder, registered, base, arm)]
    for arm in registered.challengers:
        if arm.washout is not None:
            text += ["", *_washout(folder, registered, base, arm)]
    for source in _other_sources(registered, base):
        text += ["", *_elsewhere(folder, registered, base, source)]
    return [*text, "", *_compute(folder, registered)]


def sentences(folder: Path, registered: Preregistration) -> list[dict[str, str]]:
    """Return verdicts, washouts and other sets of tasks as the page shows them: `text` and `tone`."""
    base = registered.arm(registered.baseline)
    shown = []
    for arm in registered.challengers:
        result = _result(folder, registered, base, arm, registered.held_out)
        if arm.washout is not None:
            shown.append({"text": _washout(folder, registered, base, arm)[0], "tone": "open"})
        elif result is not None:
            intervals = f"{_headline(base, arm, registered.held_out, result)} ({_intervals(result)})"
            shown.append({"text": intervals, "tone": result.tone})
    for source in _other_sources(registered, base):
        name, *rows = _elsewhere(folder, registered, base, source)
        shown += [{"text": f"{name}: {row.strip()}", "tone": "open"} for row in rows]
    return shown


def _other_sources(registered: Preregistration, base: PlannedArm) -> list[str]:
    return [name for name in base.sources if name != registered.held_out]


def _result(
    folder: Path, registered: Preregistration, base: PlannedArm, arm: PlannedArm, source: str, step: int | None = None
) -> Comparison | None:
    means = [arm_means(folder, registered, each, source, step) for each in (base, arm)]
    return compare(registered, *means)


def _headline(base: PlannedArm, arm: PlannedArm, source: str, result: Comparison) -> str:
    return (
        f"{arm.name} - {base.name}, held-out {source} after step {arm.steps}: {result.over_tasks.mean:+.3f} "
        f"{result.verdict}: {result.meaning}"
    )


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
    return [
        _headline(base, arm, registered.held_out, result),
        *(f"  {line}" for line in result.lines()),
    ]


def _washout(folder: Path, registered: Preregistration, base: PlannedArm, arm: PlannedArm) -> list[str]:
    """Return whether the gain of a term stays after its weight fell to 0."""
    probe = arm.washout
    assert probe is not None
    full, last = registered.arm(probe.arm), arm.steps
    source = registered.held_out
    with_term = _result(folder, registered, base, full, source, probe.step)
    at_end = _result(folder, registered, base, arm, source)
    against = _result(folder, registered, full, arm, source)
    text = [f"washout of {probe.term} in {full.name}, weight 0 after step {probe.step}: {_stays(with_term, at_end)}"]
    for name, result in (
        (f"{full.name} - {base.name} after step {probe.step}", with_term),
        (f"{arm.name} - {base.name} after step {last}", at_end),
        (f"{arm.name} - {full.name} after step {last}", against),
    ):
        text.append(f"  {name}: " + (_intervals(result) if result else "no seed that has both evaluations"))
    return text


def _stays(with_term: Comparison | None, at_end: Comparison | None) -> str:
    """Return the answer, by the intervals over tasks, and by those over seeds where there are some."""
    if with_term is None or at_end is None:
        return "not known yet"
    if not _above(with_term):
        return "no gain was shown while the term had its weight, so none can be lost"
    if _above(at_end):
        return "the gain stays"
    high, least = at_end.over_tasks.high, at_end.minimal_effect
    if high is not None and high < least:
        return f"the gain is gone: {least:g} or more is excluded at the end"
    return "undecided: the gain was there, and at the end neither it nor 0 is excluded"


def _above(result: Comparison) -> bool:
    """Return whether the difference lies above 0 over tasks, and over seeds where there are several."""
    of_seeds = len(result.by_seed) == 1 or (result.over_seeds.low or 0.0) > 0
    return (result.over_tasks.low or 0.0) > 0 and of_seeds


def _elsewhere(folder: Path, registered: Preregistration, base: PlannedArm, source: str) -> Iterator[str]:
    """Yield each arm's difference on another set of held-out tasks; without a verdict, which only the primary has."""
    kinds = {each["name"]: each["weight"] for each in base.settings["orchestrator"]["source"]}
    yield f"held-out {source}" + (", which is never trained on" if kinds[source] == 0 else "")
    for arm in registered.challengers:
        if source not in arm.sources:
            yield f"  {arm.name}: not evaluated on it"
            continue
        result = _result(folder, registered, base, arm, source)
        yield f"  {arm.name} - {base.name}: " + (_intervals(result) if result else "no seed that has both evaluations")


def _intervals(result: Comparison) -> str:
    return (
        f"over tasks {result.over_tasks.text(sign=True)}, over {pluralize(len(result.by_seed), 'seed')} "
        f"{result.over_seeds.text(sign=True)}"
    )


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
