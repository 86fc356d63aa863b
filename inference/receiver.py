"""From a signed manifest to weights in use: pull, verify, swap, prove.

    manifest -> signature -> chunks to the disk (resumed where they stopped), each hashed -> names of tensors
             -> engine.load_weights, tensor by tensor -> read back, canary -> good: keep | bad: load the old ones again

After any failure the engine keeps the weights it had, or the node ends. Nothing is unpickled, and no tensor is
loaded before its chunks' hashes matched. While a swap is unproven, `settled` is unset: the node waits for it, then
looks at `rollbacks`, before it sends out tokens. Any source of chunks will do: every byte is checked against the
signed manifest.

A swap is proven three ways. What the engine reads back from its parameters has the checksums of what was published.
The canary's logprobs are the trainer's within `canary_tolerance`. And they moved from those of the version before as
the trainer's did, where that is more than the engine's own rounding: versions may differ by less than the tolerance.
The move refuses a version only where not all tensors could be read back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from composer_prime.errors import CanaryError, ComposerError, CorruptWeightsError, LostWeightsError, MisfitError
from composer_prime.run.weights import Manifest, open_signed
from inference.engines.base import Engine, ReadBack
from inference.snapshot import ChunkFolder, Snapshot, folder_snapshot, tensor_blocks, word_sum
from inference.versions import ChunkSource, VersionFolder

logger = logging.getLogger(__name__)

_NOISES = 14.0
"""Moves of the canary count as evidence from this many times the engine's rounding on: a wrong verdict would then take
rounding of five standard deviations."""


class Receiver:
    """Brings one engine to the versions that one run publishes. Used by one task at a time."""

    def __init__(
        self,
        engine: Engine,
        source: ChunkSource,
        model_folder: Path,
        canary_tolerance: float,
        *,
        relays: bool = False,
        kept: Path | None = None,
    ) -> None:
        """`canary_tolerance` in nats. `relays`: keep the chunks that other nodes may ask for.

        `kept`: where chunks outlast this process.
        """
        self._engine = engine
        self._folder = model_folder
        self._tolerance = canary_tolerance
        self._versions = VersionFolder(source, model_folder, relays=relays, kept=kept)
        self._proven: Manifest | None = None
        """Of the version in use; None before the first."""
        self._good: Snapshot | None = None
        """Its tensors; None while they are those of the model folder."""
        self._may_patch = True
        """Whether the engine may change only what differs; not after a swap that failed."""
        self.version = engine.version
        """The newest version that passed its canary; the node reports it."""
        self.installed: bytes | None = None
        """The signed manifest of that version."""
        self.canary_error: float | None = None
        """Largest |logprob - manifest| of the last canary, in nats."""
        self._warned = False
        """Whether it was said that a swap could not be proven."""
        self.rollbacks = 0
        self.settled = asyncio.Event()
        self.settled.set()

    @property
    def bytes_pulled(self) -> int:
        return self._versions.bytes_pulled

    @property
    def chunks(self) -> ChunkFolder:
        """What is on this node's disk."""
        return self._versions.chunks

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

        Answers are held back only while new weights are in use: what can be computed before is. A MisfitError changed
        nothing, so nothing is taken back. Raises LostWeightsError, with `settled` unset for good, without old weights.
        """
        before = await self._engine.score(manifest.canary.token_ids)
        self.settled.clear()
        try:
            try:
                await self._engine.load_weights(manifest.version, tensors, self._base(manifest))
                whole = await self._check_loaded(manifest, tensors)
                after = await self._score_canary(manifest)
                self._check_move(manifest, before, after, read_back=whole)
            except MisfitError:
                raise
            except ComposerError as error:  # Also when an engine gives no scores, which proves nothing.
                self._may_patch = False
                await self._roll_back(manifest, error)
                raise
        except LostWeightsError:
            raise
        except BaseException:
            self.settled.set()
            raise
        self.settled.set()

    def _base(self, manifest: Manifest) -> Snapshot | None:
        """Return the tensors in use, if the engine may load what differs from them. Adapters change nearly all."""
        kinds = [each.kind for each in (manifest, self._proven) if each is not None]
        return self._good if self._may_patch and "adapters" not in kinds else None

    async def _roll_back(self, manifest: Manifest, error: ComposerError) -> None:
        """Load the old weights. Requests that start until they are in use count as sampled from the refused ones.

        That they are loaded is read back. What cannot be read from this node's disk, or changed there, is dropped and
        pulled again. Raises LostWeightsError.
        """
        try:
            if isinstance(error, CorruptWeightsError | CanaryError):
                await asyncio.to_thread(self._versions.drop_damaged, manifest)
            try:
                old = self._good or await asyncio.to_thread(folder_snapshot, self._folder)
                await self._engine.load_weights(self.version, old)
                if self._good is not None and self._proven is not None:
                    await self._check_loaded(self._proven, self._good)
            except (CorruptWeightsError, CanaryError):
                if self._good is None or self._proven is None:
                    raise
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

    async def _check_loaded(self, manifest: Manifest, tensors: Snapshot) -> bool:
        """Return whether all published tensors could be read back. Raises CanaryError when one differs."""
        parts = await self._engine.read_back(list(tensors))
        wrong = await asyncio.to_thread(_differing, manifest, tensors, parts)
        if wrong:
            raise CanaryError(
                f"weights v{manifest.version}: after the swap the engine holds other values in {', '.join(wrong[:5])} "
                f"({len(wrong)} of {len(parts)} parameters that were read back): they were not loaded; restart this "
                "node, and report its engine and model if it happens again"
            )
        return {name for part in parts for name in part.names} >= tensors.keys()

    async def _score_canary(self, manifest: Manifest) -> list[float]:
        """Return the engine's logprobs. Raises CanaryError when one is off by more than the tolerance."""
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
        return scores

    def _check_move(self, manifest: Manifest, before: list[float], after: list[float], *, read_back: bool) -> None:
        """Raises CanaryError when the engine's logprobs did not move from the old version's as the trainer's did.

        Where all tensors were read back, which is the stronger proof, that is a warning. The engine's rounding is what
        it differs by from the trainer in the old version, whose weights are proven. Tokens that move more count more.
        """
        old, new = self._proven, manifest.canary
        if old is None or old.canary.token_ids != new.token_ids:
            return
        expected = [to - start for to, start in zip(new.logprobs, old.canary.logprobs, strict=True)]
        moved = [to - start for to, start in zip(after, before, strict=True)]
        rounding = [has - published for has, published in zip(before, old.canary.logprobs, strict=True)]
        length = math.hypot(*expected)
        even = math.hypot(*rounding) / math.sqrt(len(expected))
        weighted = math.hypot(*map(operator.mul, expected, rounding)) / length if length else 0.0
        noise = max(even, weighted)
        if length <= _NOISES * noise:
            if not read_back and not self._warned:
                self._warned = True
                logger.warning(
                    "weights v%d: not all tensors can be read back from the engine, and versions %d and %d differ by "
                    "%.2g nats on the canary, of which the engine rounds %.2g: that the new weights are in use is not "
                    "proven, here and for later versions as close", manifest.version, old.version, manifest.version,
                    length, noise,
                )  # fmt: skip
            return
        share = sum(map(operator.mul, expected, moved)) / length**2
        if not 0.5 < share < 2.0:
            fault = (
                f"weights v{manifest.version}: the canary's logprobs moved by {share:.2g} of the way from version "
                f"{old.version} to {manifest.version} ({length:.2g} nats), expected 1: the engine does not compute "
                "with the new weights; restart this node, and report its engine and model if it happens again"
            )
            if not read_back:
                raise CanaryError(fault)
            logger.warning("%s (all parameters hold the new weights, so they stay)", fault)


def _differing(manifest: Manifest, tensors: Mapping[str, torch.Tensor], parts: list[ReadBack]) -> list[str]:
    """Return the engine's parameters whose checksums are not those of the published tensors in their type.

    Where the types agree the sums are the manifest's, which the trainer took of its own tensors. Else, and with
    adapters, whose manifests have none, they are those of the tensors on this node's disk, which must have the
    manifest's own.
    """
    wrong = []
    for part in parts:
        sums, intact = [manifest.tensors.get(name, "") for name in part.names], True
        if part.dtype == manifest.dtype and all(sums):
            expected = sum(int(text, 16) for text in sums) % (1 << 64)
        else:
            dtype, expected = getattr(torch, part.dtype), 0
            for name, text in zip(part.names, sums, strict=True):
                published = 0
                for _, block in tensor_blocks(tensors, name):
                    expected += word_sum(block.to(dtype))
                    published += word_sum(block)
                if text and published % (1 << 64) != int(text, 16):
                    intact = False
            expected %= 1 << 64
        if expected != part.checksum or not intact:
            wrong.append("+".join(part.names))
    return wrong
