"""`diloco simulate`: which link a joint run needs, and which way of reducing pays, as tables and a plot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from composer_prime.config.diloco import CodecConfig
from composer_prime.errors import ConfigError
from diloco.simulate.fleet import Fleet, goodput
from diloco.simulate.plot import svg
from diloco.simulate.product import ENCODE_NS, JointRun
from diloco.simulate.reduce import WAYS, best, pipe, seconds
from diloco.simulate.utilisation import (
    Pipe,
    Scheme,
    Workload,
    bytes_per_step,
    exposed_s,
    grid,
    paper_schemes,
    required_gbit,
    utilisation,
)

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
STATE_BITS = 64.0
"""Masters and momentum of a parameter, which a joining peer receives."""


def parser(add: argparse._SubParsersAction) -> None:
    words = add.add_parser(
        "simulate",
        help="utilisation, bytes and goodput against bandwidth, latency, peers and codec",
        description="What a joint run would get from its link. Nothing is measured and nothing is sent.",
    )
    words.add_argument("--parameters", type=float, default=1e9, help="trained parameters (default 1e9)")
    words.add_argument("--layers", type=int, default=24, help="transformer blocks (default 24)")
    words.add_argument("--step-s", type=float, default=0.1, help="compute time of an inner step, seconds")
    words.add_argument("--sync-every", type=int, default=100, help="H (default 100)")
    words.add_argument("--fragments", type=int, default=8, help="P (default 8)")
    words.add_argument("--delay", type=float, default=1.0, help="tau, inner steps (default 1)")
    words.add_argument("--codec", choices=sorted(ENCODE_NS), default="int4")
    words.add_argument("--peers", type=int, nargs="+", default=[2, 8, 64, 512])
    words.add_argument("--gbit", type=float, default=1.0, help="each peer's link, Gbit/s (default 1)")
    words.add_argument("--latency-ms", type=float, default=100.0, help="one way (default 100)")
    words.add_argument("--relay-gbit", type=float, default=None, help="the rendezvous' link (default: as a peer's)")
    words.add_argument("--slowest", type=float, default=1.0, help="slowest peer's step time over the fastest's")
    words.add_argument("--deadline-s", type=float, default=120.0, help="diloco.round_deadline_s")
    words.add_argument("--mtbf-h", type=float, default=None, help="hours between failures of one peer")
    words.add_argument("--plot", type=Path, default=None, help="write utilisation against bandwidth as SVG")
    words.set_defaults(run=run)


def run(words: argparse.Namespace) -> int:
    """Print the tables. Raises ConfigError for values that cannot be."""
    _check(words)
    workload = Workload(parameters=words.parameters, layers=words.layers, step_s=words.step_s)
    runs = [
        JointRun(
            parameters=words.parameters, layers=words.layers, step_s=words.step_s, every=words.sync_every,
            fragments=words.fragments, delay=words.delay, codec=CodecConfig(type=words.codec), peers=peers,
        )
        for peers in words.peers
    ]  # fmt: skip
    schemes = paper_schemes(workload, words.sync_every, max(1, words.layers // words.fragments))
    console = Console()
    console.print(required_table(workload, schemes, runs[0]))
    console.print(peers_table(words, runs))
    if words.plot is not None:
        words.plot.write_text(_plot(workload, schemes, runs[0]))
        console.print(f"wrote {words.plot}")
    return 0


def required_table(workload: Workload, schemes: Sequence[Scheme], own: JointRun) -> Table:
    """Gbit/s of a peer's link for each utilisation, and bytes of an inner step.

    The paper's schemes on a link that carries a delta once, this package's own through the rendezvous.
    """
    table = Table(title="Gbit/s that a peer needs for a compute utilisation of ...")
    for head in ("scheme", *(f"{target:.0%}" for target in TARGETS), "MB a step"):
        table.add_column(head, justify="left" if head == "scheme" else "right")
    bandwidths = grid(-3, 4, 100)
    for scheme in schemes:
        found = [required_gbit(workload, scheme, target, bandwidths) for target in TARGETS]
        table.add_row(*_required_row(scheme.name, found, bytes_per_step(workload, scheme, Pipe(gbit_s=1.0))))
    found = [
        required_gbit(own.workload, own.scheme, target, bandwidths, lambda gbit: pipe("relay", own.net(gbit)))
        for target in TARGETS
    ]
    sent = own.parameters * own.scheme.bits / 8 / own.every
    table.add_row(*_required_row(f"{own.scheme.name}, {own.peers} peers", found, sent))
    return table


def _required_row(name: str, found: Sequence[float | None], sent: float) -> list[str]:
    return [name, *("-" if gbit is None else f"{gbit:.3g}" for gbit in found), f"{sent / 1e6:.4g}"]


def peers_table(words: argparse.Namespace, runs: Sequence[JointRun]) -> Table:
    """One row for each number of peers and way of reducing."""
    first = runs[0]
    table = Table(
        title=f"{first.scheme.name}, H = {first.every}, P = {first.fragments}, tau = {first.delay:g}: peers with "
        f"{words.gbit:g} Gbit/s and {words.latency_ms:g} ms"
    )
    for head in ("peers", "way", "s a sync", "exposed s", "utilisation", "goodput", "quickest"):
        table.add_column(head, justify="left" if head == "way" else "right")
    interval_s = first.every / first.fragments * first.step_s
    heal_s = first.parameters * STATE_BITS / (words.gbit * 1e9)
    for run in runs:
        net = run.net(words.gbit, words.latency_ms / 1e3, words.relay_gbit)
        fleet = Fleet(peers=run.peers, slowest=words.slowest, deadline_s=words.deadline_s, mtbf_h=words.mtbf_h)
        bits = run.size * run.scheme.bits
        quickest = best(net, bits)
        for way in WAYS:
            found = pipe(way, net)
            share = utilisation(run.workload, run.scheme, found)
            table.add_row(
                str(run.peers), way, f"{seconds(way, net, bits):.3g}",
                f"{exposed_s(run.workload, run.scheme, found):.3g}", f"{share:.1%}",
                f"{goodput(fleet, share, interval_s, heal_s):.1%}", "*" if way == quickest else "",
            )  # fmt: skip
        table.add_section()
    return table


def _plot(workload: Workload, schemes: Sequence[Scheme], own: JointRun) -> str:
    bandwidths = grid(-3, 3, 121)
    series = {
        scheme.name: [(gbit, utilisation(workload, scheme, Pipe(gbit_s=gbit))) for gbit in bandwidths]
        for scheme in schemes
    }
    series[f"{own.scheme.name}, relayed"] = [
        (gbit, utilisation(own.workload, own.scheme, pipe("relay", own.net(gbit)))) for gbit in bandwidths
    ]
    return svg(f"{own.parameters:.3g} parameters, {own.step_s:g} s a step, {own.peers} peers", "Gbit/s", series)


def _check(words: argparse.Namespace) -> None:
    positive = ("parameters", "layers", "step_s", "sync_every", "fragments", "gbit", "slowest", "deadline_s")
    for name in positive:
        if getattr(words, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(words, name)}; expected a value above 0")
    if words.slowest < 1:
        raise ConfigError(f"--slowest is {words.slowest}; it is a ratio to the fastest peer, so at least 1")
    if words.fragments > words.layers:
        raise ConfigError(f"--fragments is {words.fragments}, but there are {words.layers} layers: use at most that")
    if words.latency_ms < 0 or words.delay < 0 or min(words.peers) < 2:
        raise ConfigError("--latency-ms and --delay must not be negative, and --peers must be 2 or more")
