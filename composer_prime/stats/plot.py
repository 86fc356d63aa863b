"""Charts as .svg or .png files, drawn by matplotlib: the extra `plot`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import write_atomic
from composer_prime.stats.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARK = "drawn by composer-prime"
"""In the first bytes of every chart, so that a chart of ours may be replaced and another file is left alone."""
_MEAN_STEPS = 10


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, inches. Raises ConfigError, which names the extra, where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"charts need matplotlib, which cannot be imported ({error}): run `uv sync --extra plot`, or "
            "`pip install matplotlib`"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write an SVG or PNG, by the file's suffix. The same figure gives the same bytes.

    Raises ConfigError for another suffix, OSError.
    """
    check_suffix(path)
    from matplotlib import rc_context

    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else {"Software": _MARK}
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "composer-prime", "svg.fonttype": "none"}):
        figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    data = content.getvalue()
    write_atomic(path, f"<!-- {_MARK} -->\n".encode() + data[data.index(b"<svg") :] if kind == "svg" else data)


def check_suffix(path: Path) -> None:
    """Raise ConfigError for a chart that `save` would refuse, before there is a figure."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"{path} is neither .svg nor .png: name a chart with one of these suffixes")


def line_chart(title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Return lines over a logarithmic axis. `series`: name -> points (x > 0, share in 0..1, drawn in percent)."""
    from matplotlib.ticker import PercentFormatter

    figure = new_figure(9, 4.6)
    axes = figure.subplots()
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set(title=title, xlabel=x_label, xscale="log", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(color="#ddd")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def reward_curve(title: str, rewards: Mapping[int, float], evaluations: Mapping[int, Interval]) -> Figure:
    """Return a run's reward by step, its ten-step mean, and its held-out evaluations with their intervals.

    `rewards`: mean reward of each trained step. `evaluations`: mean reward on held-out tasks, by step.
    """
    figure = new_figure(8, 4)
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
