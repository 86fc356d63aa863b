"""Brings versions of the weights to this node's disk, by the way with the fewest bytes to pull.

    anchor, pulled once --patch--> any version of it          a node that followed, joined or fell behind
    anchor in use --patch--> the next anchor, made here       a node that has the anchor before

    pull --pieces--> one file a chunk, hashed as it grows --> Snapshot (snapshot.py)

The versions in use and under way are on the disk, in the folder for temporary files (TMPDIR) unless another one keeps
them, in chunks that they may share.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from composer_prime.errors import CorruptWeightsError
from composer_prime.run.scratch import Scratch
from composer_prime.run.weight_patches import WORDS, Patch, patches
from composer_prime.run.weights import ChunkRef, Manifest, WeightStore
from inference.snapshot import Snapshot, open_snapshot

logger = logging.getLogger(__name__)

CHUNK_TIMEOUT_S = 30.0
"""How long a node waits for one piece of a weight chunk (a few MB) before it retries."""
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


class ChunkFolder:
    """The chunks that this node has pulled, whole or in part, in a private folder.

    A part is in NAME.part until it is whole, so that what a killed process left is known for what it is.
    """

    def __init__(self, kept: Path | None = None) -> None:
        """`kept`: a folder that outlasts this process; what is there is hashed and used. None: one that does not."""
        self._scratch: Scratch | None = None
        if kept is None:
            self._scratch = Scratch("weights")
            kept = self._scratch.path
        self.path = kept
        self._pulled: dict[str, tuple[int, hashlib._Hash]] = {}
        """Bytes on the disk, and their hash so far."""
        self._lock = threading.Lock()
        self._take_over()

    def _take_over(self) -> None:
        """Learn what an earlier process pulled here. Files that are not what their name says are removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.path.iterdir()):  # NAME before NAME.part
            if path.stem in self._pulled:
                path.unlink()
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, hashlib.sha256)
            size, is_whole = path.stat().st_size, digest.hexdigest() == path.stem
            if is_whole:
                path.replace(self.path / path.stem)  # Its process was killed just before that.
            if is_whole or path.suffix == ".part":
                self._pulled[path.stem] = size, digest
            else:
                path.unlink()

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def path_of(self, ref: ChunkRef) -> Path:
        return self.path / ref.sha256

    def size(self, sha256: str) -> int:
        """Return how many bytes of a chunk are here."""
        return self._pulled[sha256][0] if sha256 in self._pulled else 0

    def has(self, ref: ChunkRef) -> bool:
        return self.size(ref.sha256) == ref.size

    def missing_bytes(self, refs: Iterable[ChunkRef]) -> int:
        """Return how many bytes are still to pull."""
        return sum(size - self.size(sha256) for sha256, size in {ref.sha256: ref.size for ref in refs}.items())

    def append(self, what: str, ref: ChunkRef, offset: int, piece: bytes) -> None:
        """Add the bytes of a chunk from `offset`; does nothing when they are here, as after a cancelled pull.

        `what` it belongs to. Raises CorruptWeightsError, and drops the chunk, when they cannot be its; OSError when the
        disk is full.
        """
        with self._lock:
            if self.size(ref.sha256) == offset:
                self._append(what, ref, piece)

    def _append(self, what: str, ref: ChunkRef, piece: bytes) -> None:
        size, digest = self._pulled.get(ref.sha256) or (0, hashlib.sha256())
        received = size + len(piece)
        if not piece or received > ref.size:
            self._drop([ref.sha256])
            raise CorruptWeightsError(
                f"{what}: chunk {ref.sha256} has {received} bytes{' or more' if piece else ''}, the manifest says "
                f"{ref.size}"
            )
        digest.update(piece)
        if received == ref.size and digest.hexdigest() != ref.sha256:
            self._drop([ref.sha256])
            raise CorruptWeightsError(f"{what}: chunk {ref.sha256} differs from its hash")
        part = self.path / f"{ref.sha256}.part"
        try:
            with part.open("ab" if size else "wb") as file:
                file.write(piece)
            if received == ref.size:
                part.replace(self.path_of(ref))
        except OSError as error:
            self._drop([ref.sha256])
            raise OSError(
                error.errno,
                f"chunk {ref.sha256} of {what} cannot be kept in {self.path}: {error.strerror}; give this node room "
                "for two versions, or set TMPDIR to a larger disk",
            ) from error
        self._pulled[ref.sha256] = received, digest

    def read(self, ref: ChunkRef, what: str) -> bytes:
        """Return a whole chunk. Raises CorruptWeightsError, with `what` it belongs to, when it is gone or changed."""
        try:
            data = self.path_of(ref).read_bytes()
        except OSError as error:
            raise CorruptWeightsError(f"{what} cannot be read from {self.path}: {error}") from None
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptWeightsError(f"{what}: chunk {ref.sha256} was changed in {self.path}")
        return data

    def keep_only(self, refs: Iterable[ChunkRef]) -> None:
        with self._lock:
            self._drop(self._pulled.keys() - {ref.sha256 for ref in refs})

    def drop_damaged(self, refs: Iterable[ChunkRef]) -> None:
        """Drop the chunks whose files are no longer what was pulled."""
        damaged = []
        for ref in {ref.sha256: ref for ref in refs}.values():
            if self.has(ref):
                try:
                    with self.path_of(ref).open("rb") as file:
                        intact = hashlib.file_digest(file, "sha256").hexdigest() == ref.sha256
                except OSError:
                    intact = False
                damaged += [] if intact else [ref.sha256]
        with self._lock:
            self._drop(damaged)

    def _drop(self, sha256s: Iterable[str]) -> None:
        """Forget chunks and remove their files. The caller holds the lock: a pull may still append in a thread."""
        for sha256 in sha256s:
            self._pulled.pop(sha256, None)
            for name in (sha256, f"{sha256}.part"):
                (self.path / name).unlink(missing_ok=True)


