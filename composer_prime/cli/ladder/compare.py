"""Arms side by side at equal steps: the tables of `composer ladder`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from composer_prime.cli.ladder import report
from composer_prime.cli.ladder.preregistration import Preregistration
from composer_prime.cli.ladder.seeds import (
    Arm,
    differences,
    differing,
    group_into_arms,
    level,
    load_run,
    seeds_text,
    windows,
)
from composer_prime.console import columns, pluralize
from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import RunDir

METRICS = ("reward/mean", "rollout/turn_error_rate", "sdpo/turns", "sdpo/turn_jsd", "dpo/accuracy")
BINS = 6
"""Windows of steps."""
_WIDTH = 120
"""Characters in a line if the output is not a terminal and COLUMNS is not set."""


def report_ladder(
    folder: Path,
    registered: Preregistration,
    *,
    metrics: Sequence[str] = METRICS,
    steps: int | None = None,
    bins: int = BINS,
) -> None:
    """Print the comparison of a registered ladder's finished runs, and its results below."""
    if runs := report.finished_runs(folder, registered):
        compare(runs, metrics=metrics, steps=steps, bins=bins)
    print("\n".join(["", *report.result_lines(folder, registered)]))


def compare(
    runs: Sequence[RunDir],
    *,
    metrics: Sequence[str],
    steps: int | None,
    bins: int,
) -> None:
    """Print the arms side by side.

    `steps`: how many to compare; None for those of the shortest run. Raises ConfigError if that has fewer.
    """
    all_arms = group_into_arms(load_run(run_dir) for run_dir in runs)
    shortest = min(run.steps for arm in all_arms for run in arm.runs.values())
    if steps is not None and steps > shortest:
        raise ConfigError(f"--steps {steps}: the shortest of the runs has {shortest}; give at most that")
    steps = shortest if steps is None else steps
    width = columns() or _WIDTH
    lines = _head(all_arms, steps, width)
    for metric in metrics:
        lines += _training(all_arms, metric, steps, bins, width)
    print("\n".join(lines + _held_out(all_arms, steps, width)))


def _head(all_arms: list[Arm], steps: int, width: int) -> list[str]:
    text = [f"{pluralize(len(all_arms), 'arm')} at {pluralize(steps, 'step')}"]
    for arm in all_arms:
        text.append(f"  {arm.name:<14} seeds {', '.join(map(str, sorted(arm.runs)))}")
        for line in differing(all_arms[0], arm) if arm is not all_arms[0] else []:
            text += wrap(line, width, initial_indent=" " * 6, subsequent_indent=" " * 10, break_on_hyphens=False)
    return text


def _training(all_arms: list[Arm], metric: str, steps: int, bins: int, width: int) -> list[str]:
    """Return one row a window: each arm's mean over seeds, then each arm's difference from the base.

    Empty for a figure that no run has, or that is 0 everywhere.
    """
    parts = [*windows(steps, bins), range(1, steps + 1)]
    if not any(level(run, metric, parts[-1]) for arm in all_arms for run in arm.runs.values()):
        return []
    rows = {}
    for part in parts:
        figures = [{seed: level(run, metric, part) for seed, run in arm.runs.items()} for arm in all_arms]
        rows[f"{part[0]}-{part[-1]}"] = _cells(figures)
    return ["", metric, *ladder_table(_labels(all_arms), rows, width)]


def _held_out(all_arms: list[Arm], steps: int, width: int) -> list[str]:
    """Return such rows for the held-out rewards and turn errors of evaluations that every arm has."""
    text: list[str] = []
    runs = [run for arm in all_arms for run in arm.runs.values()]
    evaluated = [{step for step in run.evaluations if step <= steps} for run in runs]
    shared, left_out = set.intersection(*evaluated), sorted(set.union(*evaluated) - set.intersection(*evaluated))
    if left_out:
        of_all, of_some = (", ".join(map(str, each)) or "none" for each in (sorted(shared), left_out))
        text += ["", f"only evaluations that every arm has: steps {of_all}; left out: {of_some}"]
    names = sorted({name for run in runs for figures in run.evaluations.values() for name in figures})
    for name in (name for name in names if name.endswith(("/reward_mean", "/turn_error_rate"))):
        rows = {}
        for step in sorted(shared):
            figures = [{seed: run.evaluations[step].get(name) for seed, run in arm.runs.items()} for arm in all_arms]
            rows[str(step)] = _cells(figures)
        text += ["", f"held-out {name.removeprefix('eval/')}", *ladder_table(_labels(all_arms), rows, width)]
    return text


def _labels(all_arms: list[Arm]) -> list[str]:
    return [*(arm.name for arm in all_arms), *(f"{arm.name} - {all_arms[0].name}" for arm in all_arms[1:])]


def _cells(figures: list[dict[int, float | None]]) -> list[str]:
    """Return the cells below `_labels`: each arm's figures over seeds, then differences from the first."""
    cells = [seeds_text(values) for values in figures]
    cells += [seeds_text(differences(figures[0], values), sign=True) for values in figures[1:]]
    return [cell or "-" for cell in cells]


def ladder_table(labels: list[str], rows: dict[str, list[str]], width: int) -> list[str]:
    """Return columns under `labels`, as many side by side as fit into `width` characters.

    The others follow below, with the rows' names again. Rows without any figure are left out.
    """
    rows = {name: cells for name, cells in rows.items() if any(cell != "-" for cell in cells)}
    widths = [max(map(len, column)) for column in zip(labels, *rows.values(), strict=True)]
    first = max(8, *map(len, rows), 0)
    text, start = [], 0
    while start < len(labels):
        end = start + 1
        while end < len(labels) and 2 + first + sum(3 + size for size in widths[start : end + 1]) <= width:
            end += 1
        for name, cells in {"": labels, **rows}.items():
            shown = (cell.ljust(size) for cell, size in zip(cells[start:end], widths[start:end], strict=True))
            text.append("   ".join([f"  {name:>{first}}", *shown]).rstrip())
        start = end
    return text
