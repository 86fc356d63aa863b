"""Publishes made-up weight versions as the trainer does: chunks, hashes, canary, signature."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from composer_prime.run import weights as store
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import Canary, ChunkRef, Manifest, sign
from tests.engines.reference import Reference

RUN_ID = "run-1"
CANARY = [5, 9, 17, 33, 65, 129, 257, 300]


class Publisher:
    def __init__(self, root: Path, keys: RunKeys, reference: Reference) -> None:
        self.store = store.WeightStore(root)
        self.keys, self.reference = keys, reference
        self.verify_key = keys.verifier().public_bytes_raw()

    def manifest(self, version: int) -> Manifest:
        """Store the chunks of `version`, several of them, and describe it."""
        tensors = self.reference.weights(version)
        data = safetensors.torch.save(tensors)
        chunks: list[ChunkRef] = []
        for start in range(0, len(data), 400_000):
            chunks += self.store.put_chunks(data[start : start + 400_000])
        return self._described(version, tensors, chunks, self.reference.score(CANARY, version))

    def adapters(self, version: int, rank: int = 2) -> Manifest:
        """Store factors of every attention projection, and describe the version that they make of the model folder."""
        generator = torch.Generator().manual_seed(version)
        base, merged, factors = self.reference.weights(0), self.reference.weights(0), {}
        for name in [name for name in base if "_proj" in name and "self_attn" in name]:
            height, width = base[name].shape
            a = factors[f"{name}.lora_A"] = 0.1 * torch.randn(rank, width, generator=generator)
            b = factors[f"{name}.lora_B"] = 0.1 * torch.randn(height, rank, generator=generator)
            merged[name] = (base[name].double() + 2.0 * (b.double() @ a.double())).float()
        chunks, scores = self.store.put_chunks(safetensors.torch.save(factors)), self.reference.score_of(merged, CANARY)
        return self._described(version, base, chunks, scores, kind="adapters", adapter_scale=2.0)

    def _described(
        self, version: int, names: Iterable[str], chunks: list[ChunkRef], scores: torch.Tensor, **more: Any
    ) -> Manifest:
        return Manifest(
            run_id=RUN_ID,
            version=version,
            dtype="float32",
            chunks=chunks,
            tensors=dict.fromkeys(names, ""),
            canary=Canary(token_ids=CANARY, logprobs=scores.tolist()),
            **{"kind": "anchor", **more},
        )

    def publish(self, version: int, **changes) -> bytes:
        """The signed manifest of `version`, with fields replaced by `changes`."""
        return sign(msgspec.structs.replace(self.manifest(version), **changes), self.keys.signer())

    def forge(self, version: int) -> bytes:
        """A manifest that somebody else signed."""
        return sign(self.manifest(version), Ed25519PrivateKey.generate())

    def damage(self, manifest: Manifest, index: int, *, keep: int | None = None) -> None:
        """Flip a byte of a stored chunk, or cut it to `keep` bytes."""
        path = self.store.root / "chunks" / manifest.chunks[index].sha256
        data = bytearray(path.read_bytes())
        if keep is None:
            data[len(data) // 2] ^= 1
        else:
            data = data[:keep]
        path.write_bytes(data)