class VersionFolder:
    """The versions on this node's disk. Used by one task at a time."""

    def __init__(self, source: ChunkSource, model_folder: Path, *, kept: Path | None = None) -> None:
        """`kept`: where chunks outlast this process, so that the next one pulls only what it lacks."""
        self._source = source
        self._model_folder = model_folder
        self.chunks = ChunkFolder(kept)
        self._in_use: Manifest | None = None
        self.bytes_pulled = 0

    def close(self) -> None:
        self.chunks.close()

    def settle(self, manifest: Manifest) -> None:
        """Take `manifest` for the version in use; drop all else."""
        self._in_use = manifest
        self.chunks.keep_only(manifest.files)

    def drop_damaged(self, manifest: Manifest) -> None:
        """Drop the files of a version that are no longer what was pulled or made."""
        self.chunks.drop_damaged(manifest.files)

    async def fetch(self, manifest: Manifest) -> Snapshot:
        """Bring a version to the disk, with every hash checked; what is there stays, and so does the version in use.

        What is damaged there is dropped when that is noticed, and pulled by the next call.
        Raises CorruptWeightsError, MisfitError, OSError (no room on the disk), or what the source raises.
        """
        if manifest.kind not in ("anchor", "delta", "adapters") or (manifest.patch and manifest.dtype not in WORDS):
            raise CorruptWeightsError(
                f"weights v{manifest.version} are of kind {manifest.kind!r} and type {manifest.dtype!r}, this release "
                f"knows anchors, deltas and adapters, and patches of {', '.join(WORDS)}; use one release everywhere"
            )
        what, used = f"weights v{manifest.version}", self._in_use
        self.chunks.keep_only([*manifest.refs, *(used.files if used else [])])
        if self._follows(manifest):
            try:
                await self.pull(what, manifest.patch)
                await asyncio.to_thread(self._make_anchor, manifest)
            except CorruptWeightsError as error:
                logger.warning("%s are pulled whole: %s", what, error)
        # The patch first: it is gone from the store before its anchor.
        await self.pull(what, [*manifest.files[len(manifest.chunks) :], *manifest.chunks])
        try:
            return await asyncio.to_thread(self._open, manifest)
        except CorruptWeightsError:
            await asyncio.to_thread(self.drop_damaged, manifest)
            raise

    async def pull(self, what: str, refs: Iterable[ChunkRef]) -> None:
        """Pull the chunks that are not here. Equal ones, such as zeros, are one and come once.

        `what` they belong to. Raises as `fetch` does.
        """
        gate = asyncio.Semaphore(_CHUNKS_AT_ONCE)
        unique = {ref.sha256: ref for ref in refs}
        pulls = [asyncio.ensure_future(self._pull(what, ref, gate)) for ref in unique.values()]
        try:
            await asyncio.gather(*pulls)
        except BaseException:
            for pull in pulls:
                pull.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)
            raise

    async def _pull(self, what: str, ref: ChunkRef, gate: asyncio.Semaphore) -> None:
        """Pull one chunk. When the source fails, what arrived stays and the next attempt continues there."""
        async with gate:
            while (have := self.chunks.size(ref.sha256)) < ref.size:
                piece = await self._source.read(ref.sha256, have)
                if piece is None:
                    raise CorruptWeightsError(
                        f"{what}: the source has no chunk {ref.sha256}; it may have been pruned for a newer version"
                    )
                self.bytes_pulled += len(piece)
                try:
                    await self._keep(what, ref, have, piece)
                except CorruptWeightsError:
                    if not self._source.refuse(ref.sha256):
                        raise

    async def _keep(self, what: str, ref: ChunkRef, offset: int, piece: bytes) -> None:
        """Write a piece that came, to its end: a pull that is cancelled as another chunk fails must not lose it."""
        writing = asyncio.ensure_future(asyncio.to_thread(self.chunks.append, what, ref, offset, piece))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.gather(writing, return_exceptions=True)
            raise

    def _follows(self, manifest: Manifest) -> bool:
        """Tell whether the version in use has the anchor from which a patch leads to the new one, in fewer bytes."""
        used = self._in_use
        if used is None or manifest.kind != "anchor" or not manifest.base or manifest.base != used.chunks:
            return False
        if len(manifest.base) != len(manifest.chunks):
            return False
        return self.chunks.missing_bytes(manifest.patch) < self.chunks.missing_bytes(manifest.chunks)

    def _make_anchor(self, manifest: Manifest) -> None:
        """Make an anchor's chunks from those of the anchor before. Raises CorruptWeightsError where they differ."""
        what = f"weights v{manifest.version}"
        for old, new, patch in zip(manifest.base, manifest.chunks, self._patches(manifest), strict=True):
            if not self.chunks.has(new):
                data = bytearray(self.chunks.read(old, what))
                patch.apply(data)
                have = self.chunks.size(new.sha256)
                self.chunks.append(what, new, have, bytes(data[have:]))

    def _open(self, manifest: Manifest) -> Snapshot:
        if manifest.kind == "delta":
            for _ in self._patches(manifest):  # Damage shows before a swap begins.
                pass
        return open_snapshot(manifest, self.chunks.path_of, self._model_folder)

    def _patches(self, manifest: Manifest) -> Iterator[Patch]:
        sizes = [ref.size for ref in manifest.base or manifest.chunks]
        stream = (self.chunks.read(ref, "a patch") for ref in manifest.patch)
        yield from patches(stream, sizes, WORDS[manifest.dtype])
