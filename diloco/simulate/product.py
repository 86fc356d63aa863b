"""What diloco/ itself does, as the simulator sees it: a fragment leaves through the rendezvous when a step has ended.

    training thread      encode | waits unless tau steps hide it ......................... | decode, average, install
    link                        | up .......... | round closes | down (N - 1 deltas) |
    machines on the way         | handle pieces |              | handle pieces ..... |
                         busy_s   the slower      round_s        the slower            busy_s

Pieces of a delta (diloco/transport/connection.py) are encrypted, checked and copied while others are on the link.

The constants are CPU times measured on one x86-64 core: a machine with faster or more cores is quicker than this, a
busy one slower. benchmarks/diloco_link.py measures its machine's own and says how far the simulator is off with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from composer_prime.config.diloco import CodecConfig
from diloco.simulate.reduce import Net, pipe, seconds
from diloco.simulate.utilisation import Scheme, Workload, exposed_s, utilisation

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
"""A code's, after entropy coding, where deltas are normally distributed and 256 share a scale."""


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
        """A parameter in a state that a joining peer gets: master, momentum, and amid a sweep what the last left."""
        return 32.0 * (1 + self.momentum) + 32.0 * (self.fragments - 1) / (2 * self.fragments)

    @property
    def scheme(self) -> Scheme:
        return Scheme(
            name=f"this run, {self.codec.type}", every=self.every, fragments=self.fragments, delay_steps=self.delay,
            bits=codec_bits(self.codec) * FRAMING,
        )  # fmt: skip

    @property
    def workload(self) -> Workload:
        """Nothing hides behind the backward pass: what is sent is how far the optimizer's steps went."""
        return Workload(parameters=self.parameters, layers=self.layers, step_s=self.step_s, backward_share=0.0)

    def net(self, gbit: float, latency_s: float = 0.0, relay_gbit: float | None = None) -> Net:
        """A link, with what handling a fragment takes on this package's constants."""
        each_s = self.size / self.ranks * 1e-9
        encode_s, decode_s = each_s * ENCODE_NS[self.codec.type], each_s * DECODE_NS
        relayed = self.peers**2 * self.size * codec_bits(self.codec) / 8
        handling_s = relayed * RELAY_NS * 1e-9
        return Net(
            peers=self.peers, gbit_s=gbit, latency_s=latency_s, relay_gbit_s=relay_gbit,
            connections=self.ranks, busy_s=encode_s + self.peers * decode_s + each_s * INSTALL_NS, encode_s=encode_s,
            decode_s=decode_s, handling_s=handling_s, round_s=ROUND_S,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkForecast:
    """What one link gives a joint run."""

    sync_s: float
    """From the start of encoding to the installed outcome."""
    send_s: float
    """From the start of encoding until the delta is at the rendezvous, with the links to itself."""
    hidden_step_s: float
    """Inner steps of at least this many seconds hide a transfer; infinite without delay."""
    exposed_s: float
    """What a synchronisation costs training."""
    codec_s: float
    """Of that, work on the training thread, which nothing hides."""
    utilisation: float
    sent_bytes: float
    """By one peer in one synchronisation, headers included."""
    heal_s: float
    """Until a joining peer has the state: from another to the rendezvous, and when all of it is there down."""


def codec_bits(codec: CodecConfig) -> float:
    """Bits a parameter of an encoded delta."""
    if codec.type in _CODE_BITS:
        return _CODE_BITS[codec.type] + SCALE_BITS / codec.block
    return {"fp32": 32.0, "bf16": 16.0, "sparse": 14 * codec.density + 1 / 64}[codec.type]


def forecast_link(run: JointRun, net: Net) -> LinkForecast:
    """What `net` gives `run`."""
    way, bits = pipe("relay", net), run.size * run.scheme.bits
    sync_s = seconds("relay", net, bits)
    up_gbit = min(way.gbit_s, net.relay_gbit_s or way.gbit_s)
    return LinkForecast(
        sync_s=sync_s,
        send_s=net.encode_s + bits / (up_gbit * 1e9) + net.latency_s,
        hidden_step_s=(sync_s - way.busy_s) / run.delay if run.delay else float("inf"),
        exposed_s=exposed_s(run.workload, run.scheme, way),
        codec_s=way.busy_s,
        utilisation=utilisation(run.workload, run.scheme, way),
        sent_bytes=bits / 8,
        heal_s=2 * run.parameters * run.state_bits * FRAMING / (up_gbit * 1e9),
    )
