"""What a link gives a joint run, by formula: the rows about the link in its plan. Nothing is measured or sent.

    training thread      encode | waits unless tau steps hide it ......................... | decode, average, install
    link                        | up .......... | round closes | down (N - 1 deltas) |
    machines on the way         | handle pieces |              | handle pieces ..... |
                         busy_s   the slower      round_s        the slower            busy_s

A peer's link carries its delta up once and, when all are there, the others' down. The rendezvous' link carries N in,
then N (N - 1) out. Pieces of a delta (diloco/transport/connection.py) are handled while others are on the link.

The constants are CPU times of one x86-64 core.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config import Config
from composer_prime.config.diloco import BLOCK, CodecConfig, DilocoConfig
from composer_prime.console import pluralize
from composer_prime.errors import ComposerError
from composer_prime.model_source import model_ready, resolve_model
from composer_prime.plan.footprint import ModelShape, trained_parameters
from composer_prime.run.run_dir import RunDir
from diloco.transport.connection import PIECE_BYTES, WINDOW

LINKS_MBIT = (1000.0, 100.0)
"""Links of each peer and of the rendezvous, where the configuration names none."""
ASSUMED_STEP_S = 60.0
DEFAULT_MEMORY_GB = 16.0
"""Default of `diloco rendezvous --memory-gb`."""
_LAST_STEPS = 10
FRAMING = 1.047
"""Bytes on the wire over bytes of a delta: Ethernet, IP and TCP headers, 66 of 1514 bytes; ZMQ adds next to nothing."""
ENCODE_NS = {"fp32": 25.0, "bf16": 25.0, "int8": 18.0, "int4": 8.0}
"""1e-9 s of one core a parameter: delta, error feedback, codec and checksum (2 M parameters at a time)."""
DECODE_NS = 10.0
"""1e-9 s a parameter and peer: decode, guard, mean."""
INSTALL_NS = 4.0
"""1e-9 s a parameter: outer step, hash of the global model, copy into the parameters."""
ROUND_S = 0.08
"""Until a round of next to nothing is closed: requests, the rendezvous' tick, torchft's quorum."""
RELAY_NS = 4.6
"""1e-9 s of the rendezvous a byte that goes through it: encryption, checksums, copies."""
SCALE_BITS = 16
_CODE_BITS = {"int8": 7.46, "int4": 3.32}
"""Bits of a code after entropy coding, where deltas are normally distributed and 256 share a scale."""
RELAY_TRIPS = 10
"""Requests and answers of a peer, one after the other: offer, last piece, offer again, outcome, last piece down."""
RELAY_WINDOW_GBIT = WINDOW * PIECE_BYTES * 8 / 1e9
"""Most that one connection has under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRun:
    """One peer's part of a joint run."""

    parameters: float
    """Trained, on all ranks."""
    step_s: float
    """Compute time of an inner step."""
    every: int
    """H."""
    fragments: int
    """P."""
    delay: float
    """tau."""
    codec: CodecConfig
    ranks: int = 1
    """trainer.ranks: each works on a shard of its own, on a core of its own, over a connection of its own."""
    peers: int = 2
    momentum: float = 1.0
    """Share of the parameters that the outer optimizer keeps momentum of."""

    @property
    def size(self) -> float:
        """Parameters of a fragment."""
        return self.parameters / self.fragments

    @property
    def state_bits(self) -> float:
        """Bits a parameter in a state that a joining peer gets: master, momentum, and amid a sweep the last sweep."""
        return 32.0 * (1 + self.momentum) + 32.0 * (self.fragments - 1) / (2 * self.fragments)

    @property
    def delta_bytes(self) -> float:
        return self.size * codec_bits(self.codec) / 8

    @property
    def rendezvous_bytes(self) -> float:
        """Memory of the rendezvous: a round, the one before it, and a joining peer's state."""
        return 2 * self.peers * self.delta_bytes + self.parameters * self.state_bits / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkForecast:
    """What one link gives a joint run."""

    sync_s: float
    """From the start of encoding to the installed outcome."""
    send_s: float
    """From the start of encoding until the delta is at the rendezvous, with no other traffic on the links."""
    exposed_s: float
    """What a synchronization costs training."""
    utilization: float
    """Compute time over wall time, 0..1."""
    sent_bytes: float
    """By one peer in one synchronization, headers included."""
    heal_s: float
    """Until a joining peer has the state: from another to the rendezvous, and when all of it is there down."""


def codec_bits(codec: CodecConfig) -> float:
    """Return the bits a parameter of an encoded delta."""
    if codec.type in _CODE_BITS:
        return _CODE_BITS[codec.type] + SCALE_BITS / BLOCK
    return {"fp32": 32.0, "bf16": 16.0}[codec.type]


