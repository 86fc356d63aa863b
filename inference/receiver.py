"""From a signed manifest to weights in use: pull, verify, swap, canary.

    manifest -> signature -> chunks (resumed where they stopped) -> chunk hashes -> safetensors -> tensor hashes
             -> engine.load_weights -> score the canary -> good: keep | bad: load the weights before it again

After any failure the engine goes on with the weights it had. Nothing is unpickled, and no tensor is loaded before its
hash matched. While a swap is unproven, `settled` is unset: the node waits for it, then looks at `rollbacks`, before it
sends out tokens. Any source of chunks will do, because every byte is checked against the signed manifest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import safetensors
import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.errors import CanaryError, ComposerError, CorruptWeightsError, WeightError
from composer_prime.run.weights import ChunkRef, Manifest, WeightStore, open_signed, verified
from inference.engines.base import Engine

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
_CHUNKS_AT_ONCE = 4


class ChunkSource(Protocol):
    async def read(self, sha256: str, offset: int) -> bytes | None:
        """Return some bytes of a chunk from `offset` on: b"" at its end, None when the source has no such chunk.

        Raises DeadlineError or OSError when the source cannot be reached.
        """
        ...


class FolderSource:
    """The run's weight store, on this machine or a shared disk."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def read(self, sha256: str, offset: int) -> bytes | None:
        return await asyncio.to_thread(self._store.chunk, sha256, offset, PIECE_BYTES)


class Receiver:
    """Brings one engine to the versions that one run publishes. Used by one task at a time."""

    def __init__(self, engine: Engine, source: ChunkSource, model_folder: Path, canary_tolerance: float) -> None:
        """`canary_tolerance` in nats."""
        self._engine = engine
        self._source = source
        self._folder = model_folder
        self._tolerance = canary_tolerance
        self._partial: dict[str, bytearray] = {}
        self._good: Mapping[str, torch.Tensor] | None = None
        self.version = engine.version
        """The newest version that passed its canary; the node reports it."""
        self.installed: bytes | None = None
        """The signed manifest of that version."""
        self.canary_error: float | None = None
        """Largest |logprob - manifest| of the last canary, in nats."""
        self.rollbacks = 0
        self.settled = asyncio.Event()
        self.settled.set()

    async def install(self, signed: bytes, verify_key: bytes, run_id: str) -> None:
        """Bring the engine to the version of `signed`. Does nothing when that manifest is in use already.

        Raises WireError, SignatureError (a manifest that is not this run's), CorruptWeightsError (cut short or
        altered), WeightError (another model), CanaryError (rolled back), EngineError, or what the source raises.
        """
        if signed == self.installed:
            return
        manifest = open_signed(signed, Ed25519PublicKey.from_public_bytes(verify_key), run_id=run_id)
        if self.installed is None and manifest.version == self._engine.version:
            with suppress(CanaryError):
                await self._prove(manifest)
                logger.info("weights v%d are those of %s: nothing to load", manifest.version, self._folder)
                self.installed = signed
                return
        start = time.monotonic()
        tensors = await self._fetch(manifest)
        pulled = time.monotonic()
        await self._swap(manifest, tensors)
        self.installed, self._good, self.version = signed, tensors, manifest.version
        logger.info(
            "weights v%d in use: %.1f MB pulled and verified in %.2f s, swapped and proven in %.2f s, canary %.2g nats",
            manifest.version,
            sum(ref.size for ref in manifest.chunks) / 1e6,
            pulled - start,
            time.monotonic() - pulled,
            self.canary_error or 0.0,
        )

    # -- pull ----------------------------------------------------------------------------------------------------

    async def _fetch(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Return the manifest's tensors, on the CPU, with every hash checked."""
        refs = {ref.sha256: ref for ref in manifest.chunks}  # Equal chunks, such as zeros, are pulled once.
        self._partial = {sha256: data for sha256, data in self._partial.items() if sha256 in refs}
        gate = asyncio.Semaphore(_CHUNKS_AT_ONCE)
        pulls = [asyncio.ensure_future(self._pull(manifest, ref, gate)) for ref in refs.values()]
        try:
            pulled = dict(zip(refs, await asyncio.gather(*pulls), strict=True))
        except BaseException:
            for pull in pulls:
                pull.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)
            raise
        try:
            tensors = await asyncio.to_thread(_open, manifest, [pulled[ref.sha256] for ref in manifest.chunks])
        except CorruptWeightsError:
            self._partial.clear()  # It is unknown which byte is wrong: pull all again.
            raise
        self._partial.clear()
        return tensors

    async def _pull(self, manifest: Manifest, ref: ChunkRef, gate: asyncio.Semaphore) -> bytes:
        """Pull one chunk. When the source fails, `_partial` keeps what arrived and the next attempt continues there."""
        async with gate:
            data = self._partial.setdefault(ref.sha256, bytearray())
            while len(data) < ref.size:
                piece = await self._source.read(ref.sha256, len(data))
                if piece is None:
                    raise CorruptWeightsError(
                        f"weights v{manifest.version}: the source has no chunk {ref.sha256}; it may have been pruned "
                        "for a newer version"
                    )
                if not piece or len(data) + len(piece) > ref.size:
                    received = len(data) + len(piece)
                    del self._partial[ref.sha256]
                    raise CorruptWeightsError(
                        f"weights v{manifest.version}: chunk {ref.sha256} has "
                        f"{received} bytes{'' if not piece else ' or more'}, the manifest says {ref.size}"
                    )
                data += piece
            return bytes(data)

    # -- swap ----------------------------------------------------------------------------------------------------

    async def _swap(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights and prove them. Without a proof, load the old ones again and raise the error."""
        self.settled.clear()
        try:
            await self._engine.load_weights(manifest.version, tensors)
            try:
                await self._prove(manifest)
            except ComposerError:  # An engine that gives no scores proves nothing.
                self.rollbacks += 1
                if self._good is None:
                    self._good = await asyncio.to_thread(_folder_tensors, self._folder)
                await self._engine.load_weights(self.version, self._good)
                raise
        finally:
            self.settled.set()

    async def _prove(self, manifest: Manifest) -> None:
        """Score the canary with the engine. Raises CanaryError when it is off by more than the tolerance."""
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
                f"inference.canary_tolerance is {self._tolerance:g}: the engine does not compute what the trainer "
                "published (bfloat16 needs a tolerance of about 0.5)"
            )


def _open(manifest: Manifest, pieces: list[bytes]) -> dict[str, torch.Tensor]:
    """Turn chunks into tensors and check all hashes. Raises CorruptWeightsError."""
    data = verified(manifest, iter(pieces))
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptWeightsError(f"weights v{manifest.version} are no safetensors file: {error}") from None
    if tensors.keys() != manifest.tensors.keys():
        differing = sorted(tensors.keys() ^ manifest.tensors.keys())
        raise CorruptWeightsError(
            f"weights v{manifest.version}: file and manifest name different tensors: {differing[:5]} "
            f"({len(differing)} in all)"
        )
    for name, tensor in tensors.items():
        if tensor_sha256(tensor) != manifest.tensors[name]:
            raise CorruptWeightsError(f"weights v{manifest.version}: tensor {name} differs from its hash")
    return tensors


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Return the sha256 of a CPU tensor's raw bytes, as manifests hold it."""
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the model folder's safetensors files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(path))
    if not tensors:
        raise WeightError(f"{folder} holds no safetensors file to go back to")
    return tensors
