"""Where a node gets weight chunks from: any source will do, since every byte is checked against the signed manifest."""

from __future__ import annotations

import asyncio
from typing import Protocol

from composer_prime.weights.store import WeightStore

PIECE_BYTES = 4 << 20


class ChunkSource(Protocol):
    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Some bytes of a chunk from `offset` on: b"" at its end, None when the source has no such chunk.

        Raises DeadlineError or OSError when the source cannot be reached.
        """
        ...


class FolderSource:
    """The run's weight store, where it is on this machine or on a shared disk."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def read(self, sha256: str, offset: int) -> bytes | None:
        return await asyncio.to_thread(self._store.chunk, sha256, offset, PIECE_BYTES)


class FirstOf:
    """Asks each source in turn until one has the chunk."""

    def __init__(self, *sources: ChunkSource) -> None:
        self._sources = sources

    async def read(self, sha256: str, offset: int) -> bytes | None:
        for source in self._sources:
            piece = await source.read(sha256, offset)
            if piece is not None:
                return piece
        return None
