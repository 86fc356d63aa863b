"""From a signed manifest to weights in use: pull, verify, swap, prove.

    manifest -> signature -> chunks to the disk (resumed where they stopped), each hashed -> names of tensors
             -> engine.load_weights, tensor by tensor -> read back, canary -> good: keep | bad: load the old ones again

After any failure the engine keeps the weights it had, or the node ends. Nothing is unpickled, and no tensor is
loaded before its chunks' hashes matched. While a swap is unproven, `settled` is unset: the node waits for it, then
looks at `rollbacks`, before it sends out tokens. Any source of chunks will do: every byte is checked against the
signed manifest.

A swap is proven twice. What the engine reads back from its parameters has the checksums of what was published. And the
canary's logprobs are the trainer's within `canary_tolerance`, which is all the proof for parameters that cannot be read
back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.errors import CanaryError, ComposerError, LostWeightsError, MisfitError
from composer_prime.run.weights import Manifest, open_signed
from inference.engines.base import Engine, ReadBack
from inference.snapshot import Snapshot, folder_snapshot, tensor_blocks, word_sum
from inference.versions import ChunkSource, VersionFolder

logger = logging.getLogger(__name__)


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
        """`canary_tolerance` in nats. `kept`: where chunks outlast this process."""
        self._engine = engine
        self._folder = model_folder
        self._tolerance = canary_tolerance
        self._versions = VersionFolder(source, model_folder, kept=kept)
        self._proven: Manifest | None = None
        """Of the version in use; None before the first."""
        self._good: Snapshot | None = None
        """Its tensors; None while they are those of the model folder."""
        self.version = engine.version
        """The newest version that passed its canary; the node reports it."""
        self.installed: bytes | None = None
        """The signed manifest of that version."""
        self.canary_error: float | None = None
        """Largest |logprob - manifest| of the last canary, in nats."""
        self.rollbacks = 0
        self.settled = asyncio.Event()
        self.settled.set()

    @property
    def bytes_pulled(self) -> int:
        return self._versions.bytes_pulled

    def close(self) -> None:
        """Remove the weights from the disk, unless they are kept."""
        self._versions.close()

    async def install(self, signed: bytes, verify_key: bytes, run_id: str) -> None:
        """Bring the engine to the version of `signed`. Does nothing when that manifest is in use already.

        Raises WireError, SignatureError (a manifest that is not this run's), CorruptWeightsError (cut short or
        altered), MisfitError (another model), CanaryError (rolled back), EngineError, OSError (no room on the disk), or
        what the source raises. After LostWeightsError the engine must not be used.
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
        start, before = time.monotonic(), self._versions.bytes_pulled
        tensors = await self._versions.fetch(manifest)
        pulled = time.monotonic()
        await self._swap(manifest, tensors)
        self.installed, self._proven, self._good, self.version = signed, manifest, tensors, manifest.version
        self._versions.settle(manifest)
        logger.info(
            "weights v%d in use: %.3f MB pulled and verified in %.2f s, swapped and proven in %.2f s, canary %.2g nats",
            manifest.version,
            (self._versions.bytes_pulled - before) / 1e6,
            pulled - start,
            time.monotonic() - pulled,
            self.canary_error or 0.0,
        )

    # -- swap ----------------------------------------------------------------------------------------------------

    async def _swap(self, manifest: Manifest, tensors: Snapshot) -> None:
        """Load new weights and prove them. Without a proof, load the old ones again and raise the error.

        Answers are held back from the first weight that changes on. Before it the engine prepares what it can. A
        MisfitError changed nothing, so nothing is taken back. Raises LostWeightsError, with `settled` unset for good,
        without old weights.
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
        """Load the old weights. Requests that start until they are in use count as sampled from the refused ones.

        That they are loaded is read back. What cannot be read from this node's disk, or changed there, is pulled again.
        Raises LostWeightsError.
        """
        try:
            await asyncio.to_thread(self._versions.drop_damaged, manifest)
            if self._good is None or self._proven is None:
                await self._engine.load_weights(self.version, await asyncio.to_thread(folder_snapshot, self._folder))
            else:
                await asyncio.to_thread(self._versions.drop_damaged, self._proven)
                self._good = await self._versions.fetch(self._proven)
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
        """Raise CanaryError when a parameter that can be read back holds other values."""
        parts = await self._engine.read_back(list(tensors))
        wrong = await asyncio.to_thread(_differing, manifest, tensors, parts)
        if wrong:
            raise CanaryError(
                f"weights v{manifest.version}: after the swap the engine holds other values in {', '.join(wrong[:5])} "
                f"({len(wrong)} of {len(parts)} parameters that were read back): they were not loaded; restart this "
                "node, and report its engine and model if it happens again"
            )

    async def _score_canary(self, manifest: Manifest) -> None:
        """Raise CanaryError when one of the engine's logprobs is off by more than the tolerance."""
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
                f"at most {self._tolerance:g} is expected: the engine does not compute what the trainer "
                "published"
            )


def _differing(manifest: Manifest, tensors: Mapping[str, torch.Tensor], parts: list[ReadBack]) -> list[str]:
    """Return the engine's parameters whose checksums are not those of the published tensors in their type."""
    return ["+".join(part.names) for part in parts if part.checksum != _published_sum(manifest, tensors, part)]


def _published_sum(manifest: Manifest, tensors: Mapping[str, torch.Tensor], part: ReadBack) -> int | None:
    """Return the checksum that a parameter should have; None when the tensors on the disk are not the published ones.

    Where the types agree the sums are the manifest's, which the trainer took of its own tensors. Else, and with
    adapters, whose manifests have none, they are those of the tensors on this node's disk.
    """
    signed = {name: manifest.tensors.get(name, "") for name in part.names}
    if part.dtype == manifest.dtype and all(signed.values()):
        return sum(int(text, 16) for text in signed.values()) % (1 << 64)
    dtype, cast = getattr(torch, part.dtype), 0
    for name, text in signed.items():
        published = 0
        for _, block in tensor_blocks(tensors, name):
            cast += word_sum(block.to(dtype))
            published += word_sum(block)
        if text and published % (1 << 64) != int(text, 16):
            return None
    return cast % (1 << 64)
