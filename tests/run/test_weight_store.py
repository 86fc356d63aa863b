"""Which versions the weight store keeps."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from composer_prime.run.weights import Canary, ChunkRef, Manifest, WeightStore

KEEP = 3


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


def decode(raw: bytes) -> Manifest:
    return msgspec.msgpack.decode(raw, type=Manifest)


def publish(store: WeightStore, version: int) -> list[ChunkRef]:
    """Write a version of five chunks that no other version has, then prune."""
    chunks = [ref for index in range(5) for ref in store.put_chunks(bytes([version, index]) * 32)]
    manifest = Manifest(
        run_id="r",
        version=version,
        parent=None,
        kind="anchor",
        dtype="float32",
        chunks=chunks,
        tensors={},
        canary=Canary(token_ids=[1, 2], logprobs=[-1.0]),
    )
    store.put_manifest(version, msgspec.msgpack.encode(manifest))
    store.prune(KEEP, decode)
    return chunks


def test_a_pull_that_takes_longer_than_the_newest_versions_stay_is_finished(store):
    """One chunk a step, five chunks, three versions kept: the fifth chunk is still there."""
    chunks = publish(store, 1)
    for step, ref in enumerate(chunks):
        assert store.chunk(ref.sha256, 0, 64) is not None
        publish(store, 2 + step)
    assert store.versions() == [1, 4, 5, 6]


def test_what_was_pulled_long_ago_is_pruned_with_its_chunks(store):
    """A version stays for a minute after its last chunk was read, and not for ever."""
    chunks = publish(store, 1)
    for ref in chunks:
        store.chunk(ref.sha256, 0, 64)
    for version in range(2, 6):
        publish(store, version)
    for ref in chunks:
        path = store.root / "chunks" / ref.sha256
        os.utime(path, (path.stat().st_atime - 120, path.stat().st_mtime - 240))
    publish(store, 6)
    assert store.versions() == [4, 5, 6]
    assert len(list((store.root / "chunks").iterdir())) == 15


def test_versions_that_are_pulled_do_not_fill_the_disk(store):
    """As many old versions stay as new ones, those read last; without readers there are none."""
    for version in range(1, 9):
        chunks = publish(store, version)
        if version < 6:
            store.chunk(chunks[0].sha256, 0, 64)
    assert store.versions() == [3, 4, 5, 6, 7, 8]
