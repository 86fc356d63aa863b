"""`diloco simulate`: which link a joint run needs, and what it gets from its own, as tables and a plot.

The tables are 80 columns wide. A sentence under each explains its figures.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from composer_prime.config.diloco import CodecConfig, wrong_schedule
from composer_prime.errors import ConfigError
from composer_prime.stats.plot import line_chart, save
from diloco.simulate.joint_run import (
    ENCODE_NS,
    Fleet,
    JointRun,
    Net,
    deadline_warning,
    forecast_link,
    goodput,
    heal_warning,
)
from diloco.simulate.utilization import (
    IntervalShares,
    Pipe,
    Scheme,
    Workload,
    bytes_per_step,
    grid,
    paper_schemes,
    required_gbit,
    three_digits,
    utilization,
)

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
OUT_OF_REACH = "-"
_GRID = grid(-3, 4, 100)


def simulate_parser(add: argparse._SubParsersAction) -> None:
    """Add the command and its options."""
    words = add.add_parser(
        "simulate",
        help="utilization, bytes and goodput against bandwidth, latency, peers and codec",
        description="What a joint run would get from its link. Nothing is measured and nothing is sent.",
    )
    for name, default, text in (
        ("--parameters", 1e9, "trained parameters (default 1e9)"),
        ("--layers", 24, "transformer blocks (default 24)"),
        ("--step-s", 0.1, "compute time of an inner step, seconds (default 0.1)"),
        ("--sync-every", 96, "H, diloco.sync_every (default 96)"),
        ("--fragments", 8, "P, diloco.fragments: divides H (default 8)"),
        ("--delay", 1, "tau, inner steps: less than H / P (default 1)"),
        ("--ranks", 1, "trainer.ranks of a peer: they share codec work (default 1)"),
        ("--gbit", 1.0, "each peer's link, Gbit/s (default 1)"),
        ("--latency-ms", 100.0, "one way (default 100)"),
        ("--slowest", 1.0, "slowest peer's step time over the fastest's (default 1)"),
        ("--deadline-s", 120.0, "diloco.round_deadline_s (default 120)"),
        ("--heal-timeout-s", 900.0, "diloco.heal_timeout_s (default 900)"),
    ):
        words.add_argument(name, type=type(default), default=default, help=text)
    words.add_argument("--codec", choices=sorted(ENCODE_NS), default="int4", help="how deltas travel (default int4)")
    words.add_argument("--peers", type=int, nargs="+", default=[2, 8, 64, 512], help="clusters (default 2 8 64 512)")
    words.add_argument("--relay-gbit", type=float, help="the rendezvous' link (default: as a peer's)")
    words.add_argument("--mtbf-h", type=float, help="hours between a peer's failures (default: none)")
    words.add_argument("--plot", type=Path, default=None, help="write utilization against bandwidth as SVG or PNG")
    words.set_defaults(run=simulate)


def simulate(words: argparse.Namespace) -> int:
    """Print the tables. Raises ConfigError for impossible values, or a plot that cannot be drawn."""
    _check(words)
    workload = Workload(parameters=words.parameters, layers=words.layers, step_s=words.step_s)
    runs = [
        JointRun(
            parameters=words.parameters, layers=words.layers, step_s=words.step_s, every=words.sync_every,
            fragments=words.fragments, delay=words.delay, codec=CodecConfig(type=words.codec), ranks=words.ranks,
            peers=peers,
        )
        for peers in words.peers
    ]  # fmt: skip
    schemes = paper_schemes(workload, words.sync_every, max(1, words.layers // words.fragments))
    nets = [run.net(words.gbit, words.latency_ms / 1e3, words.relay_gbit) for run in runs]
    fleet = Fleet(peers=2, slowest=words.slowest, deadline_s=words.deadline_s, mtbf_h=words.mtbf_h)
    console = Console(highlight=False)
    with console.capture() as captured:  # rich would end with its own exit status when the reader leaves early
        for table, sentence in (
            required_table(workload, schemes, runs[0]),
            peers_table(runs, nets, fleet, words.heal_timeout_s),
        ):
            console.print(table)
            console.print(f"{sentence}\n")
    print(captured.get().rstrip())
    if words.plot is not None:
        _plot(words.plot, workload, schemes, runs[0])
        print(f"\nwrote {words.plot}")
    return 0


def _check(words: argparse.Namespace) -> None:
    for name, value in vars(words).items():
        if isinstance(value, int | float):
            flag, least = f"--{name.replace('_', '-')}", "0 or more" if name in ("latency_ms", "delay") else "above 0"
            if not math.isfinite(value):
                raise ConfigError(f"{flag} is {value}; expected a finite number")
            if value < 0 or (value == 0 and least == "above 0"):
                raise ConfigError(f"{flag} is {value}; expected a value {least}")
    wrong = wrong_schedule(words.sync_every, words.fragments, words.delay, lambda key: "--" + key.replace("_", "-"))
    if wrong is not None:
        raise ConfigError(wrong)
    if words.slowest < 1:
        raise ConfigError(f"--slowest is {words.slowest}; it is a ratio to the fastest peer, so at least 1")
    if words.fragments > words.layers:
        raise ConfigError(f"--fragments is {words.fragments}, but there are {words.layers} layers: use at most that")
    if min(words.peers) < 2:
        raise ConfigError(f"--peers is {' '.join(map(str, words.peers))}; a joint run has 2 or more")


def _plot(path: Path, workload: Workload, schemes: Sequence[Scheme], own: JointRun) -> None:
    bandwidths = grid(-3, 3, 121)
    rows = [(scheme.name, workload, scheme, lambda gbit: Pipe(gbit_s=gbit)) for scheme in schemes]
    rows.append((f"{own.scheme.name}, relayed", own.workload, own.scheme, lambda gbit: own.pipe(own.net(gbit))))
    series = {
        f"{name}: {three_digits(bytes_per_step(work, scheme) / 1e6)} MB": [
            (gbit, utilization(work, scheme, pipe_at(gbit))) for gbit in bandwidths
        ]
        for name, work, scheme, pipe_at in rows
    }
    title = f"{own.parameters:.3g} parameters, {own.step_s:g} s a step, {own.peers} peers; MB: sent by each a step"
    save(line_chart(title, "Gbit/s", series), path)


# -- tables ------------------------------------------------------------------------------------------------------


def required_table(workload: Workload, schemes: Sequence[Scheme], own: JointRun) -> tuple[Table, str]:
    """Return Gbit/s of a peer's link for each utilization, and the bytes that a peer sends an inner step.

    The paper's schemes are on a link that carries a delta once, this package's own goes through the rendezvous.
    """
    table = _table("Gbit/s that each peer's link needs for a compute utilization of")
    for head in ("scheme", *(f"{target:.0%}" for target in TARGETS), "MB a step"):
        table.add_column(head, justify="left" if head == "scheme" else "right")
    name = f"{own.scheme.name}, {own.peers} peers"
    rows = [(scheme.name, workload, scheme, lambda gbit: Pipe(gbit_s=gbit)) for scheme in schemes]
    rows.append((name, own.workload, own.scheme, lambda gbit: own.pipe(own.net(gbit))))
    for label, work, scheme, pipe_at in rows:
        required = [required_gbit(work, scheme, target, _GRID, pipe_at) for target in TARGETS]
        cells = (OUT_OF_REACH if gbit is None else three_digits(gbit) for gbit in required)
        table.add_row(label, *cells, three_digits(bytes_per_step(work, scheme) / 1e6))
    if None not in required:
        return table, ""
    shares = IntervalShares.of(own.workload, own.scheme, own.pipe(own.net(_GRID[-1])))
    return table, f"{OUT_OF_REACH}: out of reach of any link. On the widest, {name}: {shares.text()}"


def peers_table(
    runs: Sequence[JointRun], nets: Sequence[Net], fleet: Fleet, heal_timeout_s: float
) -> tuple[Table, str]:
    """Return one row for each number of peers. `nets`: of the runs; `fleet`: of any peers."""
    first, net = runs[0], nets[0]
    table = _table(
        f"{first.scheme.name}, H = {first.every}, P = {first.fragments}, tau = {first.delay:g}: {net.gbit_s:g} Gbit/s, "
        f"{1e3 * net.latency_s:g} ms"
    )
    for head in ("peers", "sync, s", "waits, s", "utilization", "goodput", "dominates"):
        table.add_column(head, justify="left" if head == "dominates" else "right")
    forecasts = [forecast_link(run, its_net) for run, its_net in zip(runs, nets, strict=True)]
    shares = [IntervalShares.of(run.workload, run.scheme, run.pipe(its)) for run, its in zip(runs, nets, strict=True)]
    for run, forecast, share in zip(runs, forecasts, shares, strict=True):
        interval_s = run.every / run.fragments * run.step_s
        kept = goodput(replace(fleet, peers=run.peers), forecast.utilization, interval_s, forecast.heal_s)
        table.add_row(
            str(run.peers), three_digits(forecast.sync_s), three_digits(forecast.exposed_s),
            f"{forecast.utilization:.1%}", f"{kept:.1%}", share.dominant,
        )  # fmt: skip
    warnings = (
        deadline_warning(forecasts[0].send_s, fleet.deadline_s, "--deadline-s"),
        heal_warning(forecasts[0].heal_s, heal_timeout_s, "--heal-timeout-s"),
    )
    return table, (
        "sync: from encoding to the installed outcome; waits: what of it training waits for. "
        f"With {first.peers} peers, {shares[0].text()}"
        + "".join(f"\nWarning: {warning}" for warning in warnings if warning)
    )


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
