"""Ways to bring N peers' deltas together, as what each peer's link carries and how many trips follow one another.

    relay          up once, and when all are there down N - 1 times; the rendezvous' link carries N in, then N (N - 1)
                   out. What diloco/ does: every peer gets every delta as it was sent, so codecs, guards and joining
                   late need no second pass
    mesh           N - 1 up, N - 1 down, no relay: the same properties, needs every pair to be reachable
    hierarchical   groups of about sqrt(N): members to leader, leaders among one another, leader to members
    ring           2 (N - 1) / N of a delta up and down, 2 (N - 1) trips one after the other

hierarchical and ring add up on the way: deltas are decoded and encoded again at each hop, and a bad one can only be
rejected before it enters. In return no peer decodes all: a leader decodes its members' and one of each group and
encodes two sums; in a ring a peer decodes N - 1 parts of 1 / N, twice, and encodes as many as make up one delta.

How many deltas go over whose link in one synchronisation of N peers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.simulate.utilisation import Pipe
from diloco.transport.connection import PIECE_BYTES, WINDOW

WAYS = ("relay", "mesh", "hierarchical", "ring")
RELAY_TRIPS = 10
"""Requests and answers of a peer, one after the other: offer, last piece, offer again, outcome, last piece down."""
RELAY_WINDOW_GBIT = WINDOW * PIECE_BYTES * 8 / 1e9
"""Most that one connection has under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    peers: int
    gbit_s: float
    """Of each peer, each direction."""
    latency_s: float
    """One way, between any two."""
    relay_gbit_s: float | None = None
    """Of the rendezvous, each direction; None is that of a peer."""
    connections: int = 1
    """Of a peer with the rendezvous, each with a window of its own."""
    busy_s: float = 0.0
    """As in Pipe, where every peer decodes every delta (relay, mesh)."""
    encode_s: float = 0.0
    """Of it, encoding one delta."""
    decode_s: float = 0.0
    """Of it, decoding one of the N."""
    handling_s: float = 0.0
    """Of the rendezvous, as in Pipe; ways without a relay have none."""
    round_s: float = 0.0
    """Likewise."""


def pipe(way: str, net: Net) -> Pipe:
    """What a peer's delta meets. Raises ValueError for an unknown way."""
    n = net.peers
    if n < 2:
        return Pipe(gbit_s=net.gbit_s, factor=0.0, hops=0)
    gbit, encoded, decoded = net.gbit_s, 1.0, float(n)
    match way:
        case "relay":
            if net.latency_s:
                gbit = min(gbit, net.connections * RELAY_WINDOW_GBIT / (2 * net.latency_s))
            thinner = gbit / (net.relay_gbit_s or net.gbit_s)
            factor, hops = max(1, n * thinner) + max(n - 1, n * (n - 1) * thinner), RELAY_TRIPS
        case "mesh":
            factor, hops = n - 1, 1
        case "hierarchical":
            group = group_size(n)
            leaders = math.ceil(n / group)
            factor, hops = 2 * (group - 1) + (leaders - 1), 3
            encoded, decoded = 2.0, group - 1 + leaders
        case "ring":
            factor, hops = 2 * (n - 1) / n, 2 * (n - 1)
            decoded = factor
        case _:
            raise ValueError(f"no way of reducing is called {way!r}; there are {', '.join(WAYS)}")
    handling_s, round_s = (net.handling_s, net.round_s) if way == "relay" else (0.0, 0.0)
    busy_s = net.busy_s + (encoded - 1) * net.encode_s + (decoded - n) * net.decode_s
    return Pipe(
        gbit_s=gbit, latency_s=net.latency_s, factor=factor, hops=hops, busy_s=busy_s, handling_s=handling_s,
        round_s=round_s,
    )  # fmt: skip


def group_size(peers: int) -> int:
    """The group size that keeps the busiest link, a leader's, least busy: about sqrt(N / 2)."""
    return min(range(1, peers + 1), key=lambda size: 2 * (size - 1) + math.ceil(peers / size) - 1)


def seconds(way: str, net: Net, bits: float) -> float:
    """One reduction of a delta of `bits` bits from the start of its encoding to the last peer's having the result."""
    found = pipe(way, net)
    return found.moving_s(bits) + found.hops * found.latency_s + found.round_s + found.busy_s


def best(net: Net, bits: float) -> str:
    """The quickest way."""
    return min(WAYS, key=lambda way: seconds(way, net, bits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counted in deltas of one peer."""

    sent: float
    """By each peer; in a hierarchy by a leader, who sends most."""
    received: float
    """Likewise."""
    relayed: float = 0.0
    """Into the rendezvous and out of it."""


def traffic(way: str, peers: int) -> Traffic:
    """For one of the WAYS of reduce.py. Raises ValueError for an unknown way."""
    match way:
        case "relay":
            return Traffic(sent=1, received=peers - 1, relayed=peers + peers * (peers - 1))
        case "mesh":
            return Traffic(sent=peers - 1, received=peers - 1)
        case "hierarchical":
            group = group_size(peers)
            each = group - 1 + math.ceil(peers / group) - 1
            return Traffic(sent=each, received=each)
        case "ring":
            each = 2 * (peers - 1) / peers
            return Traffic(sent=each, received=each)
        case _:
            raise ValueError(f"no way of reducing is called {way!r}")
