"""`composer pairs report PAIRS.jsonl --base MODEL`: the density gate, as text, as a chart and as a verdict.

Without the votes file it reports what the pairs alone tell, and gives no verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from composer_prime.console import INTERRUPTED, fail, pluralize, until_the_reader_leaves
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.model_source import resolve_model
from composer_prime.stats import plot
from composer_prime.traces.overwrite_guard import check_own
from composer_prime.traces.pairs import Gate, Pair, PairFile, gate_file, read_gate, resolve_pairs, write_gate
from composer_prime.traces.replay.density import (
    MAX_S_A_STEP,
    MAX_USD_A_TRACE,
    MIN_PAIRS_A_TRACE,
    Density,
    Interval,
    Margins,
    base_margins,
    measure,
)
from composer_prime.traces.replay.local_models import ServedScorer, local_models
from composer_prime.traces.replay.records import only_writer, read_records, votes_beside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSED = 1
_BINS = 24
_COLORS = {"real": "#1b7837", "flipped": "#b2182b", "cross-step": "#4575b4"}


def main(words: list[str] | None = None) -> int:
    """Exit status: 0 the gate is passed, 1 it is missed, 2 wrong input."""
    options = pairs_parser().parse_args(words)
    try:
        return report_pairs(options)
    except KeyboardInterrupt:
        print("interrupted: no verdict was written", file=sys.stderr)
        return INTERRUPTED
    except ComposerError as error:
        fail(error, command="composer pairs report")


def pairs_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer pairs report", description=__doc__)
    parser.add_argument("pairs", type=Path, help="pairs.jsonl of a replay or a run, or tiny")
    parser.add_argument("--base", help="model folder, tiny or smollm2: the frozen base that measures margins")
    parser.add_argument(
        "--min-pairs", type=_above_zero, help=f"pairs a trace that are wanted (as last time, or {MIN_PAIRS_A_TRACE:g})"
    )
    parser.add_argument("--chart", type=Path, help="SVG or PNG to draw (PAIRS.svg by default; extra plot)")
    parser.add_argument("--timeout-s", type=_above_zero, default=300.0, help="for loading the base, and for each score")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the base")
    return parser


def _above_zero(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0")
    return value


def report_pairs(options: argparse.Namespace) -> int:
    path, shipped = resolve_pairs(options.pairs, Path()), str(options.pairs) == "tiny"
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name the pairs.jsonl in it")
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: name a pairs.jsonl that `composer replay` wrote")
    # The digest first: lines that change later do not match it, whatever is measured of them.
    pairs, votes = PairFile(path), votes_beside(path)
    digest = pairs.digest(pairs.refresh())
    records = list(read_records(votes))
    if not pairs and not records:
        raise ConfigError(f"{path} holds no pairs and {votes} no votes: make both with `composer replay`")
    chart = options.chart or (Path("tiny-pairs.svg") if shipped else path.with_suffix(".svg"))
    check_own(chart, plot.chart_check(chart), "a chart of pairs")
    plot.check_suffix(chart)
    if options.base:
        resolve_model(options.base, timeout_s=options.timeout_s)  # before a process is started for it
    margins = asyncio.run(_margins(options, pairs)) if options.base and pairs else None
    density = measure(records, pairs, margins, min_pairs=_min_pairs(options, path))
    drawn = _chart(density, chart)
    if not density.votes:
        verdict = f"none: there are no votes in {votes}"
    else:
        verdict = f"{gate_file(path)}, as shipped" if shipped else _verdict(path, digest, density, len(records))
    print("\n".join([*report_lines(density), f"chart       {drawn}", f"verdict     {verdict}"]))
    return 0 if density.passed else MISSED


def _chart(density: Density, path: Path) -> str:
    """Draw the chart; return where it is, or what to install. Raises ConfigError where it cannot be written."""
    try:
        figure = density_chart(density)
    except ConfigError as error:
        return f"not drawn: {error}"
    try:
        plot.save(figure, path)
    except OSError as error:
        raise ConfigError(f"the chart cannot be written to {path} ({error.strerror}): name another --chart") from None
    return str(path)


def _min_pairs(options: argparse.Namespace, path: Path) -> float:
    """Return the pairs a trace that the user asks for, else those that the last verdict on the file asked for."""
    if options.min_pairs is not None:
        return options.min_pairs
    gate = read_gate(path)
    return gate.verdicts[-1].min_pairs_a_trace if gate and gate.verdicts else MIN_PAIRS_A_TRACE


def _verdict(pairs: Path, digest: str, density: Density, votes: int) -> str:
    """Write the verdict beside the pairs. Return where it is."""
    before = read_gate(pairs)
    if density.margins is None and before is not None and before.passed:
        return f"{gate_file(pairs)}, as it was: without --base nothing was measured that could replace it"
    try:
        with only_writer(pairs):
            write_gate(pairs, Gate(verdicts=[density.verdict(0, density.pairs, digest, votes)]))
    except ConfigError as error:
        return f"not written: {error}"
    return f"{gate_file(pairs)} (digest {digest})"


async def _margins(options: argparse.Namespace, pairs: Sequence[Pair]) -> Margins:
    async with local_models([options.base], threads=options.threads, start_timeout_s=options.timeout_s) as url:
        scorer = ServedScorer(url, options.base, options.timeout_s)
        try:
            return await base_margins(scorer, pairs)
        finally:
            await scorer.close()


def report_lines(density: Density) -> list[str]:
    dropped = ", ".join(f"{count} {name}" for name, count in density.dropped.items())
    doubts = ", ".join(f"{count} with epsilon {epsilon:g}" for epsilon, count in sorted(density.epsilons.items()))
    lines = [
        f"pairs       {density.pairs} ({doubts or 'none'})" + (f"; dropped: {dropped}" if dropped else ""),
        f"a trace     {density.pairs_a_trace:.2f} pairs{_interval(density.pairs_interval, '.2f')}"
        + ("" if density.votes else " (of traces that gave one: the others are not known)"),
        *(_of_votes(density) if density.votes else ["missing     votes: agreement, families, cost and time"]),
        *_of_margins(density),
    ]
    if density.passed:
        return [*lines, "gate        passed: replay-DPO may have a weight above 0"]
    return [*lines, *(f"gate        missed: {reason}" for reason in density.failures)]


def _of_votes(density: Density) -> list[str]:
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in density.outcomes.items())
    time = f"{density.s_a_step:.2f} s a step{_interval(density.s_interval, '.2f')}, p95 {density.s_p95:.2f} s"
    return [
        f"states      {density.states} in {density.traces} traces: {outcomes}",
        f"counted     pairs over the {density.judged_traces} traces that were not refused, cost over the "
        f"{density.asked_traces} that teachers were asked about",
        f"cost        ${density.usd_a_trace:.4f} a trace{_interval(density.usd_interval, '.4f')} as first asked; "
        f"${density.paid_usd:.4f} was paid now for all",
        f"time        {f'{time}, as first asked' if density.s_p95 else 'not recorded'}",
        *(
            f"families    {one} and {other}: same action in {same} of {both} states ({same / both:.0%})"
            for (one, other), (same, both) in density.agreement.items()
        ),
    ]


def _of_margins(density: Density) -> list[str]:
    if density.margins is None:
        return ["missing     base margins (--base)"]
    margins = density.margins
    real, cross = (sum(values) / len(values) for values in (margins.real, margins.cross_step))
    measured = f"{len(margins.real)} pairs of {pluralize(len(set(margins.traces)), 'trace')}"
    return [
        f"margins     {measured}, nats a token: real {real:+.3f}, flipped {-real:+.3f} "
        f"(p = {margins.p_flipped:.4f}), cross-step {cross:+.3f} (p = {margins.p_cross_step:.4f})"
    ]


def _interval(interval: Interval, shape: str) -> str:
    return "" if interval is None else f" [{interval[0]:{shape}}, {interval[1]:{shape}}]"


def density_chart(density: Density) -> Figure:
    """Return base margins of real, flipped and cross-step pairs as outlined histograms, and each gate beside its limit.

    Raises ConfigError where matplotlib is missing.
    """
    figure = plot.new_figure(8, 4.2)
    figure.suptitle(f"{density.pairs} pairs of {density.states} states in {density.traces} traces")
    histogram, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    if density.margins is None:
        histogram.set_title("base margins were not measured (--base)")
    else:
        real = density.margins.real
        series = {"real": real, "flipped": [-value for value in real], "cross-step": density.margins.cross_step}
        low, high = min(map(min, series.values())), max(map(max, series.values()))
        edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
        for name, values in series.items():
            label = f"{name}: mean {sum(values) / len(values):+.3f}"
            histogram.hist(values, edges, histtype="step", linewidth=2, color=_COLORS[name], label=label)
        histogram.legend(frameon=False)
        histogram.set_ylabel("pairs")
    histogram.set_xlabel("log p(chosen) - log p(rejected), nats a token, frozen base")
    gates = [
        ("pairs a trace", density.pairs_a_trace, density.min_pairs, density.pairs_a_trace >= density.min_pairs),
        ("$ a trace", density.usd_a_trace, MAX_USD_A_TRACE, density.usd_a_trace < MAX_USD_A_TRACE),
        ("s a step, p95", density.s_p95, MAX_S_A_STEP, density.s_p95 < MAX_S_A_STEP),
    ]
    for name, value, limit, good in reversed(gates if density.votes else gates[:1]):
        color = _COLORS["real" if good else "flipped"]
        bars.barh(f"{name}: {value:.3g}\n(limit {limit:g})", min(value / limit, 2.0), color=color)
    bars.axvline(1.0, color="#333")
    bars.set(xlim=(0, 2), xticks=[], title="gate passed" if density.passed else "gate missed")
    return figure


if __name__ == "__main__":
    raise SystemExit(until_the_reader_leaves(main))
