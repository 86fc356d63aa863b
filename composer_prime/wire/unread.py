"""Count the bytes that peers of a bound ZMQ socket have sent and nobody has read; close the worst connections.

ZMQ does not bound the frames of one message that has not ended: a peer can send them until this process has no memory.
The kernel counts the bytes of each connection. Linux only; elsewhere nothing is counted or closed.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 256 << 20
"""Of all connections together."""
FRAME_OVERHEAD = 64
"""Bytes of a frame besides its content, rounded up."""
LEAST_FRAME_BYTES = 32
"""The same, rounded down."""
_FREE_BYTES_PER_S = 256.0
"""What a connection may send uncounted: ZMQ's own heartbeats."""
_WATCH_S = 0.05
_LOOK_BYTES, _LOOK_S = 32 << 20, 5.0
"""A look at all connections (17 us each) is due after so much growth of this process, or so long."""
_FDS, _STATM = "/proc/self/fd", "/proc/self/statm"
_BYTES_RECEIVED_AT, _TCP_INFO_SIZE = 128, 192
"""Of struct tcp_info: tcpi_bytes_received, an unsigned 64-bit number."""


@dataclass(slots=True)
class _Connection:
    peer: object
    received: int
    read: int
    at: float
    unread: float = 0.0


class UnreadBytes:
    """What each connection of a port has sent beyond what was read."""

    def __init__(self, port: int, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.read: Counter[int] = Counter()
        """Bytes so far, by file descriptor."""
        self._port = port
        self._max_bytes = max_bytes
        self._connections: dict[int, _Connection] = {}
        self._read_before: Counter[int] = Counter()
        """`read` at the last look, for connections that are new."""
        self._looked_at = 0.0
        self._looked_resident = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unread-bytes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_WATCH_S):
            if self.is_due():
                try:
                    self.end_worst()
                except OSError as error:  # out of descriptors: the next look may have some
                    logger.warning("what peers sent and nobody read could not be counted: %s", error)

    def is_due(self) -> bool:
        try:
            with open(_STATM) as file:
                resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return False
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S and resident - self._looked_resident < _LOOK_BYTES:
            return False
        self._looked_at = now
        self._looked_resident = resident
        return True

    def end_worst(self) -> int:
        """Close connections, those with the most first, while all have more than `max_bytes`."""
        self._measure()
        total, ended = sum(each.unread for each in self._connections.values()), 0
        for fd, each in sorted(self._connections.items(), key=lambda item: -item[1].unread):
            if total <= self._max_bytes:
                break
            text = "closed the connection of %s: it sent %.0f MiB of a message that does not end"
            logger.warning(text, each.peer, each.unread / (1 << 20))
            with suppress(OSError), _socket_of(fd) as connection:  # closed already, or another's perhaps
                if connection.getpeername() == each.peer:
                    connection.shutdown(socket.SHUT_RDWR)
            total -= each.unread
            ended += 1
        return ended

    def end(self, fd: int, address: str, least_bytes: int) -> None:
        """Close the connection of `address`. A new one may have its descriptor: it has sent fewer bytes."""
        with suppress(OSError, AttributeError, struct.error), _socket_of(fd) as connection:
            is_it = connection.getpeername()[0] == address and connection.getsockname()[1] == self._port
            if is_it and _received_bytes(connection) >= least_bytes:
                connection.shutdown(socket.SHUT_RDWR)

    def _measure(self) -> None:
        now, former = time.monotonic(), self._connections
        accepted = list(self._accepted())  # may raise: the next look counts from the same state
        self._connections = {}
        for fd, peer, received in accepted:
            read, last = self.read[fd], former.get(fd)
            if last is None or last.peer != peer:
                last = _Connection(peer, 0, self._read_before[fd], now)
            sent = received - last.received - (read - last.read) - _FREE_BYTES_PER_S * (now - last.at)
            self._connections[fd] = _Connection(peer, received, read, now, max(0.0, last.unread + sent))
        self._read_before = self.read.copy()

    def _accepted(self) -> Iterator[tuple[int, object, int]]:
        """Yield (descriptor, peer, received bytes) of each connection of the port."""
        for name in os.listdir(_FDS):
            try:
                with _socket_of(int(name)) as connection:
                    if connection.getsockname()[1] == self._port:
                        yield int(name), connection.getpeername(), _received_bytes(connection)
            except (OSError, IndexError, struct.error):
                continue  # no socket of this port, or closed meanwhile


def _received_bytes(connection: socket.socket) -> int:
    """Raises OSError or struct.error where the kernel does not say."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    return struct.unpack_from("<Q", info, _BYTES_RECEIVED_AT)[0]


@contextmanager
def _socket_of(fd: int) -> Iterator[socket.socket]:
    """Look at the socket behind `fd`, which is not copied: closing a copy would end this process's file locks (POSIX).

    Raises OSError when there is none.
    """
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()
