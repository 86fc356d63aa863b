"""Uneven and failing peers: how much of the fleet's compute ends up in the model.

A fast peer waits for slower ones until the round's deadline; a slow one sends what it has by then. A peer that fails is
gone until it is back and has received the state; the rest goes on after one beat timeout. Data-parallel training stops
whole whenever one peer fails. These are expected values, not a random run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    peers: int
    slowest: float = 1.0
    """The slowest peer's step time over the fastest's; the others lie evenly between."""
    deadline_s: float = 120.0
    """diloco.round_deadline_s."""
    mtbf_h: float | None = None
    """Mean time between failures of one peer; None never fails."""
    restart_s: float = 300.0
    """Until a failed peer's process is back."""
    beat_timeout_s: float = 10.0

    def of(self, peers: int) -> Fleet:
        """Return a fleet of this kind with so many peers."""
        return replace(self, peers=peers)


def waiting_share(fleet: Fleet, interval_s: float) -> float:
    """Return the share of its time that a peer waits for slower ones, mean over peers; `interval_s`: the fastest's."""
    shares = []
    longest = interval_s * fleet.slowest
    end = min(longest, interval_s + fleet.deadline_s)
    for index in range(fleet.peers):
        position = index / (fleet.peers - 1) if fleet.peers > 1 else 0.0
        own = interval_s * (1 + (fleet.slowest - 1) * position)
        shares.append(max(0.0, end - own) / end)
    return sum(shares) / len(shares)


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


def availability(fleet: Fleet, heal_s: float, *, together: bool) -> float:
    """Return the share of the time that a peer trains; `together`: all stop when one fails, as in data-parallel."""
    if fleet.mtbf_h is None:
        return 1.0
    down, up = fleet.restart_s + heal_s, fleet.mtbf_h * 3600
    if together:
        return 1 / (1 + fleet.peers * down / up)
    stalls = (fleet.peers - 1) * fleet.beat_timeout_s
    return 1 / (1 + (down + stalls) / up)


def goodput(fleet: Fleet, utilization: float, interval_s: float, heal_s: float, *, together: bool = False) -> float:
    """Return the share of the fleet's compute that trains the model, 0..1."""
    waits = 1 - 1 / fleet.slowest if together else waiting_share(fleet, interval_s)
    return utilization * (1 - waits) * availability(fleet, heal_s, together=together)
