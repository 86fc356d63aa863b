"""`diloco simulate`: which link a joint run needs, and which way of reducing pays, as tables and a plot."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from composer_prime.config.diloco import CodecConfig, wrong_schedule
from composer_prime.errors import ConfigError
from diloco.simulate.fleet import Fleet
from diloco.simulate.plot import svg
from diloco.simulate.product import ENCODE_NS, JointRun
from diloco.simulate.reduce import pipe
from diloco.simulate.tables import LinkSpec, peers_table, required_table, traffic_table
from diloco.simulate.utilisation import (
    Pipe,
    Scheme,
    Workload,
    bytes_per_step,
    grid,
    paper_schemes,
    three_digits,
    utilisation,
)


def simulate_parser(add: argparse._SubParsersAction) -> None:
    words = add.add_parser(
        "simulate",
        help="utilisation, bytes and goodput against bandwidth, latency, peers and codec",
        description="What a joint run would get from its link. Nothing is measured and nothing is sent.",
    )
    words.add_argument("--parameters", type=float, default=1e9, help="trained parameters (default 1e9)")
    words.add_argument("--layers", type=int, default=24, help="transformer blocks (default 24)")
    words.add_argument("--step-s", type=float, default=0.1, help="compute time of an inner step, seconds (default 0.1)")
    words.add_argument("--sync-every", type=int, default=96, help="H, diloco.sync_every (default 96)")
    words.add_argument("--fragments", type=int, default=8, help="P, diloco.fragments: divides H (default 8)")
    words.add_argument("--delay", type=int, default=1, help="tau, inner steps: less than H / P (default 1)")
    words.add_argument("--codec", choices=sorted(ENCODE_NS), default="int4", help="how deltas travel (default int4)")
    words.add_argument(
        "--ranks", type=int, default=1, help="trainer.ranks of a peer: they share codec work (default 1)"
    )  # fmt: skip
    words.add_argument(
        "--peers", type=int, nargs="+", default=[2, 8, 64, 512], help="numbers of clusters (default 2 8 64 512)"
    )  # fmt: skip
    words.add_argument("--gbit", type=float, default=1.0, help="each peer's link, Gbit/s (default 1)")
    words.add_argument("--latency-ms", type=float, default=100.0, help="one way (default 100)")
    words.add_argument("--relay-gbit", type=float, default=None, help="the rendezvous' link (default: as a peer's)")
    words.add_argument(
        "--slowest", type=float, default=1.0, help="slowest peer's step time over the fastest's (default 1)"
    )  # fmt: skip
    words.add_argument("--deadline-s", type=float, default=120.0, help="diloco.round_deadline_s (default 120)")
    words.add_argument(
        "--heal-timeout-s", type=float, default=900.0, help="diloco.heal_timeout_s (default 900)"
    )  # fmt: skip
    words.add_argument("--mtbf-h", type=float, default=None, help="hours between a peer's failures (default: none)")
    words.add_argument("--plot", type=Path, default=None, help="write utilisation against bandwidth as SVG")
    words.set_defaults(run=simulate)


def simulate(words: argparse.Namespace) -> int:
    """Print the tables. Raises ConfigError for values that cannot be."""
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
    link = LinkSpec(gbit=words.gbit, latency_s=words.latency_ms / 1e3, relay_gbit=words.relay_gbit)
    fleet = Fleet(peers=2, slowest=words.slowest, deadline_s=words.deadline_s, mtbf_h=words.mtbf_h)
    console = Console(highlight=False)
    with console.capture() as shown:  # rich would answer a reader that left with an exit status of its own
        for table, sentence in (
            required_table(workload, schemes, runs[0]),
            peers_table(runs, link, fleet, words.heal_timeout_s),
            traffic_table(runs),
        ):
            console.print(table)
            console.print(f"{sentence}\n")
    print(shown.get().rstrip())
    if words.plot is not None:
        words.plot.write_text(_plot(workload, schemes, runs[0]))
        print(f"\nwrote {words.plot}")
    return 0


def _plot(workload: Workload, schemes: Sequence[Scheme], own: JointRun) -> str:
    bandwidths = grid(-3, 3, 121)

    def named(name: str, workload: Workload, scheme: Scheme) -> str:
        return f"{name}: {three_digits(bytes_per_step(workload, scheme) / 1e6)} MB"

    series = {
        named(scheme.name, workload, scheme): [
            (gbit, utilisation(workload, scheme, Pipe(gbit_s=gbit))) for gbit in bandwidths
        ]
        for scheme in schemes
    }
    series[named(f"{own.scheme.name}, relayed", own.workload, own.scheme)] = [
        (gbit, utilisation(own.workload, own.scheme, pipe("relay", own.net(gbit)))) for gbit in bandwidths
    ]
    title = f"{own.parameters:.3g} parameters, {own.step_s:g} s a step, {own.peers} peers; MB: sent by each a step"
    return svg(title, "Gbit/s", series)


def _check(words: argparse.Namespace) -> None:
    for name, value in vars(words).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected a finite number")
    positive = ("parameters", "layers", "step_s", "sync_every", "fragments", "ranks", "gbit", "deadline_s")
    given = (name for name in ("relay_gbit", "mtbf_h") if getattr(words, name) is not None)
    for name in (*positive, "heal_timeout_s", *given):
        if getattr(words, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(words, name)}; expected a value above 0")
    for name in ("latency_ms", "delay"):
        if getattr(words, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(words, name):g}; expected 0 or more")
    wrong = wrong_schedule(words.sync_every, words.fragments, words.delay, lambda key: "--" + key.replace("_", "-"))
    if wrong is not None:
        raise ConfigError(wrong)
    if words.slowest < 1:
        raise ConfigError(f"--slowest is {words.slowest}; it is a ratio to the fastest peer, so at least 1")
    if words.fragments > words.layers:
        raise ConfigError(f"--fragments is {words.fragments}, but there are {words.layers} layers: use at most that")
    if min(words.peers) < 2:
        raise ConfigError(f"--peers is {' '.join(map(str, words.peers))}; a joint run has 2 or more")
