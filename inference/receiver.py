"""From a signed manifest to weights in use: pull, verify, swap, prove.

    manifest -> signature -> chunks to the disk (resumed where they stopped), each hashed -> names, shapes
             -> engine.load_weights, tensor by tensor -> read back, canary -> good: keep | bad: load the old ones again

    anchor, pulled once --patch--> any version of it          a node that followed, joined or fell behind
    anchor in use --patch--> the next anchor, made here       a node that has the anchor before

Names and shapes are compared with the model in use before anything changes (MisfitError). After any failure the engine
keeps the weights it had, or the node ends. A node that starts with the manifest's version on its disk checks signature
and canary alone. While a swap is unproven, `settled` is unset: the node waits for it, then looks at `rollbacks`, before
it sends tokens. No source of chunks is trusted: every byte is checked against the signed manifest before it is loaded.

A swap is proven twice: by the checksums of what the engine reads back, and by the canary's logprobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.errors import CanaryError, ComposerError, CorruptWeightsError, LostWeightsError, MisfitError
from composer_prime.run.scratch import Scratch
from composer_prime.run.weights import WORDS, ChunkRef, Manifest, Patch, WeightStore, open_signed, patches
from inference.engines.base import Engine, ReadBack
from inference.snapshot import Snapshot, folder_snapshot, open_snapshot, tensor_blocks, word_sum

logger = logging.getLogger(__name__)

CHUNK_TIMEOUT_S = 30.0
PIECE_BYTES = 1 << 20
_CHUNKS_AT_ONCE = 4


class Receiver:
    """Brings one engine to the versions that one run publishes. Used by one task at a time."""

    def __init__(
        self,
        engine: Engine,
        source: ChunkSource,
        model_folder: Path,
        canary_tolerance: float,
        *,
        kept: Path | None = None,
    ) -> None:
        """`engine` is started. `canary_tolerance` in nats. `kept`: as of VersionFolder."""
        self._engine = engine
        self._folder = model_folder
        self._tolerance = canary_tolerance
        self.versions = VersionFolder(source, model_folder, kept=kept)
        self._proven: Manifest | None = None
        self._good: Snapshot | None = None
        self.version = engine.version
        """The newest version that passed its canary; the node reports it."""
        self.installed: bytes | None = None
        """The signed manifest of that version."""
        self.canary_error: float | None = None
        self.rollbacks = 0
        self.settled = asyncio.Event()
        self.settled.set()

    def close(self) -> None:
        self.versions.close()

    async def install(self, signed: bytes, verify_key: bytes, run_id: str) -> None:
        """Bring the engine to the version of `signed`, unless it is in use already.

        Raises WireError, SignatureError, CorruptWeightsError, MisfitError (another model), CanaryError (rolled back),
        EngineError, OSError (no room on the disk), or what the source raises. After LostWeightsError the engine must
        not be used.
        """
        if signed == self.installed:
            return
        manifest = open_signed(signed, Ed25519PublicKey.from_public_bytes(verify_key), run_id=run_id)
        if self.installed is None and manifest.version == self._engine.version:
            with suppress(CanaryError):
                await self._score_canary(manifest)
                logger.info("weights v%d are those of %s: nothing to load", manifest.version, self._folder)
                self.installed, self._proven = signed, manifest
                return
        start = time.monotonic()
        tensors = await self.versions.fetch(manifest)
        pulled = time.monotonic()
        await self._swap(manifest, tensors)
        self.installed, self._proven, self._good, self.version = signed, manifest, tensors, manifest.version
        self.versions.settle(manifest)
        seconds = pulled - start, time.monotonic() - pulled
        logger.info("weights v%d in use: pulled in %.2f s, swapped and proven in %.2f s", self.version, *seconds)

    # -- swap ----------------------------------------------------------------------------------------------------

    async def _swap(self, manifest: Manifest, tensors: Snapshot) -> None:
        """Load new weights and prove them. Without a proof, load the old ones again and raise the error.

        Answers are held back from the first weight that changes on. Raises LostWeightsError, with `settled` unset for
        good, without old weights.
        """
        try:
            try:
                await self._engine.load_weights(manifest.version, tensors, self.settled.clear)
                await self._check_loaded(manifest, tensors)
                await self._score_canary(manifest)
            except MisfitError:
                raise
            except ComposerError as error:  # Also when an engine gives no scores, which proves nothing.
                self.settled.clear()
                await self._roll_back(manifest, error)
                raise
        except LostWeightsError:
            raise
        except BaseException:
            self.settled.set()
            raise
        self.settled.set()

    async def _roll_back(self, manifest: Manifest, error: ComposerError) -> None:
        """Load the old weights, and read back that they are.

        Requests that start until they are in use count as sampled from the refused ones. Raises LostWeightsError.
        """
        try:
            await asyncio.to_thread(self.versions.drop_damaged, manifest.files)
            if self._good is None or self._proven is None:
                await self._engine.load_weights(self.version, await asyncio.to_thread(folder_snapshot, self._folder))
            else:
                await asyncio.to_thread(self.versions.drop_damaged, self._proven.files)
                self._good = await self.versions.fetch(self._proven)
                await self._engine.load_weights(self.version, self._good)
                await self._check_loaded(self._proven, self._good)
        except (ComposerError, OSError) as failure:
            raise LostWeightsError(
                f"weights v{manifest.version} were refused ({error}), and v{self.version} could not be loaded again "
                f"({failure}): this node cannot continue; restart it"
            ) from failure
        finally:
            self.rollbacks += 1

    async def _check_loaded(self, manifest: Manifest, tensors: Snapshot) -> None:
        parts = await self._engine.read_back(list(tensors))
        wrong = await asyncio.to_thread(_differing, manifest, tensors, parts)
        if wrong:
            raise CanaryError(
                f"weights v{manifest.version}: after the swap the engine holds "
                f"other values in {', '.join(wrong[:5])} ({len(wrong)} of {len(parts)} parameters)"
            )

    async def _score_canary(self, manifest: Manifest) -> None:
        canary = manifest.canary
        if len(canary.logprobs) != len(canary.token_ids) - 1:
            raise CanaryError(
                f"weights v{manifest.version}: the canary has {len(canary.token_ids)} tokens and "
                f"{len(canary.logprobs)} logprobs, expected one fewer"
            )
        scores = await self._engine.score(canary.token_ids)
        differences = [abs(score - expected) for score, expected in zip(scores, canary.logprobs, strict=True)]
        finite = all(math.isfinite(difference) for difference in differences)
        self.canary_error = max(differences) if finite else math.inf
        if self.canary_error > self._tolerance:
            raise CanaryError(
                f"weights v{manifest.version}: the canary's logprobs are off by {self.canary_error:.3g} nats, "
                f"at most {self._tolerance:g} is expected"
            )


def _differing(manifest: Manifest, tensors: Mapping[str, torch.Tensor], parts: list[ReadBack]) -> list[str]:
    """Return the parameters that do not hold the published tensors."""
    return ["+".join(part.names) for part in parts if part.checksum != _published_sum(manifest, tensors, part)]


def _published_sum(manifest: Manifest, tensors: Mapping[str, torch.Tensor], part: ReadBack) -> int | None:
    """Return the checksum that a parameter should have; None when the tensors on the disk are not the published ones.

    Where the types agree it is the manifest's, else that of the tensors on this node's disk.
    """
    signed = {name: manifest.tensors.get(name, "") for name in part.names}
    if all(signed.values()) and part.checksum == sum(int(text, 16) for text in signed.values()) % (1 << 64):
        return part.checksum
    dtype, cast = getattr(torch, part.dtype), 0
    for name, text in signed.items():
        published = 0
        for _, block in tensor_blocks(tensors, name):
            cast += word_sum(block.to(dtype))
            published += word_sum(block)
        if text and published % (1 << 64) != int(text, 16):
            return None
    return cast % (1 << 64)


# ---- the versions on the disk --------------------------------------------------------------------------------------


class ChunkSource(Protocol):
    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Return some bytes of a chunk from `offset` on: b"" at its end, None without such a chunk.

        Raises DeadlineError or OSError when the source cannot be reached.
        """
        ...

    def learn(self, urls: Iterable[str], gateway_host: str) -> None:
        """Take the copies of the store that the gateway names."""

    def refuse(self, sha256: str) -> bool:
        """Note that the chunk is wrong. Return whether to read it again, from elsewhere."""
        return False