def forecast_link(
    run: JointRun, gbit: float, *, latency_s: float = 0.0, relay_gbit: float | None = None
) -> LinkForecast:
    """Return what a link gives `run`.

    `gbit`: each peer's link in each direction, `relay_gbit` the rendezvous' (None: as a peer's). `latency_s`: one way.
    """
    n, bits = run.peers, run.size * codec_bits(run.codec) * FRAMING
    encode_ns, each_s = ENCODE_NS[run.codec.type], run.size / run.ranks * 1e-9
    busy_s = each_s * (encode_ns + n * DECODE_NS + INSTALL_NS)  # On the training thread: never hidden.
    handling_s = n**2 * run.delta_bytes * RELAY_NS * 1e-9  # Beside the transfer: the slower of the two sets the pace.
    relay_gbit = relay_gbit or gbit
    own_gbit = min(gbit, run.ranks * RELAY_WINDOW_GBIT / (2 * latency_s)) if latency_s else gbit
    thinner = own_gbit / relay_gbit
    carried = max(1, n * thinner) + max(n - 1, n * (n - 1) * thinner)
    on_the_way_s = max(bits * carried / (own_gbit * 1e9), handling_s) + RELAY_TRIPS * latency_s + ROUND_S
    exposed_s = busy_s + max(0.0, on_the_way_s - run.delay * run.step_s)
    compute_s = run.every / run.fragments * run.step_s
    up_gbit = min(own_gbit, relay_gbit)
    return LinkForecast(
        sync_s=on_the_way_s + busy_s,
        send_s=each_s * encode_ns + bits / (up_gbit * 1e9) + latency_s,
        exposed_s=exposed_s,
        utilization=compute_s / (compute_s + exposed_s),
        sent_bytes=bits / 8,
        heal_s=2 * run.parameters * run.state_bits * FRAMING / (up_gbit * 1e9),
    )


# -- the rows of a plan ------------------------------------------------------------------------------------------


def link_rows(config: Config) -> list[tuple[str, str]]:
    """Return (label, text) as in a plan; none without [diloco] or without a model folder to count parameters in."""
    diloco = config.diloco
    if diloco is None:
        return []
    try:
        if model_ready(config.model.path) is not None:
            return []
    except ComposerError:  # the plan lists it as a problem
        return []
    measured_s = step_s(RunDir(config.run_directory).metrics)
    run = JointRun(
        parameters=trained_parameters(config, ModelShape.read(resolve_model(config.model.path))),
        step_s=measured_s or ASSUMED_STEP_S,
        every=diloco.sync_every,
        fragments=diloco.fragments,
        delay=diloco.delay,
        codec=diloco.codec,
        ranks=config.trainer.ranks,
        momentum=1.0 if diloco.outer.momentum else 0.0,
        peers=max(2, diloco.task_shard[1]) if diloco.task_shard else 2,
    )
    source = f"as in the last {_LAST_STEPS} steps of this run" if measured_s else "assumed"
    first = (
        f"{run.size / 1e6:,.1f} M parameters (one of {pluralize(run.fragments, 'fragment')}) every "
        f"{pluralize(run.every // run.fragments, 'step')}, {diloco.codec.type}: about {codec_bits(run.codec):.2g} bits "
        f"each; {run.peers} peers, {run.step_s:.3g} s a step ({source})"
    )
    limit = diloco.rate_limit_mbit
    links = LINKS_MBIT if limit is None else (limit * config.trainer.ranks,)
    return [("link", first), *(("", _link_text(run, mbit, diloco)) for mbit in links), *_memory_rows(run)]


def _memory_rows(run: JointRun) -> list[tuple[str, str]]:
    """Return a warning where the rendezvous needs more memory than it has by default."""
    if run.rendezvous_bytes <= 1e9 * DEFAULT_MEMORY_GB:
        return []
    needed = math.ceil(run.rendezvous_bytes / 1e9)
    text = f"warning: the rendezvous needs {needed} GB for its rounds and a joining cluster's state"
    return [("", f"{text}: start it with --memory-gb {needed} (default {DEFAULT_MEMORY_GB:g})")]


def _link_text(run: JointRun, mbit: float, diloco: DilocoConfig) -> str:
    forecast = forecast_link(run, mbit / 1e3)
    interval_s = run.every / run.fragments * run.step_s + forecast.exposed_s
    text = (
        f"at {mbit:,.0f} Mbit/s: utilization {forecast.utilization:.1%}, {size(forecast.sent_bytes)} each way a "
        f"synchronization, {size(forecast.sent_bytes * 86400 / interval_s)} a day"
    )
    # A peer that begins when another's delta is there comes too late for the round.
    if forecast.send_s > diloco.round_deadline_s:
        text += (
            f"; warning: sending a delta takes {math.ceil(forecast.send_s)} s, more than diloco.round_deadline_s = "
            f"{diloco.round_deadline_s:g}: set it above that, or send fewer bits"
        )
    if forecast.heal_s > diloco.heal_timeout_s:
        text += (
            f"; warning: the state takes {math.ceil(forecast.heal_s)} s to a joining peer, more than "
            f"diloco.heal_timeout_s = {diloco.heal_timeout_s:g}: set it well above that, or widen the links"
        )
    return text


def step_s(metrics: Path) -> float | None:
    """Return the median seconds of a run's last steps; None before the first."""
    if not metrics.is_file():
        return None
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if '"time/step_s"' in line]
    return statistics.median(line["time/step_s"] for line in lines[-_LAST_STEPS:]) if lines else None


def size(count: float) -> str:
    """Format bytes in decimal units, as links have them."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"
