"""Brings versions of the weights to this node's disk, by the way with the fewest bytes to pull.

    the version in use --deltas--> the next one            a node that followed each version
    anchor, pulled once --overlay--> any version of it     a node that joined or fell behind, or whose delta did not fit

Whatever the way, what comes out is the same file: its patches have the hash that the signed manifest gives. Where the
deltas lead to a new anchor, its chunks are made here from the old ones, and have the hashes of that anchor.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from msgspec.structs import replace

from composer_prime.errors import CorruptWeightsError, WeightError
from composer_prime.run.patches import WORDS, Patch, patches, stream_entry
from composer_prime.run.weights import ChunkRef, Delta, Manifest, WeightStore, safetensors_header
from inference.snapshot import ChunkFolder, Snapshot, folder_snapshot

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Asked of HTTP hosts, buckets and folders; the gateway sends smaller ones."""
_CHUNKS_AT_ONCE = 4


class ChunkSource(Protocol):
    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Return some bytes of a chunk from `offset` on: b"" at its end, None when the source has no such chunk.

        Raises DeadlineError or OSError when the source cannot be reached.
        """
        ...

    def refuse(self, sha256: str) -> bool:
        """Note that the chunk which was read is wrong. Return whether to read it again, from elsewhere."""
        return False


class FolderSource(ChunkSource):
    """The run's weight store, on this machine or a shared disk."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def read(self, sha256: str, offset: int) -> bytes | None:
        return await asyncio.to_thread(self._store.chunk, sha256, offset, PIECE_BYTES)


