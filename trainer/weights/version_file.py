"""The file of a policy version in the store: whole (an anchor), or as what differs from the last anchor.

    anchor 0 ────┬────┬────┬────────> anchor 4 ────┬────┬────         one patch to each version, from its anchor
                 1    2    3                       5    6             a new anchor has one from the anchor before

A patch is written chunk by chunk, beside training: a chunk of the anchor is read from the store and compared with the
tensors in memory. So no second snapshot is held. A version is whole after `anchor_every` others, when its patch would
not be small, and when the anchor is not certain (after a start, a rewind, or damage in the store).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from composer_prime.errors import ComposerError, CorruptWeightsError, WeightError
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, write_remedy
from composer_prime.run.weights import (
    WORDS,
    ChunkRef,
    Manifest,
    WeightStore,
    difference,
    open_signed,
    safetensors_header,
    sign,
    stream_entry,
    word_sum,
)

logger = logging.getLogger(__name__)

ANCHOR_EVERY = 20
"""Versions between two whole ones."""
_LARGEST_SHARE = 1 / 3
"""Of an anchor's bytes: no patch is larger."""


class _DenseError(Exception):
    """Too many words differ for a patch."""


class SignedStore:
    """The weight store of a run, as its trainer writes it: every version has a signed manifest."""

    def __init__(self, run_dir: RunDir, run_id: str, *, keep: int) -> None:
        """Open the store of `run_dir`; `keep` versions stay in it."""
        self.run_id = run_id
        self._keep = keep
        keys = RunKeys(run_dir.keys)
        self._signer = keys.signer()
        self._verifier = keys.verifier()
        self._store = WeightStore(run_dir.weights)
        self._store.remove_partials()
        self._writer = VersionWriter(self._store)

    def write(self, manifest: Manifest, tensors: Mapping[str, Tensor], size: int) -> None:
        """Write the version of contiguous CPU `tensors` of `size` bytes, and drop old ones. Raises WeightError."""
        version = manifest.version
        try:
            manifest = self._writer.write(manifest, tensors)
            self._store.put_manifest(version, sign(manifest, self._signer))
            self._store.prune(self._keep, self._open)
        except OSError as error:
            raise WeightError(
                f"policy version {version} ({size} bytes) cannot be written to {self._store.root}: {error}; "
                f"{write_remedy(error, ' or lower trainer.weights.keep')}, then continue with --resume"
            ) from error

    def rewind(self, version: int, dtype: torch.dtype) -> None:
        """Drop the versions after `version`. The next one builds on the newest there was, if that has `dtype`."""
        newest = self._newest()
        self._store.rewind(version)
        self._writer.forget()
        if newest is not None and newest.dtype == str(dtype).removeprefix("torch."):
            self._writer.continue_from(newest)

    def _newest(self) -> Manifest | None:
        """Return the manifest published last, by this process or an earlier one; None if none can be read."""
        versions = self._store.versions()
        try:
            return self._open(self._store.manifest(versions[-1])) if versions else None
        except (ComposerError, OSError):  # Of another release, or damaged.
            return None

    def _open(self, raw: bytes) -> Manifest:
        return open_signed(raw, self._verifier, run_id=self.run_id)


class VersionWriter:
    """Used by one thread at a time."""

    def __init__(self, store: WeightStore, anchor_every: int = ANCHOR_EVERY) -> None:
        """`anchor_every` versions after an anchor the next one is whole."""
        self._store = store
        self._anchor_every = anchor_every
        self._anchor: list[ChunkRef] = []
        """The file of the last anchor; empty where that is not certain."""
        self._header = b""
        """Of that file: names, types, shapes, order."""
        self._since_anchor = 0
        self._dense_until = 0
        """So many versions are not compared with the anchor: a step changed too many words."""

    def forget(self) -> None:
        """The next version is whole."""
        self._anchor = []

    def continue_from(self, newest: Manifest) -> None:
        """Build on the anchor of the store's `newest`, from whatever version training continues: files are compared.

        Nodes that have that anchor pull no other one. The store may have lost it: then the next version is whole.
        """
        self.forget()
        if newest.kind == "adapters" or any(ref.size != self._store.chunk_bytes for ref in newest.chunks[:-1]):
            return
        start = bytearray()
        try:
            for ref in newest.chunks:
                start += self._store.read(ref)
                if len(start) >= 8 + int.from_bytes(start[:8], "little"):
                    break
        except CorruptWeightsError as error:
            logger.warning("the next version of the weights is whole: %s", error)
            return
        self._anchor, self._since_anchor = newest.chunks, 0
        self._header = bytes(start[: 8 + int.from_bytes(start[:8], "little")])

    def write(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
        """Store the file of contiguous CPU `tensors`, and return the manifest with what a reader needs."""
        if manifest.kind == "adapters":
            return replace(manifest, chunks=self._store.put_stream(safetensors_parts(tensors)))
        word = WORDS[manifest.dtype]
        sums = {name: f"{word_sum(_raw_bytes(tensor), word):x}" for name, tensor in tensors.items()}
        manifest = replace(manifest, tensors=sums)
        anchor, self._anchor = self._anchor, []  # a failure leaves nothing certain
        header = bytes(next(safetensors_parts(tensors)))
        patch = self._patch(anchor, tensors, word) if anchor and header == self._header else []
        self._since_anchor += 1
        if patch and self._since_anchor < self._anchor_every:
            self._anchor = anchor
            return replace(manifest, kind="delta", chunks=anchor, patch=patch)
        chunks = self._store.put_stream(safetensors_parts(tensors))
        self._anchor, self._header, self._since_anchor = chunks, header, 0
        return replace(manifest, kind="anchor", chunks=chunks, patch=patch, base=anchor if patch else [])

    def _patch(self, anchor: list[ChunkRef], tensors: Mapping[str, Tensor], word: np.dtype) -> list[ChunkRef]:
        """Return the patch from the anchor to `tensors`; nothing where that is not small or the store lost a chunk."""
        if self._anchor_every == 1 or self._dense_until > 0:
            self._dense_until = max(0, self._dense_until - 1)
            return []
        store, limit = self._store, sum(ref.size for ref in anchor) * _LARGEST_SHARE

        def entries() -> Iterator[bytes]:
            size = 0
            for ref, piece in zip(anchor, store.pieces(safetensors_parts(tensors)), strict=True):
                entry = stream_entry(difference(store.read(ref), memoryview(piece), word).encode())
                size += len(entry)
                if size > limit:
                    raise _DenseError
                yield entry

        try:
            return store.put_stream(entries())
        except _DenseError:
            self._dense_until = self._anchor_every
        except CorruptWeightsError as error:
            logger.warning("the next version of the weights is whole: %s", error)
        return []


def safetensors_parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of CPU tensors, piece by piece, without a second copy of the model."""
    yield safetensors_header(
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.nbytes)
        for name, tensor in tensors.items()
    )
    for tensor in tensors.values():
        yield _raw_bytes(tensor)


def _raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, row-major, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
