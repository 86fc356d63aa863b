"""`composer ladder RUN [RUN ...]`: arms side by side at equal steps, paired by seed, with intervals over seeds.

Runs whose configurations differ only in seed and name form an arm; the first run's arm is the base of all comparisons.
Intervals are 95 % Student t intervals over seeds: with few seeds they are wide, as they should be.
"""

from __future__ import annotations

import argparse

from composer_prime.errors import ConfigError
from composer_prime.ladder import Arm, arms, differences, differing, level, load, over_seeds, windows
from composer_prime.monitor.rollouts import open_run
from composer_prime.wording import counted

_METRICS = ("reward/mean", "rollout/turn_error_rate", "sdpo/turns", "sdpo/turn_jsd", "dpo/accuracy")


def run(words: list[str]) -> int:
    options = parser().parse_args(words)
    found = arms(load(open_run(folder)) for folder in dict.fromkeys(options.run))
    steps = min(one.steps for arm in found for one in arm.runs.values())
    if options.steps is not None:
        if options.steps > steps:
            raise ConfigError(f"--steps {options.steps}: the shortest of the runs has {steps}; give at most that")
        steps = options.steps
    lines = _head(found, steps)
    for metric in options.metric or _METRICS:
        lines += _training(found, metric, steps, options.bins)
    print("\n".join(lines + _held_out(found, steps)))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer ladder", description=__doc__)
    parser.add_argument("run", nargs="+", help="run directory; those of the base arm first")
    parser.add_argument("--metric", action="append", help=f"figure of metrics.jsonl (default {' '.join(_METRICS)})")
    parser.add_argument("--steps", type=int, help="compare the first STEPS steps (default: those of the shortest run)")
    parser.add_argument("--bins", type=int, default=6, help="windows of steps")
    return parser


def _head(found: list[Arm], steps: int) -> list[str]:
    text = [f"{counted(len(found), 'arm')} at {counted(steps, 'step')}"]
    for arm in found:
        text.append(f"  {arm.name:<14} seeds {', '.join(map(str, sorted(arm.runs)))}")
        text += [f"  {'':<14} {line}" for line in (differing(found[0], arm) if arm is not found[0] else [])]
    return text


def _training(found: list[Arm], metric: str, steps: int, bins: int) -> list[str]:
    """One line a window: each arm's mean over seeds, then each arm's difference from the base. None for a figure that
    no run has, or that is 0 everywhere."""
    parts = [*windows(steps, bins), range(1, steps + 1)]
    if not any(level(one, metric, parts[-1]) for arm in found for one in arm.runs.values()):
        return []
    text = ["", metric]
    for part in parts:
        figures = [{seed: level(one, metric, part) for seed, one in arm.runs.items()} for arm in found]
        text.append(f"  {f'{part[0]}-{part[-1]}':>8}  " + _cells(found, figures))
    return text


def _held_out(found: list[Arm], steps: int) -> list[str]:
    """The same for the held-out rewards and turn errors of evaluations that every arm has."""
    text: list[str] = []
    runs = [one for arm in found for one in arm.runs.values()]
    shared = set.intersection(*({step for step in one.evaluations if step <= steps} for one in runs))
    names = sorted({name for one in runs for figures in one.evaluations.values() for name in figures})
    for name in (name for name in names if name.endswith(("/reward_mean", "/turn_error_rate"))):
        text += ["", f"held-out {name.removeprefix('eval/')}"]
        for step in sorted(shared):
            figures = [{seed: one.evaluations[step].get(name) for seed, one in arm.runs.items()} for arm in found]
            text.append(f"  {step:>8}  " + _cells(found, figures))
    return text


def _cells(found: list[Arm], figures: list[dict[int, float | None]]) -> str:
    cells = []
    for arm, values in zip(found, figures, strict=True):
        interval = over_seeds(values)
        cells.append(f"{arm.name} {interval.text() if interval else '-'}")
    for arm, values in zip(found[1:], figures[1:], strict=True):
        interval = over_seeds(differences(figures[0], values))
        cells.append(f"{arm.name} - {found[0].name} {interval.text(sign=True) if interval else '-'}")
    return "   ".join(cells)
