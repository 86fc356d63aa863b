"""Which versions the weight store keeps."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from composer_prime.errors import SignatureError, WireError
from composer_prime.run.weights import (
    Canary,
    ChunkRef,
    Envelope,
    Manifest,
    ModelFile,
    ModelFiles,
    WeightStore,
    open_model_files,
    open_signed,
    sign,
)

KEEP = 3


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


KEY = Ed25519PrivateKey.generate()


def decode(raw: bytes) -> Manifest:
    return open_signed(raw, KEY.public_key(), run_id="r")


def publish(store: WeightStore, version: int) -> list[ChunkRef]:
    """Write a version of five chunks that no other version has, then prune."""
    chunks = [ref for index in range(5) for ref in store.put_chunks(bytes([version, index]) * 32)]
    manifest = Manifest(
        run_id="r",
        version=version,
        kind="anchor",
        dtype="float32",
        chunks=chunks,
        tensors={},
        canary=Canary(token_ids=[1, 2], logprobs=[-1.0]),
    )
    store.put_manifest(version, sign(manifest, KEY))
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


def test_what_an_earlier_release_wrote_is_dropped(store):
    """A resumed run publishes anew; manifests that this release cannot read go with their chunks."""
    old = {"run_id": "r", "version": 1, "parent": None, "kind": "anchor", "dtype": "float32", "tensors": {},
           "chunks": store.put_chunks(b"old"), "canary": {"token_ids": [1, 2], "logprobs": [-1.0]}}  # fmt: skip
    body = msgspec.msgpack.encode(old)
    store.put_manifest(1, msgspec.msgpack.encode(Envelope(body, KEY.sign(body))))
    with pytest.raises(WireError):
        decode(store.manifest(1))
    publish(store, 2)
    assert store.versions() == [2] and len(list((store.root / "chunks").iterdir())) == 5


def test_threads_that_write_one_chunk_at_once_both_succeed(store, monkeypatch):
    # Equal parts of a model are one chunk: two threads are in the middle of writing it, and neither takes the other's.
    meet, sync = threading.Barrier(2, timeout=20), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (meet.wait(), sync(file)))
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(store.put_chunks, [b"zeros"] * 2)
    assert one == other and store.chunk(one[0].sha256, 0, 5) == b"zeros"


def test_the_kind_is_in_the_signed_bytes(store):
    """Model files are no version and a version is no model files, though the run signed both."""
    publish(store, 1)
    files = sign(ModelFiles(run_id="r", files=[ModelFile("config.json", store.put_chunks(b"{}"))]), KEY)
    assert open_model_files(files, KEY.public_key(), run_id="r").files[0].size == 2
    with pytest.raises(WireError, match="weights"):
        open_signed(files, KEY.public_key(), run_id="r")
    with pytest.raises(WireError, match="model_files"):
        open_model_files(store.manifest(1), KEY.public_key(), run_id="r")
    for kind, other in (("anchor", "delta"), ("anchor", "adapters")):
        signed = msgspec.msgpack.decode(store.manifest(1), type=Envelope)
        changed = msgspec.structs.replace(signed, manifest=signed.manifest.replace(kind.encode(), other.encode()[:6]))
        with pytest.raises(SignatureError):
            decode(msgspec.msgpack.encode(changed))


def test_no_link_is_followed(store, tmp_path):
    """A link in the place of a chunk leads a node to no other file of this machine."""
    (tmp_path / "secret").write_bytes(b"secret")
    [ref] = store.put_chunks(b"chunk")
    path = store.root / "chunks" / ref.sha256
    assert store.chunk(ref.sha256, 1, 3) == b"hun" and store.chunk("../" + ref.sha256, 0, 5) is None
    path.unlink()
    assert store.chunk(ref.sha256, 0, 5) is None
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic link"):
        store.chunk(ref.sha256, 0, 5)
