"""The density gate: are there enough pairs, do they say something, and what did they cost?

    at least 5 pairs a trace         less than $5 a trace         less than 30 s a step (p95)
    real pairs' base margin differs from label-flipped and from cross-step pairs', permutation p < .01 each, over traces

The base margin of a pair is log p(chosen) - log p(rejected) a token under the frozen base, after the pair's context. A
label-flipped pair has its sides exchanged. A cross-step pair has the rejected answer of another state, and the same
chosen answer: the two are compared by their rejected answers alone. Steps of one trace are alike, so traces are the
units: the tests exchange whole traces, and the intervals draw whole traces. Eight traces are the fewest that can reach
p < .01.

Cost and time are those of asking: an answer from the cache counts at what it cost when it was asked for. Pairs a trace
are of the traces that anybody could judge. Dollars a trace are of those that a teacher was asked about. Traces that
were refused would only thin both out. The gates are our own.

`composer pairs report PAIRS.jsonl --base MODEL` gives the gate as text, as a chart and as a verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from composer_prime.config.problems import describe_problems
from composer_prime.config.teachers import FrozenBaseConfig, TeachersConfig
from composer_prime.console import INTERRUPTED, fail, pluralize, until_the_reader_leaves
from composer_prime.errors import ComposerError, ConfigError, DeadlineError, EndpointError, RoleFailedError
from composer_prime.model_source import resolve_model
from composer_prime.stats import plot
from composer_prime.stats.intervals import bootstrap_interval, percentile
from composer_prime.traces.pairs import (
    EMBEDDED_PAIRS,
    Gate,
    Pair,
    PairFile,
    Verdict,
    gate_file,
    read_gate,
    resolve_pairs,
    write_gate,
)
from composer_prime.traces.replay.frozen_base import EndpointScorer, Margins, ServedScorer, base_margins, smallest_p
from composer_prime.traces.replay.records import StateRecord, latest, only_writer, read_records, votes_beside
from composer_prime.traces.replay.teachers import local_models
from composer_prime.traces.states_file import check_own

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOCUMENTATION = """\
Measures preference pairs with the density gate: as text, as a chart and as a verdict. Without the votes file it reports
what the pairs alone tell, and gives no verdict."""
Interval = tuple[float, float] | None
MIN_PAIRS_A_TRACE = 5.0
MAX_USD_A_TRACE = 5.0
MAX_S_A_STEP = 30.0
MAX_P = 0.01
FEWEST_TRACES = 8
"""With pairs: fewer cannot reach MAX_P (`smallest_p`)."""
MISSED, _BINS = 1, 24
_COLORS = {"real": "#1b7837", "flipped": "#b2182b", "cross-step": "#4575b4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """What a replay gave and cost. Without votes, what the pairs alone tell."""

    traces: int
    """Replayed; without votes, those that gave a pair."""
    judged_traces: int
    """Of them, those with a state that was not refused."""
    asked_traces: int
    """Of these, those on which a call was made, or an answer from the cache used."""
    states: int
    pairs: int
    pairs_a_trace: float
    """Of judged_traces."""
    pairs_interval: Interval
    outcomes: Mapping[str, int]
    dropped: Mapping[str, int]
    agreement: Mapping[tuple[str, str], tuple[float, float]]
    """(states where both families gave the same action, states where both voted), by pair of families; by shares."""
    usd_a_trace: float
    """As first asked, of asked_traces."""
    usd_interval: Interval
    paid_usd: float
    """Paid by this replay, all traces together: nothing for answers from the cache."""
    s_a_step: float
    """As first asked; mean over states that were voted on."""
    s_interval: Interval
    s_p95: float
    epsilons: Mapping[float, int]
    margins: Margins | None = None
    votes: bool = True
    """Whether the votes are known; without them agreement, cost and time are not."""
    min_pairs: float = MIN_PAIRS_A_TRACE
    failures: list[str] = field(default_factory=list)
    """Gates that were missed."""

    @property
    def passed(self) -> bool:
        return not self.failures

    def verdict(self, first: int, last: int, digest: str, votes: int) -> Verdict:
        """Return the verdict on the pairs `first` to `last` - 1, which `digest` names."""
        return Verdict(
            first=first,
            last=last,
            digest=digest,
            passed=self.passed,
            reasons=self.failures,
            min_pairs_a_trace=self.min_pairs,
            votes=votes,
        )


def measure(
    records: Sequence[StateRecord],
    pairs: Sequence[Pair],
    margins: Margins | None,
    *,
    min_pairs: float = MIN_PAIRS_A_TRACE,
    by_trace: Mapping[str, int] | None = None,
) -> Density:
    """Measure one replay. Without `margins` or `records` the gate cannot pass.

    `min_pairs`: how many a trace has to give; short traces cannot give five. `by_trace`: pairs of each trace, where
    `pairs` are not all that these traces gave.
    """
    pair_counts = Counter(pair.trace for pair in pairs) if by_trace is None else by_trace
    traces = _traces(records) or list(pair_counts)
    # Superseded records count too: a state may be refused today that was asked about before.
    judged = _traces(record for record in records if record.outcome != "refused") if records else traces
    asked = _traces(each for each in records if each.votes or each.failed_calls or each.cost_usd or each.price_usd)
    paid, price = defaultdict[str, float](float), defaultdict[str, float](float)
    for record in records:
        paid[record.trace] += record.cost_usd
    votes, records = bool(records), list(latest(records).values())
    for record in records:
        price[record.trace] += record.price_usd
    timed = [(record.trace, value) for record in records if (value := max(record.seconds, record.vote_s)) > 0]
    seconds = [value for _, value in timed]
    pairs_by_trace = [float(pair_counts.get(trace, 0)) for trace in judged]
    # A state that was tried twice was paid for twice, and decided once.
    costs = [max(paid[trace], price[trace]) for trace in asked]
    density = Density(
        traces=len(traces),
        judged_traces=len(judged),
        asked_traces=len(asked),
        states=len(records),
        pairs=len(pairs),
        pairs_a_trace=_mean(pairs_by_trace),
        pairs_interval=bootstrap_interval(pairs_by_trace),
        outcomes=Counter(record.outcome for record in records),
        dropped=sum((Counter(record.dropped) for record in records), Counter()),
        agreement=_families(records),
        usd_a_trace=_mean(costs),
        usd_interval=bootstrap_interval(costs),
        paid_usd=sum(paid.values()),
        s_a_step=_mean(seconds),
        s_interval=bootstrap_interval(seconds, clusters=[trace for trace, _ in timed]),
        s_p95=percentile(seconds, 0.95),
        epsilons=Counter(round(pair.epsilon, 4) for pair in pairs),
        margins=margins,
        votes=votes,
        min_pairs=min_pairs,
    )
    density.failures.extend(_missed(density))
    return density


def _traces(records: Iterable[StateRecord]) -> list[str]:
    return list(dict.fromkeys(record.trace for record in records))


def _missed(density: Density) -> list[str]:
    missed = []
    if density.pairs_a_trace < density.min_pairs:
        missed.append(f"{density.pairs_a_trace:.2f} pairs a trace, {density.min_pairs:g} are wanted (--min-pairs)")
    if density.usd_a_trace >= MAX_USD_A_TRACE:
        missed.append(f"${density.usd_a_trace:.2f} a trace, less than ${MAX_USD_A_TRACE:g} is wanted")
    if density.s_p95 >= MAX_S_A_STEP:
        missed.append(f"{density.s_p95:.1f} s a step (p95), less than {MAX_S_A_STEP:g} is wanted")
    if not density.votes:
        missed.append("the votes are missing, so traces without a pair, agreement, cost and time are not known")
    if density.margins is None:
        return [*missed, "the base margins were not measured"]
    traces = len(set(density.margins.traces))
    if traces < FEWEST_TRACES:
        missed.append(
            f"base margins of {pluralize(traces, 'trace')}, which can reach p = {smallest_p(traces):.3g} at best: "
            f"{FEWEST_TRACES} traces with pairs are needed for p below {MAX_P:g}"
        )
        return missed
    for name, p in (("label-flipped", density.margins.p_flipped), ("cross-step", density.margins.p_cross_step)):
        if p >= MAX_P:
            missed.append(f"real pairs' base margins do not differ from {name} ones (p = {p:.3f}, below {MAX_P:g})")
    return missed


def _families(records: Sequence[StateRecord]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (same action, both voted) in states, by pair of families."""
    counts: dict[tuple[str, str], tuple[float, float]] = {}
    for record in records:
        for one, other in combinations(record.votes, 2):
            first, second = sorted((one.family, other.family))
            same, both = counts.get((first, second), (0.0, 0.0))
            weight = one.share * other.share * (one.teacher != other.teacher)
            counts[first, second] = (same + weight * (one.form == other.form), both + weight)
    return {families: counts[families] for families in sorted(counts) if counts[families][1]}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


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
    parser = argparse.ArgumentParser(prog="composer pairs report", description=_DOCUMENTATION)
    parser.add_argument("pairs", type=Path, help="pairs.jsonl of a replay or a run, or tiny, tiny_code")
    parser.add_argument("--base", help="model folder, tiny or smollm2: the frozen base that measures margins")
    parser.add_argument("--base-url", help="endpoint that serves --base, with vLLM's prompt_logprobs")
    parser.add_argument("--base-key-var", help="environment variable that holds the endpoint's key; none by default")
    parser.add_argument(
        "--min-pairs", type=_above_zero, help=f"required pairs per trace (as last time, or {MIN_PAIRS_A_TRACE:g})"
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
    path, shipped = resolve_pairs(options.pairs, Path()), str(options.pairs) in EMBEDDED_PAIRS
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
    chart = options.chart or (Path(f"{options.pairs}-pairs.svg") if shipped else path.with_suffix(".svg"))
    check_own(chart, plot.chart_check(chart), "a chart of pairs")
    plot.check_suffix(chart)
    place = _place(options) if options.base_url else None
    if options.base and place is None:
        resolve_model(options.base, timeout_s=options.timeout_s)  # before a process is started for it
    margins, unmeasured = None, None
    try:
        margins = asyncio.run(_margins(options, place, pairs)) if options.base and pairs else None
    except (ConfigError, EndpointError, RoleFailedError, DeadlineError) as error:
        unmeasured = str(error)  # all that needs no base is reported all the same
    gate = read_gate(path)
    last_min_pairs = gate.verdicts[-1].min_pairs_a_trace if gate and gate.verdicts else MIN_PAIRS_A_TRACE
    density = measure(records, pairs, margins, min_pairs=options.min_pairs or last_min_pairs)
    if unmeasured is not None:
        density.failures.append(unmeasured)
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


def _verdict(pairs: Path, digest: str, density: Density, votes: int) -> str:
    before = read_gate(pairs)
    if density.margins is None and before is not None and before.passed:
        return f"{gate_file(pairs)}, as it was: without --base nothing was measured that could replace it"
    try:
        with only_writer(pairs):
            write_gate(pairs, Gate(verdicts=[density.verdict(0, density.pairs, digest, votes)]))
    except ConfigError as error:
        return f"not written: {error}"
    return f"{gate_file(pairs)} (digest {digest})"


def _place(options: argparse.Namespace) -> FrozenBaseConfig:
    if not options.base:
        raise ConfigError(f"--base-url {options.base_url} needs --base: the endpoint's name of the model")
    place = {"base_url": options.base_url, "model": options.base, "api_key_var": options.base_key_var}
    try:
        return FrozenBaseConfig.model_validate(place)
    except ValidationError as error:
        raise ConfigError("; ".join(describe_problems(error, [], ("teachers", "frozen_base")))) from None


async def _margins(options: argparse.Namespace, place: FrozenBaseConfig | None, pairs: Sequence[Pair]) -> Margins:
    settings = TeachersConfig(timeout_s=options.timeout_s)
    async with AsyncExitStack() as stack:
        if place is not None:
            scorer = EndpointScorer(place, settings)
        else:
            models = local_models([options.base], threads=options.threads, start_timeout_s=options.timeout_s)
            scorer = ServedScorer(await stack.enter_async_context(models), options.base, settings)
        stack.push_async_callback(scorer.close)
        return await base_margins(scorer, pairs)


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
            f"families    {one} and {other}: same action in {same:.6g} of {both:.6g} states ({same / both:.0%})"
            for (one, other), (same, both) in density.agreement.items()
        ),
    ]


def _of_margins(density: Density) -> list[str]:
    if density.margins is None:
        return ["missing     base margins (--base)"]
    margins = density.margins
    real, cross = (sum(values) / len(values) for values in (margins.real, margins.cross_step))
    measured = f"{len(margins.real)} pairs of {pluralize(len(set(margins.traces)), 'trace')}"
    measured += f" ({margins.unread} that the base cannot read left out)" if margins.unread else ""
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