class VersionFolder:
    """The versions on this node's disk. Used by one task at a time."""

    def __init__(
        self, source: ChunkSource, model_folder: Path, *, relays: bool = False, kept: Path | None = None
    ) -> None:
        """`relays`: keep what other nodes may ask for: all chunks that were pulled for the version in use.

        `kept`: where chunks outlast this process, so that the next one pulls only what it lacks.
        """
        self._source = source
        self._model_folder = model_folder
        self._relays = relays
        self.chunks = ChunkFolder(kept)
        self._overlays: dict[str, ChunkRef] = {}
        """The overlay of a version as one file of this disk, by the version's state."""
        self._in_use: Manifest | None = None
        self._may_be_model = True
        """Whether an anchor may be the model folder's own tensors."""
        self.bytes_pulled = 0

    def close(self) -> None:
        self.chunks.close()

    def settle(self, manifest: Manifest) -> None:
        """Take `manifest` for the version in use; drop all else."""
        self._in_use = manifest
        self._keep([manifest])
        relayed = manifest.refs if self._relays else []
        self.chunks.keep_only(ref.sha256 for ref in [*self._files(manifest), *relayed])

    def drop_damaged(self, manifest: Manifest) -> None:
        """Drop the files of a version that are no longer what was pulled or made."""
        self.chunks.drop_damaged(replace(manifest, overlay=[*manifest.overlay, *self._files(manifest)]))

    async def fetch(self, manifest: Manifest) -> Snapshot:
        """Bring a version to the disk, with every hash checked; what is there stays, and so does the version in use.

        What is damaged there is dropped when that is noticed, and pulled by the next call.
        Raises CorruptWeightsError, MisfitError, OSError (no room on the disk), or what the source raises.
        """
        if manifest.dtype not in WORDS and (manifest.kind == "delta" or manifest.deltas):
            raise CorruptWeightsError(
                f"weights v{manifest.version} are deltas of type {manifest.dtype!r}, this release knows "
                f"{', '.join(WORDS)}; use one release everywhere"
            )
        used = [self._in_use] if self._in_use is not None else []
        self._keep([manifest, *used])
        held = [*manifest.refs, *(ref for each in [manifest, *used] for ref in self._files(each))]
        self.chunks.keep_only(ref.sha256 for ref in held)
        chain = self._chain(manifest)
        if chain and not self._is_here(manifest):
            try:
                await self._pull_all(manifest, (ref for delta in chain for ref in delta.chunks))
                await asyncio.to_thread(self._follow, manifest, chain)
            except CorruptWeightsError as error:
                logger.warning("weights v%d are pulled from their anchor: %s", manifest.version, error)
        if self._may_be_model and not any(map(self.chunks.has, manifest.chunks)):
            await asyncio.to_thread(self._make_from_model, manifest)
        if not self._is_here(manifest):  # the overlay first: it is gone from the store before its anchor
            overlay = [] if manifest.state in self._overlays else manifest.overlay
            await self._pull_all(manifest, [*overlay, *manifest.chunks])
        try:
            return await asyncio.to_thread(self._snapshot, manifest)
        except CorruptWeightsError:
            await asyncio.to_thread(self.drop_damaged, manifest)
            raise

    # -- the choice of the way -------------------------------------------------------------------------------------

    def _chain(self, manifest: Manifest) -> list[Delta]:
        """Return the deltas from the version in use, unless the anchor's way pulls less."""
        used = self._in_use
        if used is None or used.kind == "adapters" or used.dtype != manifest.dtype:
            return []
        starts = [index for index, delta in enumerate(manifest.deltas) if delta.base == used.state]
        if not starts:
            return []
        chain = manifest.deltas[starts[-1] :]
        refs = [ref for delta in chain for ref in delta.chunks]
        whole = self.chunks.missing_bytes([*manifest.chunks, *manifest.overlay])
        return chain if self.chunks.missing_bytes(refs) < whole else []

    def _is_here(self, manifest: Manifest) -> bool:
        return all(self.chunks.has(ref) for ref in manifest.chunks) and (
            manifest.kind != "delta" or manifest.state in self._overlays
        )

    def _keep(self, manifests: list[Manifest]) -> None:
        """Forget the overlays of other versions, and those whose file was dropped."""
        states = {manifest.state for manifest in manifests}
        self._overlays = {
            state: ref for state, ref in self._overlays.items() if state in states and self.chunks.has(ref)
        }

    def _files(self, manifest: Manifest) -> list[ChunkRef]:
        """Return the files that the version's tensors are read from."""
        overlay = self._overlays.get(manifest.state)
        return [*manifest.chunks, *([overlay] if overlay is not None else [])]

    # -- pull ------------------------------------------------------------------------------------------------------

    async def _pull_all(self, manifest: Manifest, refs: Iterable[ChunkRef]) -> None:
        """Pull chunks, each once, however often it is named: equal chunks, such as zeros, are one."""
        gate = asyncio.Semaphore(_CHUNKS_AT_ONCE)
        unique = {ref.sha256: ref for ref in refs}
        pulls = [asyncio.ensure_future(self._pull(manifest, ref, gate)) for ref in unique.values()]
        try:
            await asyncio.gather(*pulls)
        except BaseException:
            for pull in pulls:
                pull.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)
            raise

    async def _pull(self, manifest: Manifest, ref: ChunkRef, gate: asyncio.Semaphore) -> None:
        """Pull one chunk. When the source fails, what arrived stays and the next attempt continues there."""
        async with gate:
            while (have := self.chunks.size(ref.sha256)) < ref.size:
                piece = await self._source.read(ref.sha256, have)
                if piece is None:
                    raise CorruptWeightsError(
                        f"weights v{manifest.version}: the source has no chunk {ref.sha256}; it may have been pruned "
                        "for a newer version"
                    )
                self.bytes_pulled += len(piece)
                try:
                    await asyncio.to_thread(self.chunks.append, manifest, ref, have, piece)
                except CorruptWeightsError:
                    if not self._source.refuse(ref.sha256):
                        raise

    # -- patches ---------------------------------------------------------------------------------------------------

    def _snapshot(self, manifest: Manifest) -> Snapshot:
        if manifest.kind != "delta":
            return self.chunks.snapshot(manifest, self._model_folder)
        if manifest.state not in self._overlays:
            self._write_overlay(manifest, [manifest.overlay])
        return self.chunks.snapshot(replace(manifest, overlay=[self._overlays[manifest.state]]), self._model_folder)

    def _follow(self, manifest: Manifest, chain: list[Delta]) -> None:
        """Make a version's files from those of the version in use. Raises CorruptWeightsError where they differ."""
        used = self._in_use
        assert used is not None
        streams = [[self._overlays[used.state]]] if used.state in self._overlays else []
        if used.chunks == manifest.chunks:
            self._write_overlay(manifest, [*streams, *(delta.chunks for delta in chain)])
            return
        anchor = manifest.version if manifest.parent is None else manifest.parent
        to_anchor = [delta.chunks for delta in chain if delta.version <= anchor]
        summed = self._summed(manifest, used.chunks, [*streams, *to_anchor])
        for old, new, patch in zip(used.chunks, manifest.chunks, summed, strict=True):
            if not self.chunks.has(new):
                data = bytearray(b"".join(self.chunks.pieces(old, f"weights v{used.version}")))
                patch.apply(data)
                if hashlib.sha256(data).hexdigest() != new.sha256:
                    raise CorruptWeightsError(f"the deltas do not lead to chunk {new.sha256}")
                self.chunks.put(manifest, [data])
        if manifest.kind == "delta":
            self._write_overlay(manifest, [delta.chunks for delta in chain if delta.version > anchor])

    def _make_from_model(self, manifest: Manifest) -> None:
        """Make an anchor's chunks from the model folder, up to the first that differs.

        Version 0 is that folder, so what differs from it needs no snapshot. After one that differed, none is tried.
        """
        self._may_be_model = False
        try:
            folder = folder_snapshot(self._model_folder)
            if manifest.dtype not in WORDS or not folder.keys() >= manifest.tensors.keys():
                return
            pending, refs = bytearray(), iter(manifest.chunks)
            ref = next(refs, None)
            for part in _file_of(folder, manifest):
                pending += part
                while ref is not None and len(pending) >= ref.size:
                    if hashlib.sha256(pending[: ref.size]).hexdigest() != ref.sha256:
                        return
                    self.chunks.put(manifest, [pending[: ref.size]])
                    del pending[: ref.size]
                    ref = next(refs, None)
        except WeightError as error:  # No safetensors files, or damaged ones: pull.
            logger.info("the model folder does not help with weights v%d: %s", manifest.version, error)
            return
        self._may_be_model = True

    def _write_overlay(self, manifest: Manifest, streams: list[list[ChunkRef]]) -> None:
        """Add up streams of patches from the anchor on. Raises CorruptWeightsError where the manifest differs."""
        digest = hashlib.sha256()

        def packed() -> Iterator[bytes]:
            for encoded in map(Patch.encode, self._summed(manifest, manifest.chunks, streams)):
                digest.update(encoded)
                yield stream_entry(encoded)
            if digest.hexdigest() != manifest.overlay_sha256:
                raise CorruptWeightsError(
                    f"weights v{manifest.version}: the patches have the hash {digest.hexdigest()}, the manifest says "
                    f"{manifest.overlay_sha256}"
                )

        self._overlays[manifest.state] = self.chunks.put(manifest, packed())

    def _summed(self, manifest: Manifest, chunks: list[ChunkRef], streams: list[list[ChunkRef]]) -> Iterator[Patch]:
        """Yield the sum of all streams' patches for each of `chunks`. It holds none: one may take 30 MiB."""
        sizes, word = [ref.size for ref in chunks], WORDS[manifest.dtype]
        name = f"a patch of weights v{manifest.version}"
        read = [
            patches((piece for ref in stream for piece in self.chunks.pieces(ref, name)), sizes, word)
            for stream in streams or [[]]
        ]
        yield from map(_sum, *read)
        for rest in read:
            next(rest, None)  # Raises where a stream goes on after its last patch.


def _sum(first: Patch, *others: Patch) -> Patch:
    return sum(others, first)


def _file_of(tensors: Snapshot, manifest: Manifest) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file that the trainer would write of `tensors`, in the manifest's order and type."""
    dtype = getattr(torch, manifest.dtype)
    yield safetensors_header(
        (name, manifest.dtype, tensors.shapes[name], math.prod(tensors.shapes[name]) * dtype.itemsize)
        for name in manifest.tensors
    )
    for name in manifest.tensors:
        for _, block in tensors.blocks(name):
            yield block.to(dtype).view(torch.uint8).numpy().data
