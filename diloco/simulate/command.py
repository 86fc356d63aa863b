"""`diloco simulate`: which link a joint run needs, and which way of reducing pays, as tables and a plot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from composer_prime.errors import ConfigError
from diloco.simulate.fleet import Fleet, goodput
from diloco.simulate.plot import svg
from diloco.simulate.reduce import WAYS, Net, best, pipe, seconds
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
CODEC_BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.125, "int4": 4.125, "e3m0": 4.125, "sparse": 0.234}
"""Bits a parameter, as diloco/codec sends them at its default settings."""
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
    words.add_argument("--codec", choices=sorted(CODEC_BITS), default="e3m0")
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
    own = Scheme(
        name=f"this run, {words.codec}", every=words.sync_every, fragments=words.fragments, delay_steps=words.delay,
        bits=CODEC_BITS[words.codec],
    )  # fmt: skip
    schemes = [*paper_schemes(workload, words.sync_every, max(1, words.layers // words.fragments)), own]
    console = Console()
    console.print(required_table(workload, schemes))
    console.print(peers_table(words, workload, own))
    if words.plot is not None:
        words.plot.write_text(_plot(workload, schemes))
        console.print(f"wrote {words.plot}")
    return 0


def required_table(workload: Workload, schemes: Sequence[Scheme]) -> Table:
    """Gbit/s between two peers for each utilisation, and bytes of an inner step."""
    table = Table(title="Gbit/s that a peer needs for a compute utilisation of ...")
    for head in ("scheme", *(f"{target:.0%}" for target in TARGETS), "MB a step"):
        table.add_column(head, justify="left" if head == "scheme" else "right")
    for scheme in schemes:
        found = [required_gbit(workload, scheme, target, grid(-3, 4, 100)) for target in TARGETS]
        sent = bytes_per_step(workload, scheme, Pipe(gbit_s=1.0))
        table.add_row(scheme.name, *("-" if gbit is None else f"{gbit:.3g}" for gbit in found), f"{sent / 1e6:.4g}")
    return table


def peers_table(words: argparse.Namespace, workload: Workload, scheme: Scheme) -> Table:
    """One row for each number of peers and way of reducing."""
    table = Table(
        title=f"{scheme.name}, H = {scheme.every}, P = {scheme.fragments}, tau = {scheme.delay_steps:g}: peers with "
        f"{words.gbit:g} Gbit/s and {words.latency_ms:g} ms"
    )
    for head in ("peers", "way", "s a sync", "exposed s", "utilisation", "goodput", "quickest"):
        table.add_column(head, justify="left" if head == "way" else "right")
    bits = workload.parameters * scheme.bits / scheme.fragments
    interval_s = scheme.every / scheme.fragments * workload.step_s
    heal_s = workload.parameters * STATE_BITS / (words.gbit * 1e9)
    for peers in words.peers:
        net = Net(peers=peers, gbit_s=words.gbit, latency_s=words.latency_ms / 1e3, relay_gbit_s=words.relay_gbit)
        fleet = Fleet(peers=peers, slowest=words.slowest, deadline_s=words.deadline_s, mtbf_h=words.mtbf_h)
        quickest = best(net, bits)
        for way in WAYS:
            found = pipe(way, net)
            share = utilisation(workload, scheme, found)
            table.add_row(
                str(peers), way, f"{seconds(way, net, bits):.3g}", f"{exposed_s(workload, scheme, found):.3g}",
                f"{share:.1%}", f"{goodput(fleet, share, interval_s, heal_s):.1%}", "*" if way == quickest else "",
            )  # fmt: skip
        table.add_section()
    return table


def _plot(workload: Workload, schemes: Sequence[Scheme]) -> str:
    series = {
        scheme.name: [(gbit, utilisation(workload, scheme, Pipe(gbit_s=gbit))) for gbit in grid(-3, 3, 121)]
        for scheme in schemes
    }
    title = f"{workload.parameters:.3g} parameters, {workload.step_s:g} s a step, two peers"
    return svg(title, "Gbit/s", series)


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