class FolderSource(ChunkSource):
    """The run's weight store, on this machine or a shared disk."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def read(self, sha256: str, offset: int) -> bytes | None:
        return await asyncio.to_thread(self._store.chunk, sha256, offset, PIECE_BYTES)


class VersionFolder:
    """The versions on this node's disk, one file a whole chunk. Used by one task at a time."""

    def __init__(self, source: ChunkSource, model_folder: Path, *, kept: Path | None = None) -> None:
        self.source = source
        self._model_folder = model_folder
        self._scratch: Scratch | None = None
        if kept is None:
            self._scratch = Scratch("weights")
            kept = self._scratch.path
        self.path = kept
        self.path.mkdir(parents=True, exist_ok=True)
        files = [path.name for path in self.path.iterdir() if path.is_file()]
        self._held = set(filter(self._is_intact, files))
        for path in self.path.iterdir():
            if path.name not in self._held:
                path.unlink()
        self._begun: dict[str, bytearray] = {}
        self._in_use: Manifest | None = None
        self.bytes_pulled = 0

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def settle(self, manifest: Manifest) -> None:
        self._in_use = manifest
        self.keep_only(manifest.files)

    def missing_bytes(self, refs: Iterable[ChunkRef]) -> int:
        missing = {ref.sha256: ref.size for ref in refs if not self.has(ref)}
        return sum(size - len(self._begun.get(sha256, b"")) for sha256, size in missing.items())

    async def fetch(self, manifest: Manifest) -> Snapshot:
        """Bring a version to the disk, with every hash checked; the version in use stays.

        Raises CorruptWeightsError, MisfitError, OSError (no room on the disk), or what the source raises.
        """
        if manifest.kind not in ("anchor", "delta", "adapters") or (manifest.patch and manifest.dtype not in WORDS):
            raise CorruptWeightsError(
                f"weights v{manifest.version} are of kind {manifest.kind!r} and type {manifest.dtype!r}: "
                "use one release everywhere"
            )
        what, used = f"weights v{manifest.version}", self._in_use
        wanted = [*manifest.refs, *(used.files if used else [])]
        self.keep_only(wanted)
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
            await asyncio.to_thread(self.drop_damaged, manifest.files)
            raise

    async def pull(self, what: str, refs: Iterable[ChunkRef]) -> None:
        """Pull the chunks of `what` that are not here, equal ones once. Raises as `fetch` does."""
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
        async with gate:
            while not self.has(ref):
                data = self._begun.setdefault(ref.sha256, bytearray())
                while len(data) < ref.size:
                    piece = await self.source.read(ref.sha256, len(data))
                    if piece is None:
                        raise CorruptWeightsError(
                            f"{what}: the source has no chunk {ref.sha256}; it may have been pruned for a newer version"
                        )
                    self.bytes_pulled += len(piece)
                    data += piece
                    if not piece:
                        break
                try:
                    await asyncio.to_thread(self.write, what, ref, data)
                except CorruptWeightsError:
                    data.clear()
                    if not self.source.refuse(ref.sha256):
                        raise
            self._begun.pop(ref.sha256, None)

    def _follows(self, manifest: Manifest) -> bool:
        """Tell whether a patch leads to the new anchor in fewer bytes."""
        used = self._in_use
        if used is None or manifest.kind != "anchor" or not manifest.base or manifest.base != used.chunks:
            return False
        if len(manifest.base) != len(manifest.chunks):
            return False
        return self.missing_bytes(manifest.patch) < self.missing_bytes(manifest.chunks)

    def _make_anchor(self, manifest: Manifest) -> None:
        what = f"weights v{manifest.version}"
        for old, new, patch in zip(manifest.base, manifest.chunks, self._patches(manifest), strict=True):
            if not self.has(new):
                data = bytearray(self.read(old, what))
                patch.apply(data)
                self.write(what, new, data)

    def _open(self, manifest: Manifest) -> Snapshot:
        if manifest.kind == "delta":
            for _ in self._patches(manifest):  # Damage shows before a swap begins.
                pass
        return open_snapshot(manifest, self.path_of, self._model_folder)

    def _patches(self, manifest: Manifest) -> Iterator[Patch]:
        sizes = [ref.size for ref in manifest.base or manifest.chunks]
        stream = (self.read(ref, "a patch") for ref in manifest.patch)
        yield from patches(stream, sizes, WORDS[manifest.dtype])

    # -- chunks --------------------------------------------------------------------------------------------------

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
        if len(data) != ref.size:
            raise CorruptWeightsError(f"{what}: chunk {ref.sha256} has {len(data)} bytes, the manifest says {ref.size}")
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptWeightsError(f"{what}: chunk {ref.sha256} differs from its hash")
        # A killed process leaves no half of a chunk, and a canceled pull's thread may still write it.
        part = self.path / f"{ref.sha256}.{threading.get_ident()}.part"
        try:
            part.write_bytes(data)
            part.replace(self.path_of(ref))
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OSError(
                error.errno,
                f"chunk {ref.sha256} of {what} cannot be kept in {self.path}: {error.strerror}; give this node room "
                "for two versions, or set TMPDIR or --state-dir to a larger disk",
            ) from error
        self._held.add(ref.sha256)

    def read(self, ref: ChunkRef, what: str) -> bytes:
        try:
            data = self.path_of(ref).read_bytes()
        except OSError as error:
            raise CorruptWeightsError(f"{what} cannot be read from {self.path}: {error}") from None
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptWeightsError(f"{what}: chunk {ref.sha256} was changed in {self.path}")
        return data

    def keep_only(self, refs: Iterable[ChunkRef]) -> None:
        """Drop all else, and what came of other chunks."""
        kept = {ref.sha256 for ref in refs}
        self._drop(self._held - kept)
        self._begun = {sha256: data for sha256, data in self._begun.items() if sha256 in kept}

    def drop_damaged(self, refs: Iterable[ChunkRef]) -> None:
        held = {ref.sha256 for ref in refs} & self._held
        self._drop({sha256 for sha256 in held if not self._is_intact(sha256)})

    def _drop(self, sha256s: set[str]) -> None:
        self._held -= sha256s
        for sha256 in sha256s:
            (self.path / sha256).unlink(missing_ok=True)
