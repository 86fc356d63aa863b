"""Tables of what links give a joint run: python benchmarks/diloco_simulator.py --parameters 8e9 --step-s 60 --ranks 8

Nothing is measured and nothing is sent: diloco/link_forecast.py has the formula.
"""

from __future__ import annotations

import argparse

from composer_prime.config.diloco import CodecConfig, wrong_schedule
from diloco.link_forecast import ENCODE_NS, JointRun, forecast_link, size

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
LINKS_GBIT = [10 ** (-3 + 7 * index / 99) for index in range(100)]


def joint_run(options: argparse.Namespace, peers: int) -> JointRun:
    return JointRun(
        parameters=options.parameters,
        step_s=options.step_s,
        every=options.sync_every,
        fragments=options.fragments,
        delay=options.delay,
        codec=CodecConfig(type=options.codec),
        ranks=options.ranks,
        peers=peers,
    )


def required_gbit(run: JointRun, target: float, latency_s: float) -> float | None:
    """Return the narrowest of LINKS_GBIT with which utilization reaches `target`; None when none does."""
    wide = (gbit for gbit in LINKS_GBIT if forecast_link(run, gbit, latency_s=latency_s).utilization >= target)
    return next(wide, None)


def tables(options: argparse.Namespace) -> list[str]:
    latency_s = options.latency_ms / 1e3
    lines = ["Gbit/s that each peer's link needs for a compute utilization of"]
    lines.append("  peers" + "".join(f"{target:10.0%}" for target in TARGETS))
    for peers in options.peers:
        needed = [required_gbit(joint_run(options, peers), target, latency_s) for target in TARGETS]
        lines.append(f"{peers:7}" + "".join(f"{'-' if gbit is None else format(gbit, '.3g'):>10}" for gbit in needed))
    lines += ["", f"with {options.gbit:g} Gbit/s and {options.latency_ms:g} ms"]
    lines.append("  peers   sync, s  waits, s  utilization      sent  heal, s")
    for peers in options.peers:
        run = joint_run(options, peers)
        link = forecast_link(run, options.gbit, latency_s=latency_s, relay_gbit=options.relay_gbit)
        lines.append(
            f"{peers:7} {link.sync_s:9.3g} {link.exposed_s:9.3g} {link.utilization:12.1%} "
            f"{size(link.sent_bytes):>9} {link.heal_s:8.0f}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("--parameters", 1e9, "trained parameters"),
        ("--step-s", 0.1, "compute time of an inner step, seconds"),
        ("--sync-every", 96, "H, diloco.sync_every"),
        ("--fragments", 8, "P, diloco.fragments"),
        ("--delay", 1, "tau, inner steps"),
        ("--ranks", 1, "trainer.ranks of a peer: they share codec work"),
        ("--gbit", 1.0, "each peer's link, Gbit/s"),
        ("--latency-ms", 100.0, "one way"),
    ):
        parser.add_argument(name, type=type(default), default=default, help=f"{text} (default {default:g})")
    parser.add_argument("--codec", choices=sorted(ENCODE_NS), default="int4", help="how deltas travel (default int4)")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16, 64, 512], help="clusters, each 2 or more")
    parser.add_argument("--relay-gbit", type=float, help="the rendezvous' link (default: as a peer's)")
    parser.add_argument("--quick", action="store_true", help="two and four peers only")
    options = parser.parse_args()
    options.peers = [2, 4] if options.quick else options.peers
    wrong = wrong_schedule(options.sync_every, options.fragments, options.delay, lambda key: f"--{key}")
    if wrong is not None or min(options.peers) < 2:
        parser.error(wrong or "--peers: a joint run has 2 or more")
    print("\n".join(tables(options)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
