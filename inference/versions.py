"""Brings versions of the weights to this node's disk, by the way with the fewest bytes to pull.

    anchor, pulled once --patch--> any version of it          a node that followed, joined or fell behind
    anchor in use --patch--> the next anchor, made here       a node that has the anchor before

    pull --pieces--> a chunk in memory, hashed --> its file --> Snapshot (snapshot.py)

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
"""How long a node waits for one piece of a weight chunk (1 or 2 MiB) before it retries."""
PIECE_BYTES = 1 << 20
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
    """The whole chunks that this node has, one file each, in a private folder."""

    def __init__(self, kept: Path | None = None) -> None:
        """`kept`: a folder that outlasts this process; what is there is hashed and used. None: one that does not."""
        self._scratch: Scratch | None = None
        if kept is None:
            self._scratch = Scratch("weights")
            kept = self._scratch.path
        self.path = kept
        self._lock = threading.Lock()
        self.path.mkdir(parents=True, exist_ok=True)
        self._held = {path.name for path in self.path.iterdir() if path.is_file() and self._is_intact(path.name)}
        for path in self.path.iterdir():
            if path.name not in self._held:
                path.unlink()

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def path_of(self, ref: ChunkRef) -> Path:
        return self.path / ref.sha256

    def has(self, ref: ChunkRef) -> bool:
        return ref.sha256 in self._held

    def _is_intact(self, sha256: str) -> bool:
        try:
            with (self.path / sha256).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256
        except OSError:
            return False

    def write(self, what: str, ref: ChunkRef, data: bytes | bytearray) -> None:
        """Keep a chunk.

        `what` it belongs to. Raises CorruptWeightsError when these are not its bytes, OSError when the disk is full.
        """
        if len(data) != ref.size:
            raise CorruptWeightsError(f"{what}: chunk {ref.sha256} has {len(data)} bytes, the manifest says {ref.size}")
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptWeightsError(f"{what}: chunk {ref.sha256} differs from its hash")
        part = self.path / f"{ref.sha256}.part"  # A killed process leaves no half of a chunk under its name.
        with self._lock:
            try:
                part.write_bytes(data)
                part.replace(self.path_of(ref))
            except OSError as error:
                part.unlink(missing_ok=True)
                raise OSError(
                    error.errno,
                    f"chunk {ref.sha256} of {what} cannot be kept in {self.path}: {error.strerror}; give this node "
                    "room for two versions, or set TMPDIR or --state-dir to a larger disk",
                ) from error
            self._held.add(ref.sha256)

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
        self._drop(self._held - {ref.sha256 for ref in refs})

    def drop_damaged(self, refs: Iterable[ChunkRef]) -> None:
        """Drop the chunks whose files are no longer what was pulled."""
        held = {ref.sha256 for ref in refs} & self._held
        self._drop({sha256 for sha256 in held if not self._is_intact(sha256)})

    def _drop(self, sha256s: set[str]) -> None:
        with self._lock:
            self._held -= sha256s
            for sha256 in sha256s:
                (self.path / sha256).unlink(missing_ok=True)


class VersionFolder:
    """The versions on this node's disk. Used by one task at a time."""

    def __init__(self, source: ChunkSource, model_folder: Path, *, kept: Path | None = None) -> None:
        """`kept`: where chunks outlast this process, so that the next one pulls only what it lacks."""
        self._source = source
        self._model_folder = model_folder
        self.chunks = ChunkFolder(kept)
        self._begun: dict[str, bytearray] = {}
        """What came of chunks that are not whole: a pull that was cut goes on there."""
        self._in_use: Manifest | None = None
        self.bytes_pulled = 0

    def close(self) -> None:
        self.chunks.close()

    def settle(self, manifest: Manifest) -> None:
        """Take `manifest` for the version in use; drop all else."""
        self._in_use = manifest
        self.chunks.keep_only(manifest.files)
        self._begun.clear()

    def missing_bytes(self, refs: Iterable[ChunkRef]) -> int:
        """Return how many bytes are still to pull."""
        missing = {ref.sha256: ref.size for ref in refs if not self.chunks.has(ref)}
        return sum(size - len(self._begun.get(sha256, b"")) for sha256, size in missing.items())

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
        wanted = [*manifest.refs, *(used.files if used else [])]
        self.chunks.keep_only(wanted)
        for sha256 in self._begun.keys() - {ref.sha256 for ref in wanted}:
            del self._begun[sha256]
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
        """Pull one chunk. When the source fails, what came stays and the next attempt continues there."""
        async with gate:
            while not self.chunks.has(ref):
                data = self._begun.setdefault(ref.sha256, bytearray())
                while len(data) < ref.size:
                    piece = await self._source.read(ref.sha256, len(data))
                    if piece is None:
                        raise CorruptWeightsError(
                            f"{what}: the source has no chunk {ref.sha256}; it may have been pruned for a newer version"
                        )
                    self.bytes_pulled += len(piece)
                    data += piece
                    if not piece:
                        break
                try:
                    await asyncio.to_thread(self.chunks.write, what, ref, data)
                except CorruptWeightsError:
                    data.clear()
                    if not self._source.refuse(ref.sha256):
                        raise
            self._begun.pop(ref.sha256, None)

    def _follows(self, manifest: Manifest) -> bool:
        """Tell whether the version in use has the anchor from which a patch leads to the new one, in fewer bytes."""
        used = self._in_use
        if used is None or manifest.kind != "anchor" or not manifest.base or manifest.base != used.chunks:
            return False
        if len(manifest.base) != len(manifest.chunks):
            return False
        return self.missing_bytes(manifest.patch) < self.missing_bytes(manifest.chunks)

    def _make_anchor(self, manifest: Manifest) -> None:
        """Make an anchor's chunks from those of the anchor before. Raises CorruptWeightsError where they differ."""
        what = f"weights v{manifest.version}"
        for old, new, patch in zip(manifest.base, manifest.chunks, self._patches(manifest), strict=True):
            if not self.chunks.has(new):
                data = bytearray(self.chunks.read(old, what))
                patch.apply(data)
                self.chunks.write(what, new, data)

    def _open(self, manifest: Manifest) -> Snapshot:
        if manifest.kind == "delta":
            for _ in self._patches(manifest):  # Damage shows before a swap begins.
                pass
        return open_snapshot(manifest, self.chunks.path_of, self._model_folder)

    def _patches(self, manifest: Manifest) -> Iterator[Patch]:
        sizes = [ref.size for ref in manifest.base or manifest.chunks]
        stream = (self.chunks.read(ref, "a patch") for ref in manifest.patch)
        yield from patches(stream, sizes, WORDS[manifest.dtype])
