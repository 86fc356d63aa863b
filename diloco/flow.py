"""How much of a body is under way at once, by how long answers take. No I/O here.

A long round trip wants many pieces under way. A slow link wants small ones: nothing else comes through while a piece is
sent, neither the beats that keep this peer in the run nor the ones that keep the connection.
"""

from __future__ import annotations

PIECE_BYTES = 1 << 18
"""Most bytes of a piece."""
WINDOW = 32
"""Most pieces under way at once."""
LEAST_BYTES = 1 << 14
_FIRST_WINDOW, _LEAST_WINDOW = 4, 2
_SLOW_S = 2.0
"""An answer that takes longer says that the link's queue is full."""


class Flow:
    """Of one transfer: how quick the link was for the last says nothing about this one."""

    def __init__(self, least_bytes: int = LEAST_BYTES, most_bytes: int = PIECE_BYTES) -> None:
        """Sizes of pieces. The most must be the least times a power of two."""
        self._least_bytes, self._most_bytes = least_bytes, most_bytes
        self.piece_bytes, self.window = least_bytes, _FIRST_WINDOW

    def answered(self, took_s: float) -> None:
        """A piece was answered so long after it was sent."""
        if took_s < _SLOW_S:
            if self.piece_bytes < self._most_bytes:
                self.piece_bytes *= 2
            else:
                self.window = min(WINDOW, self.window + 1)
        elif self.window > _LEAST_WINDOW:
            self.window -= 1
        else:
            self.piece_bytes = max(self._least_bytes, self.piece_bytes // 2)

    def unanswered(self) -> None:
        """An answer stayed out: the link became slow, or was lost with all that was under way."""
        self.piece_bytes, self.window = self._least_bytes, _LEAST_WINDOW
