"""The signed manifest of one policy version: what the weights are, so that any relay may carry them.

A manifest lists content-addressed chunks; joined in order they are one safetensors file. Its ed25519 signature and the
hashes make an untrusted store or relay safe: whoever alters a byte is found out before a tensor is loaded.
"""

from __future__ import annotations

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from composer_prime.errors import SignatureError, WireError


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    sha256: str
    size: int
    """Bytes."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed prompt and what the trainer's own weights give for it."""

    token_ids: list[int]
    """[T]."""
    logprobs: list[float]
    """[T - 1]: log p(token t+1 | tokens <= t), temperature 1, computed from the published weights in float32."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    version: int
    parent: int | None
    """The version a delta applies to; None for an anchor."""
    kind: str
    """anchor (a whole snapshot)."""
    dtype: str
    chunks: list[ChunkRef]
    tensors: dict[str, str]
    """sha256 of each tensor's raw bytes, by parameter name of the Hugging Face model."""
    canary: Canary


class Envelope(msgspec.Struct, frozen=True):
    manifest: bytes
    signature: bytes


def sign(manifest: Manifest, key: Ed25519PrivateKey) -> bytes:
    """The manifest's wire form: msgpack of (manifest bytes, ed25519 signature over them)."""
    body = msgspec.msgpack.encode(manifest)
    return msgspec.msgpack.encode(Envelope(body, key.sign(body)))


def open_signed(raw: bytes, key: Ed25519PublicKey, *, run_id: str) -> Manifest:
    """The manifest inside `raw`.

    Raises WireError (not a manifest) or SignatureError (signed by another key, or of another run).
    """
    try:
        envelope = msgspec.msgpack.decode(raw, type=Envelope)
    except msgspec.DecodeError as error:
        raise WireError(f"{len(raw)} bytes are not a signed weight manifest: {error}") from None
    try:
        key.verify(envelope.signature, envelope.manifest)
    except InvalidSignature:
        raise SignatureError(
            "the weight manifest's signature does not match the run's key: its weights are refused; "
            "check that the node joined the right run"
        ) from None
    try:
        manifest = msgspec.msgpack.decode(envelope.manifest, type=Manifest)
    except msgspec.DecodeError as error:
        raise WireError(f"the signed manifest has another layout than ours: {error}; use one release") from None
    if manifest.run_id != run_id:
        raise SignatureError(f"the weight manifest belongs to run {manifest.run_id!r}, this is run {run_id!r}")
    return manifest
