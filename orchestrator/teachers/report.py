"""`composer pairs report PAIRS.jsonl --base MODEL`: the density gate, as text, as a chart and as a verdict."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from composer_prime.config.load import fail
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.pairs import Pair
from composer_prime.pairs_gate import Gate, gate_file
from composer_prime.run_dir import write_atomic
from orchestrator.teachers.chart import draw
from orchestrator.teachers.density import Density, Interval, Margins, measure
from orchestrator.teachers.local import LocalModels
from orchestrator.teachers.margins import base_margins
from orchestrator.teachers.records import read_pairs, read_records, votes_beside
from orchestrator.teachers.scoring import ServedScorer

MISSED = 1


def main(words: list[str] | None = None) -> int:
    """Exit status: 0 the gate is passed, 1 it is missed, 2 wrong input."""
    options = parser().parse_args(words)
    try:
        return report(options)
    except ComposerError as error:
        fail(error)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer pairs report", description=__doc__)
    parser.add_argument("pairs", type=Path, help="pairs.jsonl of a replay, or of a run directory")
    parser.add_argument("--base", help="model folder, tiny or smollm2: the frozen base that measures margins")
    parser.add_argument("--margin-pairs", type=int, default=400, help="pairs to measure margins of (default 400)")
    parser.add_argument("--min-pairs", type=float, default=5.0, help="pairs a trace that are wanted (default 5)")
    parser.add_argument("--chart", type=Path, help="SVG file to draw (PAIRS.svg by default)")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for loading the base, and for each score")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the base")
    return parser


def report(options: argparse.Namespace) -> int:
    pairs, votes = list(read_pairs(options.pairs)), votes_beside(options.pairs)
    records = list(read_records(votes))
    if not records:
        raise ConfigError(f"{votes} holds no votes: make pairs with `composer replay`, which writes both files")
    margins = asyncio.run(_margins(options, pairs)) if options.base and pairs else None
    density = measure(records, pairs, margins, min_pairs=options.min_pairs)
    chart = options.chart or options.pairs.with_suffix(".svg")
    write_atomic(chart, draw(density).encode())
    gate = Gate(
        passed=density.passed, reasons=density.failures, pairs=density.pairs, min_pairs_a_trace=density.min_pairs
    )
    write_atomic(gate_file(options.pairs), msgspec.json.encode(gate) + b"\n")
    print("\n".join([*text(density), f"chart       {chart}", f"verdict in  {gate_file(options.pairs)}"]))
    return 0 if density.passed else MISSED


async def _margins(options: argparse.Namespace, pairs: Sequence[Pair]) -> Margins:
    models = LocalModels([options.base], threads=options.threads, start_timeout_s=options.timeout_s)
    async with models as url:
        scorer = ServedScorer(url, options.base, options.timeout_s)
        try:
            return await base_margins(scorer, pairs, most=options.margin_pairs)
        finally:
            await scorer.close()


def text(density: Density) -> list[str]:
    """The report as lines."""
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in density.outcomes.items())
    dropped = ", ".join(f"{count} {name}" for name, count in density.dropped.items())
    doubts = ", ".join(f"{count} with epsilon {epsilon:g}" for epsilon, count in sorted(density.epsilons.items()))
    kappa = "-" if density.kappa is None else f"{density.kappa:.3f}"
    lines = [
        f"states      {density.states} in {density.traces} traces: {outcomes}",
        f"pairs       {density.pairs} ({doubts or 'none'})" + (f"; dropped: {dropped}" if dropped else ""),
        f"a trace     {density.pairs_a_trace:.2f} pairs{_interval(density.pairs_interval, '.2f')}",
        f"cost        ${density.usd_a_trace:.4f} a trace{_interval(density.usd_interval, '.4f')}",
        f"time        {density.s_a_step:.2f} s a step{_interval(density.s_interval, '.2f')}, p95 {density.s_p95:.2f} s",
        f"agreement   Fleiss kappa {kappa} on whether the student is right; where voting was sequential, third votes "
        "are missing on states that were settled, so kappa is of what was asked",
    ]
    lines += [
        f"families    {one} and {other}: same action in {same} of {both} states ({same / both:.0%})"
        for (one, other), (same, both) in density.agreement.items()
    ]
    if density.margins is not None:
        margins = density.margins
        real, cross = (sum(values) / len(values) for values in (margins.real, margins.cross_step))
        lines += [
            f"margins     {len(margins.real)} pairs, nats a token: real {real:+.3f}, flipped {-real:+.3f} "
            f"(p = {margins.p_flipped:.4f}), cross-step {cross:+.3f} (p = {margins.p_cross_step:.4f})"
        ]
    if density.passed:
        return [*lines, "gate        passed: channel 3 may have a weight above 0"]
    return [*lines, *(f"gate        missed: {reason}" for reason in density.failures)]


def _interval(interval: Interval, shape: str) -> str:
    return "" if interval is None else f" [{interval[0]:{shape}}, {interval[1]:{shape}}]"


if __name__ == "__main__":
    raise SystemExit(main())
