"""How much of a body is under way at once, by how long answers take. No I/O here.

A long round trip wants many pieces under way. A slow link wants small ones: nothing else comes through while a piece is
sent, neither the beats that keep this peer in the run nor the ones that keep the connection.
"""

from __future__ import annotations

PIECE_BYTES = 1 << 18
"""Most bytes of a piece."""
WINDOW = 32
"""Most pieces under way at once."""
_LEAST_BYTES = 1 << 14
_FIRST_WINDOW, _LEAST_WINDOW = 4, 2
_SLOW_S = 2.0
"""An answer that takes longer says that the link's queue is full."""


class Flow:
    """Of one direction of a connection."""

    def __init__(self) -> None:
        self.piece_bytes = min(_LEAST_BYTES, PIECE_BYTES)
        self.window = _FIRST_WINDOW

    def begin(self) -> None:
        """Another transfer: its first pieces are of the size that did for the last."""
        self.window = _FIRST_WINDOW

    def answered(self, took_s: float) -> None:
        """A piece was answered so long after it was sent."""
        if took_s < _SLOW_S:
            if self.piece_bytes < PIECE_BYTES:
                self.piece_bytes *= 2
            else:
                self.window = min(WINDOW, self.window + 1)
        elif self.window > _LEAST_WINDOW:
            self.window -= 1
        else:
            self.piece_bytes = max(min(_LEAST_BYTES, PIECE_BYTES), self.piece_bytes // 2)
