"""How many deltas go over whose link in one synchronisation of N peers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.simulate.reduce import group_size


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
