"""Weight chunks over the node link: nodes pull, piece by piece, from whatever offset they stopped at.

    ChunkRequest --> wait for one of 4 readers --> read a piece in a thread --> Chunk | ChunkMissing

Reading happens off the event loop, so a node that fetches gigabytes does not delay anyone's tokens. A piece counts
against its connection until its last byte has left the socket's queue: whoever asks faster than it reads costs this
process 16 pieces (32 MiB), not the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from composer_prime.weights.store import WeightStore
from composer_prime.wire.node import Chunk, ChunkMissing, ChunkRequest, ToNode

logger = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
_MAX_OFFSET = 1 << 40
_READERS = 4
_MAX_UNSENT = 16
"""Pieces under way to one connection; requests beyond are dropped (a node asks again after its own deadline)."""
_MAX_CONNECTIONS = 1024
"""Connections remembered before those without a piece under way are forgotten."""

Piece = tuple[str, int]
"""sha256 of the chunk and offset in it."""
Send = Callable[[bytes, ToNode], zmq.MessageTracker | None]
"""Queues a message for a connection and tells when it has left; None when the connection is gone."""


class ChunkServer:
    def __init__(self, store: WeightStore) -> None:
        self.bytes_sent = 0
        """Bytes of pieces handed to the socket."""
        self.dropped = 0
        """Requests of connections that had too many pieces under way."""
        self._store = store
        self._readers = asyncio.Semaphore(_READERS)
        self._unsent: dict[bytes, dict[Piece, zmq.MessageTracker | None]] = {}
        """Pieces under way to each connection; None while one is being read."""
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, identity: bytes, request: ChunkRequest, send: Send) -> None:
        """Answer `request` as soon as a reader is free; nothing is done while its answer is under way already."""
        pieces, piece = self._still_unsent(identity), (request.sha256, request.offset)
        if piece in pieces:
            return
        if len(pieces) >= _MAX_UNSENT:
            self.dropped += 1
            return
        pieces[piece] = None
        task = asyncio.create_task(self._answer(identity, request, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _still_unsent(self, identity: bytes) -> dict[Piece, zmq.MessageTracker | None]:
        if len(self._unsent) >= _MAX_CONNECTIONS:
            self._unsent = {known: left for known, pieces in self._unsent.items() if (left := _under_way(pieces))}
        self._unsent[identity] = _under_way(self._unsent.get(identity, {}))
        return self._unsent[identity]

    async def _answer(self, identity: bytes, request: ChunkRequest, send: Send) -> None:
        sent = None
        try:
            async with self._readers:
                message = await asyncio.to_thread(self._read, request)
                sent = send(identity, message)
            if sent is not None and isinstance(message, Chunk):
                self.bytes_sent += len(message.data)
        finally:
            pieces, piece = self._unsent[identity], (request.sha256, request.offset)
            if sent is None:
                del pieces[piece]
            else:
                pieces[piece] = sent

    def _read(self, request: ChunkRequest) -> Chunk | ChunkMissing:
        piece = None
        if 0 <= request.offset < _MAX_OFFSET:
            try:
                # One byte more than is sent tells whether this piece is the chunk's last.
                piece = self._store.chunk(request.sha256, request.offset, PIECE_BYTES + 1)
            except OSError as error:
                logger.error("weight chunk %s cannot be read: %s", request.sha256, error)
        if piece is None:
            return ChunkMissing(sha256=request.sha256)
        last = len(piece) <= PIECE_BYTES
        return Chunk(sha256=request.sha256, offset=request.offset, data=piece[:PIECE_BYTES], last=last)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _under_way(pieces: dict[Piece, zmq.MessageTracker | None]) -> dict[Piece, zmq.MessageTracker | None]:
    return {piece: sent for piece, sent in pieces.items() if sent is None or not sent.done}
