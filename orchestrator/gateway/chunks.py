"""Weight chunks over the node link: nodes pull, piece by piece, from whatever offset they stopped at.

    ChunkRequest --> wait for one of 4 readers --> read a piece in a thread --> Chunk | ChunkMissing

Reading happens off the event loop, so a node that fetches gigabytes does not delay anyone's tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from composer_prime.weights.store import WeightStore
from composer_prime.wire.node import Chunk, ChunkMissing, ChunkRequest, ToNode

logger = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
_MAX_OFFSET = 1 << 40
_READERS = 4
_MAX_PENDING = 64
"""Requests of one connection that may wait; more are dropped (a node asks again after its own deadline)."""


class ChunkServer:
    def __init__(self, store: WeightStore) -> None:
        self.bytes_sent = 0
        self.dropped = 0
        self._store = store
        self._readers = asyncio.Semaphore(_READERS)
        self._pending: Counter[bytes] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, identity: bytes, request: ChunkRequest, send: Callable[[bytes, ToNode], bool]) -> None:
        """Answer `request` as soon as a reader is free."""
        if self._pending[identity] >= _MAX_PENDING:
            self.dropped += 1
            return
        self._pending[identity] += 1
        task = asyncio.create_task(self._answer(identity, request, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, identity: bytes, request: ChunkRequest, send: Callable[[bytes, ToNode], bool]) -> None:
        try:
            async with self._readers:
                message = await asyncio.to_thread(self._read, request)
                if send(identity, message) and isinstance(message, Chunk):
                    self.bytes_sent += len(message.data)
        finally:
            self._pending[identity] -= 1
            if not self._pending[identity]:
                del self._pending[identity]

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
