"""A body on its way into the rendezvous, piece by piece. No I/O here."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.header import Header, RunningChecksum, check_body


@dataclass(slots=True)
class Blob:
    """Complete once all bytes are there and their hash is right.

    The hash is taken as the pieces come, for hashing a large body at once would hold up everybody's beats.
    """

    header: Header
    data: bytearray = field(init=False)
    received: int = 0
    complete: bool = False
    _checksum: RunningChecksum = field(default_factory=RunningChecksum)

    def __post_init__(self) -> None:
        """Raises ChecksumError when the header announces an empty body with another hash than that of nothing."""
        self.data = bytearray(self.header.size)
        self._finish()

    def add(self, offset: int, data: bytes) -> None:
        """Bytes that do not continue what is there are dropped: the sender learns from the answer where to go on.

        Raises ChecksumError when the last byte is there and the hash is wrong; the blob is then empty again.
        """
        if self.complete or offset != self.received or offset + len(data) > self.header.size:
            return
        self.data[offset : offset + len(data)] = data
        self._checksum.update(data)
        self.received += len(data)
        self._finish()

    def _finish(self) -> None:
        if self.received < self.header.size:
            return
        found, self._checksum = self._checksum.hexdigest(), RunningChecksum()
        try:
            check_body(self.header, len(self.data), found)
        except Exception:
            self.received = 0
            raise
        self.complete = True
