"""The reward curve as a .svg or .png file, drawn by matplotlib: the extra `plot`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import write_atomic
from composer_prime.stats.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEAN_STEPS = 10


def save(figure: Figure, path: Path) -> None:
    """Write an SVG or PNG, by the file's suffix. The same figure gives the same bytes.

    Raises ConfigError for another suffix, OSError.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise ConfigError(f"{path} is neither .svg nor .png: name a chart with one of these suffixes")
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "composer-prime", "svg.fonttype": "none"}):
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    write_atomic(path, content.getvalue())


def reward_curve(title: str, rewards: Mapping[int, float], evaluations: Mapping[int, Interval]) -> Figure:
    """Return a run's reward by step, its ten-step mean, and its held-out evaluations with their intervals.

    `rewards`: mean reward of each trained step. `evaluations`: mean reward on held-out tasks, by step. Raises
    ConfigError, which names the extra, where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"charts need matplotlib, which cannot be imported ({error}): run `uv sync --extra plot`, or "
            "`pip install matplotlib`"
        ) from None
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps = sorted(rewards)
    values = [rewards[step] for step in steps]
    means = [fmean(values[max(0, index + 1 - _MEAN_STEPS) : index + 1]) for index in range(len(values))]
    axes.plot(steps, values, color="C0", alpha=0.4, linewidth=1, label="reward of a step")
    axes.plot(steps, means, color="C0", linewidth=2, label=f"mean of {_MEAN_STEPS} steps")
    if evaluations:
        after, held_out = zip(*sorted(evaluations.items()), strict=True)
        below = [0.0 if each.low is None else each.mean - each.low for each in held_out]
        above = [0.0 if each.high is None else each.high - each.mean for each in held_out]
        figures, label = [each.mean for each in held_out], "held-out tasks [95 %]"
        axes.errorbar(after, figures, yerr=[below, above], fmt="o", color="C1", capsize=3, label=label)
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(color="#ddd")
    axes.legend(frameon=False)
    return figure
