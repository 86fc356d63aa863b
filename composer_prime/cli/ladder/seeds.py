"""Runs of several arms and seeds side by side: what an arm changes, with intervals over seeds.

Runs belong to one arm when their configurations differ only in seed and name. Arms are compared at equal steps and seed
by seed, because runs of one seed see the same tasks in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from composer_prime.errors import ConfigError
from composer_prime.host import install_command
from composer_prime.monitor.metrics_file import read_history
from composer_prime.monitor.progress import numeric_field
from composer_prime.plan.check_run_dir import changed_settings
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import Interval

Settings = dict[str, Any]
_ROUNDING = 1e-9
"""Figures that differ by less are equal but for rounding."""
_OF_ONE_RUN = ("run", "monitor")
"""Tables that may differ within an arm: name, seed, length, output folder, trackers."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The figures of one run, by step."""

    name: str
    seed: int
    settings: Settings
    training: dict[int, dict[str, float]]
    """Figures of the trainer's lines, by step."""
    evaluations: dict[int, dict[str, float]]
    """Figures `eval/…` of the orchestrator's lines, by the step before them."""

    @property
    def steps(self) -> int:
        return max(self.training, default=0)


@dataclass(slots=True, kw_only=True)
class Arm:
    """Runs of one configuration with different seeds."""

    name: str
    settings: Settings
    runs: dict[int, Run] = field(default_factory=dict)
    """By seed."""


def load_run(run_dir: RunDir) -> Run:
    """Read the figures of one run. Raises ConfigError when it has no optimizer step yet."""
    settings = json.loads(run_dir.config.read_text())
    training: dict[int, dict[str, float]] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for line in read_history(run_dir.metrics):
        figures = {name: value for name in line if (value := numeric_field(line, name)) is not None}
        if "loss/total" in figures:
            training[line["step"]] = figures
        elif held_out := {name: value for name, value in figures.items() if name.startswith("eval/")}:
            evaluations.setdefault(line["step"], {}).update(held_out)
    if not training:
        raise ConfigError(f"{run_dir.root} has no optimizer step yet")
    seed = int(settings["run"]["seed"])
    return Run(name=run_dir.root.name, seed=seed, settings=settings, training=training, evaluations=evaluations)


def group_into_arms(runs: Iterable[Run]) -> list[Arm]:
    """Group runs by configuration, in the given order. Raises ConfigError for two runs of one arm and seed."""
    arms: list[Arm] = []
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in _OF_ONE_RUN}
        arm = next((arm for arm in arms if arm.settings == settings), None)
        if arm is None:
            name = run.name.removesuffix(f"seed{run.seed}").rstrip("-_") or run.name  # a2-seed1 -> a2
            arms.append(arm := Arm(name=name, settings=settings))
        if run.seed in arm.runs:
            raise ConfigError(
                f"{arm.runs[run.seed].name} and {run.name} have the same configuration and the same seed {run.seed}; "
                "give one of them, or train with another --run.seed"
            )
        arm.runs[run.seed] = run
    return arms


def differing(first: Arm, second: Arm) -> list[str]:
    """Return the settings that differ, as `name: value -> value`. A table that only one arm has is one entry."""
    changes = changed_settings(first.settings, second.settings)
    return [f"{name}: {_value_text(old)} -> {_value_text(new)}" for name, old, new in changes]


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return str({name: inside for name, inside in value.items() if inside is not None})
    return "unset" if value is None else str(value)


def windows(steps: int, count: int) -> list[range]:
    """Return steps 1..steps in `count` windows of nearly equal length; fewer when there are fewer steps."""
    count = max(1, min(count, steps))
    edges = [round(index * steps / count) for index in range(count + 1)]
    return [range(start + 1, end + 1) for start, end in pairwise(edges)]


def level(run: Run, metric: str, steps: Iterable[int]) -> float | None:
    """Return the mean of `metric` over those of `steps` that have it; None when none has."""
    values = [run.training[step][metric] for step in steps if metric in run.training.get(step, {})]
    return fmean(values) if values else None


def over_seeds(values: Mapping[int, float | None]) -> Interval | None:
    """Return the mean and Student t interval of one figure per seed; None when no seed has it.

    There are no bounds below three seeds: those of two lie far outside the values that a figure can have. Nor are there
    for equal figures, whose spread, 0, would give an interval without width.
    """
    figures = [value for value in values.values() if value is not None]
    if not figures:
        return None
    mean, count = fmean(figures), len(figures)
    if count < 3 or max(figures) - min(figures) < _ROUNDING:
        return Interval(mean=mean, low=None, high=None, count=count)
    half = t_quantile(0.975, count - 1) * stdev(figures) / count**0.5
    return Interval(mean=mean, low=mean - half, high=mean + half, count=count)


def t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution. Raises ConfigError without scipy."""
    try:
        from scipy.special import stdtrit  # A slow import; only needed for an interval.
    except ImportError:
        raise ConfigError(f"intervals over seeds need scipy: run {install_command('ladder')}") from None
    return float(stdtrit(freedom, share))


def seeds_text(values: Mapping[int, float | None], *, sign: bool = False) -> str:
    """Return the mean over seeds with its interval, with both figures for two seeds; empty when no seed has one."""
    interval = over_seeds(values)
    if interval is None or interval.count != 2:
        return interval.text(sign=sign) if interval else ""
    both = ", ".join(format(value, "+.3f" if sign else ".3f") for value in values.values() if value is not None)
    return f"{interval.text(sign=sign)} ({both})"


def differences(base: Mapping[int, float | None], other: Mapping[int, float | None]) -> dict[int, float]:
    """Return other - base for every seed that has both."""
    pairs = {seed: (base.get(seed), value) for seed, value in other.items()}
    return {seed: value - start for seed, (start, value) in pairs.items() if start is not None and value is not None}
