"""Checksums of micro-batches: a batch of another run, step or rank, or with a flipped bit, is refused by name."""

from __future__ import annotations

import hashlib

import msgspec

from composer_prime.errors import ChecksumError, RunMismatchError
from composer_prime.wire.types import MicroBatch

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def checksum(batch: MicroBatch) -> str:
    """blake2b-128, hexadecimal, over every field of `batch` but the checksum itself."""
    payload = _ENCODER.encode(msgspec.structs.replace(batch, checksum=""))
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def sealed(batch: MicroBatch) -> MicroBatch:
    """`batch` with its checksum filled in."""
    return msgspec.structs.replace(batch, checksum=checksum(batch))


def verify(batch: MicroBatch, *, run_id: str, step: int, rank: int, versions: tuple[int, int]) -> None:
    """Refuse a micro-batch that is not the one asked for. `versions`: oldest and newest that it may hold tokens of.

    Raises RunMismatchError (run, step, rank or policy versions differ) or ChecksumError (content differs from header).
    """
    expected = {"run_id": run_id, "step": step, "rank": rank}
    for field, want in expected.items():
        got = getattr(batch, field)
        if got != want:
            raise RunMismatchError(f"micro-batch has {field} {got!r}, this trainer rank asked for {want!r}")
    oldest, newest = versions
    if batch.sample_ids and not oldest <= batch.version_min <= batch.version_max <= newest:
        raise RunMismatchError(
            f"micro-batch of step {step} holds policy versions {batch.version_min}..{batch.version_max}; "
            f"allowed are {oldest}..{newest} (raise orchestrator.max_staleness to accept older rollouts)"
        )
    actual = checksum(batch)
    if actual != batch.checksum:
        raise ChecksumError(
            f"micro-batch {batch.index} of step {step} has checksum {actual}, its header says {batch.checksum}: "
            "the payload was damaged on the way; restart with --resume"
        )
