"""What a rendezvous is started with."""

from __future__ import annotations

import msgspec


class RendezvousSettings(msgspec.Struct, frozen=True, kw_only=True):
    bind: str
    """tcp://ADDRESS:PORT; port 0 takes a free one."""
    run: str
    min_peers: int = 1
    """A round needs this many contributions."""
    start_peers: int = 1
    """The first round waits until so many peers are training."""
    gather_s: float = 60.0
    """How long, after a restart of the rendezvous or of all peers, those that come first wait for start_peers."""
    beat_timeout_s: float = 10.0
    """A peer that is silent for longer is gone; beats come five times as often."""
    keep_rounds: int = 16
    """Closed rounds that late peers can catch up with, as far as max_bytes allows."""
    max_bytes: int = 16_000_000_000
    """Most bytes of deltas and of a state in memory."""

    @property
    def listen_s(self) -> float:
        """After its start: until then every peer that trains is heard, also if its last request was lost in between."""
        return 0.6 * self.beat_timeout_s
