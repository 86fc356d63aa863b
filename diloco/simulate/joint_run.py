"""What diloco/ itself does, as the simulator sees it.

A fragment leaves through the rendezvous when a step has ended:

    training thread      encode | waits unless tau steps hide it ......................... | decode, average, install
    link                        | up .......... | round closes | down (N - 1 deltas) |
    machines on the way         | handle pieces |              | handle pieces ..... |
                         busy_s   the slower      round_s        the slower            busy_s

Pieces of a delta (diloco/transport/connection.py) are encrypted, checked and copied while others are on the link. A
peer's link carries its delta up once and, when all are there, the others' down. The rendezvous' link carries N in, then
N (N - 1) out. So every peer gets every delta as it was sent.

The constants are CPU times measured on one x86-64 core: a machine with faster or more cores is quicker than this, a
busy one slower. benchmarks/diloco_link.py measures those of its machine, and how far the simulator is off with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from composer_prime.config.diloco import CodecConfig
from diloco.simulate.utilization import Pipe, Scheme, Workload, exposed_s, utilization
from diloco.transport.connection import PIECE_BYTES, WINDOW

FRAMING = 1.047
"""Bytes on the wire over bytes of a delta: Ethernet, IP and TCP headers, 66 of 1514 bytes; ZMQ adds next to nothing."""
ENCODE_NS = {"fp32": 25.0, "bf16": 25.0, "int8": 18.0, "int4": 8.0, "e3m0": 16.0, "sparse": 12.0}
"""1e-9 s of one core a parameter: delta, error feedback, codec and checksum (2 M parameters at a time)."""
DECODE_NS = 10.0
"""A parameter and peer: decode, guard, mean."""
INSTALL_NS = 4.0
"""A parameter: outer step, hash of the global model, copy into the parameters."""
ROUND_S = 0.08
"""Until a round of next to nothing is closed: requests, the rendezvous' tick, torchft's quorum."""
RELAY_NS = 4.6
"""1e-9 s of the rendezvous a byte that goes through it: encryption, checksums, copies."""
SCALE_BITS = 16
_CODE_BITS = {"int8": 7.46, "int4": 3.32, "e3m0": 3.51}
"""Of a code after entropy coding, where deltas are normally distributed and 256 share a scale."""

RELAY_TRIPS = 10
"""Requests and answers of a peer, one after the other: offer, last piece, offer again, outcome, last piece down."""
RELAY_WINDOW_GBIT = WINDOW * PIECE_BYTES * 8 / 1e9
"""Most that one connection has under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A peer's link, and what else a synchronization takes. The times are as in Pipe."""

    gbit_s: float
    """Each direction."""
    latency_s: float = 0.0
    """One way."""
    relay_gbit_s: float | None = None
    """Of the rendezvous, each direction; None is that of a peer."""
    busy_s: float = 0.0
    encode_s: float = 0.0
    """Of it, encoding one delta."""
    handling_s: float = 0.0
    round_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRun:
    """One peer's part of a joint run."""

    parameters: float
    """Trained, on all ranks."""
    layers: int
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
    def rendezvous_bytes(self) -> tuple[float, float]:
        """Memory that the rendezvous needs: for a round and the one before it, and with a joining peer's state."""
        rounds = 2 * self.peers * self.delta_bytes
        return rounds, rounds + self.parameters * self.state_bits / 8

    @property
    def host_bytes(self) -> float:
        """Peak of host memory of one peer: what it always holds, and what a synchronization adds.

        Masters, their values after the last sweep, momentum and error feedback; the delta on offer, what its encoding
        lost and, where they are carried on from, the local values; the others' deltas, encoded; a mean and one decoded
        delta, with as much again to decode it.
        """
        held = 4.0 * (3 + self.momentum) * self.parameters
        return held + 4.0 * 6 * self.size + self.peers * self.delta_bytes

    @property
    def scheme(self) -> Scheme:
        return Scheme(
            name=f"this run, {self.codec.type}", every=self.every, fragments=self.fragments, delay_steps=self.delay,
            bits=codec_bits(self.codec) * FRAMING,
        )  # fmt: skip

    @property
    def workload(self) -> Workload:
        """Nothing hides behind the backward pass: a delta is known when the optimizer's step has ended."""
        return Workload(parameters=self.parameters, layers=self.layers, step_s=self.step_s, backward_share=0.0)

    def net(self, gbit: float, latency_s: float = 0.0, relay_gbit: float | None = None) -> Net:
        """Return a link, with the time that handling a fragment takes by this module's constants."""
        each_s, encode_ns = self.size / self.ranks * 1e-9, ENCODE_NS[self.codec.type]
        relayed_bytes = self.peers**2 * self.size * codec_bits(self.codec) / 8
        return Net(
            gbit_s=gbit, latency_s=latency_s, relay_gbit_s=relay_gbit, encode_s=each_s * encode_ns,
            busy_s=each_s * (encode_ns + self.peers * DECODE_NS + INSTALL_NS),
            handling_s=relayed_bytes * RELAY_NS * 1e-9, round_s=ROUND_S,
        )  # fmt: skip

    def pipe(self, net: Net) -> Pipe:
        """Return what a delta passes through on its way from this peer to all others."""
        n, gbit = self.peers, net.gbit_s
        if net.latency_s:
            gbit = min(gbit, self.ranks * RELAY_WINDOW_GBIT / (2 * net.latency_s))
        thinner = gbit / (net.relay_gbit_s or net.gbit_s)
        return Pipe(
            gbit_s=gbit, latency_s=net.latency_s, factor=max(1, n * thinner) + max(n - 1, n * (n - 1) * thinner),
            hops=RELAY_TRIPS, busy_s=net.busy_s, handling_s=net.handling_s, round_s=net.round_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkForecast:
    """What one link gives a joint run."""

    sync_s: float
    """From the start of encoding to the installed outcome."""
    send_s: float
    """From the start of encoding until the delta is at the rendezvous, with no other traffic on the links."""
    exposed_s: float
    """What a synchronization costs training."""
    codec_s: float
    """Of that, work on the training thread, which nothing hides."""
    utilization: float
    sent_bytes: float
    """By one peer in one synchronization, headers included."""
    heal_s: float
    """Until a joining peer has the state: from another to the rendezvous, and when all of it is there down."""


def codec_bits(codec: CodecConfig) -> float:
    """Return the bits a parameter of an encoded delta."""
    if codec.type in _CODE_BITS:
        return _CODE_BITS[codec.type] + SCALE_BITS / codec.block
    return {"fp32": 32.0, "bf16": 16.0, "sparse": 14 * codec.density + 1 / 64}[codec.type]


def forecast_link(run: JointRun, net: Net) -> LinkForecast:
    """Return what `net` gives `run`."""
    path, bits = run.pipe(net), run.size * run.scheme.bits
    up_gbit = min(path.gbit_s, net.relay_gbit_s or path.gbit_s)
    return LinkForecast(
        sync_s=path.moving_s(bits) + path.hops * path.latency_s + path.round_s + path.busy_s,
        send_s=net.encode_s + bits / (up_gbit * 1e9) + net.latency_s,
        exposed_s=exposed_s(run.workload, run.scheme, path),
        codec_s=path.busy_s,
        utilization=utilization(run.workload, run.scheme, path),
        sent_bytes=bits / 8,
        heal_s=2 * run.parameters * run.state_bits * FRAMING / (up_gbit * 1e9),
    )


def deadline_warning(send_s: float, deadline_s: float, key: str) -> str:
    """Return a warning for a delta that takes longer to bring than the deadline, which `key` sets; empty for others.

    The deadline runs from the first whole delta, so equal peers that start together have all the time they need. A peer
    that starts when another has brought its own is too late.
    """
    if send_s <= deadline_s:
        return ""
    return (
        f"encoding and sending a delta takes {send_s:.3g} s, more than {key} = {deadline_s:g}: a peer that begins when "
        f"another's delta is there comes too late for the round; set {key} above {send_s:.3g}, or send fewer bits"
    )


def heal_warning(heal_s: float, timeout_s: float, key: str) -> str:
    """Return a warning for a state that takes longer to a joining peer than `key` allows; empty for others."""
    if heal_s <= timeout_s:
        return ""
    return (
        f"the state takes {math.ceil(heal_s)} s to a joining peer, up to the rendezvous and then down, more than {key} "
        f"= {timeout_s:g}: no peer that needs it could join; set {key} well above that, or widen the links"
    )


# -- uneven and failing peers ------------------------------------------------------------------------------------
#
# How much of the fleet's compute ends up in the model, as expected values. A fast peer waits for slower ones until the
# round's deadline; a slow one sends what it has by then. A peer that fails is gone until it is back and has received
# the state; the others continue after one beat timeout.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    peers: int
    """2 or more."""
    slowest: float = 1.0
    """The slowest peer's step time over the fastest's; the others lie evenly between."""
    deadline_s: float = 120.0
    """diloco.round_deadline_s."""
    mtbf_h: float | None = None
    """Mean time between failures of one peer; None never fails."""
    restart_s: float = 300.0
    """Until a failed peer's process is back."""
    beat_timeout_s: float = 10.0


def waiting_share(fleet: Fleet, interval_s: float) -> float:
    """Return the share of its time that a peer waits for slower ones, mean over peers; `interval_s`: the fastest's."""
    end_s = min(interval_s * fleet.slowest, interval_s + fleet.deadline_s)
    slower_s = interval_s * (fleet.slowest - 1) / (fleet.peers - 1)
    waits_s = [max(0.0, end_s - interval_s - index * slower_s) for index in range(fleet.peers)]
    return sum(waits_s) / fleet.peers / end_s


def availability(fleet: Fleet, heal_s: float) -> float:
    """Return the share of the time that a peer trains."""
    if fleet.mtbf_h is None:
        return 1.0
    down_s = fleet.restart_s + heal_s + (fleet.peers - 1) * fleet.beat_timeout_s
    return 1 / (1 + down_s / (fleet.mtbf_h * 3600))


def goodput(fleet: Fleet, utilization: float, interval_s: float, heal_s: float) -> float:
    """Return the share of the fleet's compute that trains the model, 0..1."""
    return utilization * (1 - waiting_share(fleet, interval_s)) * availability(fleet, heal_s)
