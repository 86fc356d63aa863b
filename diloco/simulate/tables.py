"""The tables of `diloco simulate`, 80 columns wide, and under each the sentence that says what its figures mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from diloco.simulate.fleet import Fleet, deadline_warning, goodput, heal_warning
from diloco.simulate.product import JointRun, forecast_link
from diloco.simulate.reduce import WAYS, best, pipe, seconds, traffic
from diloco.simulate.utilisation import (
    Scheme,
    Shares,
    Workload,
    bytes_per_step,
    exposed_s,
    grid,
    required_gbit,
    three_digits,
    utilisation,
)

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
OUT_OF_REACH = "-"
_GRID = grid(-3, 4, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """What peers are joined by."""

    gbit: float
    """Of each peer."""
    latency_s: float
    """One way."""
    relay_gbit: float | None
    """Of the rendezvous; None is that of a peer."""


def required_table(workload: Workload, schemes: Sequence[Scheme], own: JointRun) -> tuple[Table, str]:
    """Gbit/s of a peer's link for each utilisation, and the bytes that a peer sends an inner step.

    The paper's schemes on a link that carries a delta once, this package's own through the rendezvous.
    """
    table = _table("Gbit/s that each peer's link needs for a compute utilisation of")
    for head in ("scheme", *(f"{target:.0%}" for target in TARGETS), "MB a step"):
        table.add_column(head, justify="left" if head == "scheme" else "right")
    for scheme in schemes:
        found = [required_gbit(workload, scheme, target, _GRID) for target in TARGETS]
        _add_required(table, scheme.name, found, bytes_per_step(workload, scheme))
    found = [
        required_gbit(own.workload, own.scheme, target, _GRID, lambda gbit: pipe("relay", own.net(gbit)))
        for target in TARGETS
    ]
    name = f"{own.scheme.name}, {own.peers} peers"
    _add_required(table, name, found, bytes_per_step(own.workload, own.scheme))
    return table, _reach(own, name) if None in found else ""


def _add_required(table: Table, name: str, found: Sequence[float | None], sent: float) -> None:
    cells = (OUT_OF_REACH if gbit is None else three_digits(gbit) for gbit in found)
    table.add_row(name, *cells, three_digits(sent / 1e6))


def _reach(own: JointRun, name: str) -> str:
    """Why no link gives `own` some of the utilisations."""
    widest = pipe("relay", own.net(_GRID[-1]))
    return (
        f"{OUT_OF_REACH}: out of reach of any link. On the widest, {name}: "
        f"{Shares.of(own.workload, own.scheme, widest).text()}"
    )


def peers_table(runs: Sequence[JointRun], link: LinkSpec, fleet: Fleet, heal_timeout_s: float) -> tuple[Table, str]:
    """One row for each number of peers and way of reducing. `fleet`: of any number of peers."""
    first = runs[0]
    table = _table(
        f"{first.scheme.name}, H = {first.every}, P = {first.fragments}, tau = {first.delay:g}, peers with "
        f"{link.gbit:g} Gbit/s and {1e3 * link.latency_s:g} ms"
    )
    for head in ("peers", "way", "sync, s", "waits, s", "utilisation", "goodput", "dominates"):
        table.add_column(head, justify="left" if head in ("way", "dominates") else "right")
    for run in runs:
        for row in _ways(run, link, fleet):
            table.add_row(*row)
        table.add_section()
    net = first.net(link.gbit, link.latency_s, link.relay_gbit)
    said = forecast_link(first, net)
    warnings = (
        deadline_warning(said.send_s, fleet.deadline_s, "--deadline-s"),
        heal_warning(said.heal_s, heal_timeout_s, "--heal-timeout-s"),
    )
    return table, (
        "sync: from encoding to the installed outcome; waits: what of it training waits for; *: the quickest way. "
        f"relay is what runs here; with {first.peers} peers, "
        f"{Shares.of(first.workload, first.scheme, pipe('relay', net)).text()}"
        + "".join(f"\nWarning: {warning}" for warning in warnings if warning)
    )


def _ways(run: JointRun, link: LinkSpec, fleet: Fleet) -> list[list[str]]:
    net, bits = run.net(link.gbit, link.latency_s, link.relay_gbit), run.size * run.scheme.bits
    interval_s, heal_s = run.every / run.fragments * run.step_s, forecast_link(run, net).heal_s
    quickest, rows = best(net, bits), []
    for way in WAYS:
        found = pipe(way, net)
        share = utilisation(run.workload, run.scheme, found)
        rows.append([
            str(run.peers), f"{way} *" if way == quickest else way, three_digits(seconds(way, net, bits)),
            three_digits(exposed_s(run.workload, run.scheme, found)), f"{share:.1%}",
            f"{goodput(fleet.of(run.peers), share, interval_s, heal_s):.1%}",
            Shares.of(run.workload, run.scheme, found).dominant,
        ])  # fmt: skip
    return rows


def traffic_table(runs: Sequence[JointRun]) -> tuple[Table, str]:
    """One row for each number of peers: megabytes of an inner step on each peer's link and on the rendezvous'."""
    table = _table("MB an inner step, through the relay and by the other ways")
    for head in ("peers", "sent", "received", "rendezvous", "mesh", "hierarchical", "ring"):
        table.add_column(head, justify="right")
    for run in runs:
        delta, relay = bytes_per_step(run.workload, run.scheme), traffic("relay", run.peers)
        others = (traffic(way, run.peers).received for way in WAYS if way != "relay")
        counts = (relay.sent, relay.received, relay.relayed, *others)
        table.add_row(str(run.peers), *(three_digits(count * delta / 1e6) for count in counts))
    return table, (
        "sent, received: by each peer through the relay; rendezvous: in and out of its link, N * N deltas; mesh, "
        "hierarchical (a leader), ring: received by a peer, and sent as much."
    )


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
