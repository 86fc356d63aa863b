"""The file of a policy version in the store: whole (an anchor), or as what differs from the last whole one.

    anchor 0 ──────────┬─────────┬─────────┬────────────── anchor 4 ──┐   overlays: anchor to version, for joiners
    version 0 ─delta─> 1 ─delta─> 2 ─delta─> 3 ─delta────> 4 ─delta──> 5   deltas: version to version, for followers

Both are written chunk by chunk, beside training: a chunk of the anchor is read from the store and compared with the
tensors in memory. So no second snapshot is held. A version is whole after `anchor_every` others, when its overlay is
not small, and when the version before is not certain (after a start, a rewind, or damage in the store). A version that
is whole by count has its delta too: who followed so far makes the anchor from it, and pulls no snapshot.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping

import torch
from msgspec.structs import replace
from torch import Tensor

from composer_prime.errors import CorruptWeightsError
from composer_prime.run.patches import WORDS, difference, patches, stream_entry, word_sum
from composer_prime.run.weights import ChunkWriter, Delta, Manifest, WeightStore, safetensors_header

logger = logging.getLogger(__name__)

_LARGEST_SHARE = 1 / 3
"""Of an anchor's bytes: no overlay, delta or list of deltas is larger."""


class VersionWriter:
    """Used by one thread at a time."""

    def __init__(self, store: WeightStore, anchor_every: int) -> None:
        """`anchor_every` versions after an anchor the next one is whole."""
        self._store = store
        self._anchor_every = anchor_every
        self._last: Manifest | None = None
        """The version written last; None where that is not certain."""
        self._header = b""
        """Of its file: names, types, shapes, order."""
        self._since_anchor = 0
        self._dense_until = 0
        """So many versions are not compared with the one before: a step changed too many words."""

    def forget(self) -> None:
        """The next version is whole."""
        self._last = None

    def continue_from(self, newest: Manifest, version: int) -> None:
        """Treat the store's `newest` as the version written last, although training continues from `version`.

        The next version is what differs from it, whatever steps lie between: files are compared, not numbers. Nodes
        that have `newest` need no snapshot then. The store may have lost it: then the next version is whole.
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
        # After a rewind the deltas before lead to versions that no longer count: only `newest` itself is a start.
        self._last = replace(newest, deltas=[]) if newest.version > version else newest
        self._header = bytes(start[: 8 + int.from_bytes(start[:8], "little")])
        self._since_anchor = 0 if newest.parent is None else max(0, newest.version - newest.parent)

    def write(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
        """Store the file of contiguous CPU `tensors`, and return the manifest with what a reader needs."""
        if manifest.kind == "adapters":
            return replace(manifest, chunks=self._store.put_stream(safetensors_parts(tensors)))
        word = WORDS[manifest.dtype]
        sums = {name: f"{word_sum(_raw_bytes(tensor), word):x}" for name, tensor in tensors.items()}
        manifest = replace(manifest, tensors=sums)
        last, self._last = self._last, None  # a failure leaves nothing certain
        header = bytes(next(safetensors_parts(tensors)))
        self._since_anchor += 1
        due = self._since_anchor >= self._anchor_every
        compared = last is not None and header == self._header and self._anchor_every > 1
        if compared and self._dense_until > 0:
            self._dense_until -= 1
        elif last is not None and compared:
            try:
                manifest = self._compare(last, manifest, tensors)
            except CorruptWeightsError as error:
                logger.warning("weights v%d are written whole: %s", manifest.version, error)
        if due or not manifest.overlay:
            chunks = self._store.put_stream(safetensors_parts(tensors))
            manifest = replace(manifest, kind="anchor", parent=None, chunks=chunks, overlay=[], overlay_sha256="")
            self._since_anchor = 0
        self._last, self._header = manifest, header
        return manifest

    def _compare(self, last: Manifest, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
        """Return the manifest with overlay and deltas; without one of them where it is not small.

        Raises CorruptWeightsError when the store has lost something.
        """
        store, word = self._store, WORDS[manifest.dtype]
        sizes = [ref.size for ref in last.chunks]
        limit = sum(sizes) * _LARGEST_SHARE
        before = patches(map(store.read, last.overlay), sizes, word)
        overlay, delta, digest = ChunkWriter(store), ChunkWriter(store), hashlib.sha256()
        for ref, piece in zip(last.chunks, store.pieces(safetensors_parts(tensors)), strict=True):
            changed = difference(store.read(ref), memoryview(piece), word)
            delta.write(stream_entry((changed + -next(before)).encode()))
            if delta.size > limit:
                self._dense_until = self._anchor_every
                return manifest
            if overlay.size <= limit:
                encoded = changed.encode()
                digest.update(encoded)
                overlay.write(stream_entry(encoded))
        deltas = [*last.deltas, Delta(manifest.version, last.state, delta.close())][-self._anchor_every :]
        while sum(each.size for each in deltas) > limit:
            del deltas[0]
        manifest = replace(manifest, deltas=deltas)
        if overlay.size > limit:
            return manifest
        parent = last.version if last.parent is None else last.parent
        return replace(
            manifest, kind="delta", parent=parent, chunks=last.chunks, overlay=overlay.close(),
            overlay_sha256=digest.hexdigest(),
        )  # fmt: skip


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
