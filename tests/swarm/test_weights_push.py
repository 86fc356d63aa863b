"""`orchestrator weights`: a run's weights in a bucket, and its command line."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from composer_prime.errors import ConfigError, CorruptWeightsError, UnwritableError
from composer_prime.run.bucket import Bucket
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, create_run_id
from composer_prime.run.weights import Canary, ChunkRef, Manifest, WeightStore, sign
from inference.weight_sources import HttpSource
from orchestrator.swarm.weight_service import BucketPush, _serve, main


def decode(raw: bytes) -> Manifest:
    return msgspec.msgpack.decode(raw, type=Manifest)


class Recorded(Bucket):
    """A bucket that notes what is written, and fails on demand."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.written: list[str] = []
        self.writes_left = -1

    def _write(self, objects: Mapping[str, bytes]) -> None:
        if self.writes_left == 0:
            raise OSError("the bucket is gone")
        self.writes_left -= 1
        self.written += [path.rpartition("/")[2] for path in objects]
        super()._write(objects)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


@pytest.fixture(params=["memory", "file"])
def bucket(request, tmp_path) -> Recorded:
    MemoryFileSystem.store.clear()
    return Recorded("memory://bucket/run" if request.param == "memory" else (tmp_path / "bucket").as_uri())


def publish(store: WeightStore, version: int, *contents: int) -> list[ChunkRef]:
    chunks = [ref for content in contents for ref in store.put_chunks(bytes([content]) * 100)]
    manifest = Manifest(
        run_id="r", version=version, kind="anchor", dtype="float32", chunks=chunks, tensors={},
        canary=Canary(token_ids=[1, 2], logprobs=[-1.0]),
    )  # fmt: skip
    store.put_manifest(version, msgspec.msgpack.encode(manifest))
    return chunks


# The manifest comes after its chunks, and no chunk that is there is sent again, also not by a new process.
def test_chunks_come_before_their_manifest_and_once(store, bucket):
    push = BucketPush(store, bucket, decode)
    assert not push.push_newest()
    first = publish(store, 1, 1, 2, 3)
    assert push.push_newest() and not push.push_newest()
    assert bucket.written[-1] == "v000001.manifest" and set(bucket.written[:-1]) == {ref.sha256 for ref in first}
    bucket.written.clear()
    (*_, fourth) = publish(store, 2, 2, 3, 4)
    again = BucketPush(store, bucket, decode)
    assert again.push_newest() and again.bytes_pushed == 100 and again.version == 2
    assert bucket.written == [fourth.sha256, "v000002.manifest"]
    assert bucket.manifest(2) == store.manifest(2) and bucket.versions() == [1, 2]


# A push that breaks off goes on where it stopped; until then no manifest names what is not there.
def test_a_push_that_breaks_off_goes_on(store, bucket):
    publish(store, 1, *range(10))
    push = BucketPush(store, bucket, decode)
    bucket.writes_left = 2
    with pytest.raises(OSError, match="gone"):
        push.push_newest()
    assert bucket.versions() == [] and len(bucket.chunk_sizes()) == 8
    bucket.writes_left = -1
    assert push.push_newest() and len(bucket.written) == 11


class Hung(Recorded):
    """A bucket whose driver does not return from a write before it is released."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.began, self.released = threading.Event(), threading.Event()

    def _write(self, objects: Mapping[str, bytes]) -> None:
        self.began.set()
        self.released.wait(60)
        super()._write(objects)


# A stop waits for no driver, and no chunk begins after it.
def test_a_stop_ends_a_push(tmp_path, store):
    publish(store, 1, *range(20))
    bucket = Hung((tmp_path / "bucket").as_uri())
    push = BucketPush(store, bucket, decode)

    async def serve() -> None:
        serving = asyncio.create_task(_serve(RunDir(tmp_path), None, push, once=True))
        assert await asyncio.to_thread(bucket.began.wait, 60)
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(serve())
    assert not bucket.released.is_set() and not bucket.written
    bucket.released.set()
    for thread in threading.enumerate():
        if thread.name == "push":
            thread.join(60)
    assert len(bucket.written) <= 4 and bucket.versions() == []


# Credentials that may not delete push all the same.
def test_a_bucket_that_is_not_pruned_has_the_weights(store, bucket, monkeypatch, caplog):
    push = BucketPush(store, bucket, decode)
    monkeypatch.setattr(bucket._fs, "rm_file", raise_no_rights, raising=False)
    publish(store, 1, 1)
    assert push.push_newest()
    (store.root / "manifests" / "v000001.manifest").unlink()
    publish(store, 2, 2)
    assert push.push_newest() and push.version == 2 and bucket.versions() == [1, 2]
    assert not push.push_newest()
    assert len(caplog.records) == 1 and "no right to delete" in caplog.text


def raise_no_rights(path: str) -> None:
    raise PermissionError("Access Denied")


# A chunk that a disk cut short in the bucket is sent again.
def test_a_cut_chunk_in_the_bucket_is_mended(store, bucket):
    (ref,) = publish(store, 1, 7)
    bucket.put_chunks({ref.sha256: b"\x07" * 40})
    BucketPush(store, bucket, decode).push_newest()
    assert bucket.chunk(ref.sha256, 0, 1000) == b"\x07" * 100


# What the store pruned goes from the bucket as well, later; files that are no chunks stay.
def test_the_bucket_is_pruned_as_the_store_is(store, bucket):
    now = [0.0]
    push = BucketPush(store, bucket, decode, clock=lambda: now[0])
    bucket._write({"chunks/README": b"not ours"})
    old = publish(store, 1, 1, 2)
    push.push_newest()
    (store.root / "manifests" / "v000001.manifest").unlink()
    publish(store, 2, 2, 3)
    push.push_newest()
    assert bucket.versions() == [2] and old[0].sha256 in bucket.chunk_sizes()
    now[0] = 599.0
    publish(store, 3, 3, 4)
    push.push_newest()
    assert old[0].sha256 in bucket.chunk_sizes()
    now[0] = 600.0
    publish(store, 4, 3, 4)
    push.push_newest()
    assert old[0].sha256 not in bucket.chunk_sizes() and old[1].sha256 in bucket.chunk_sizes()
    assert bucket._fs.exists(f"{bucket._root}/chunks/README")


# After a resume a version's number belongs to other weights: its manifest is replaced.
def test_a_version_that_was_trained_again_is_pushed_again(store, bucket):
    push = BucketPush(store, bucket, decode)
    publish(store, 1, 1)
    push.push_newest()
    publish(store, 1, 2)
    assert push.push_newest() and bucket.manifest(1) == store.manifest(1)


# A chunk that the store lost, or that was altered there, is not pushed, and no manifest names it.
@pytest.mark.parametrize("damage", ["gone", "altered"])
def test_a_damaged_store_is_not_pushed(store, bucket, damage):
    (ref,) = publish(store, 1, 1)
    path = store.root / "chunks" / ref.sha256
    path.unlink() if damage == "gone" else path.write_bytes(b"\x02" * 100)
    with pytest.raises(CorruptWeightsError, match=damage):
        BucketPush(store, bucket, decode).push_newest()
    assert bucket.versions() == [] and not bucket.written


# A bucket of another run, or that is none, is refused with the remedy.
def test_buckets_are_checked(bucket):
    bucket.claim("run-a")
    bucket.claim("run-a")
    with pytest.raises(ConfigError, match="run-b"):
        bucket.claim("run-b")
    for url in ("nowhere", "file://", "http://host/x", "ftp://host/x"):
        with pytest.raises(ConfigError, match="not a bucket for weights"):
            Bucket(url)


# A missing right is named, and a driver that cannot be set up, as Azure's without an account, is an error.
def test_a_bucket_that_cannot_be_used_is_an_error(bucket, monkeypatch):
    class NoAccount(MemoryFileSystem):
        def __init__(self, **options: object) -> None:
            raise ValueError("Must provide either a connection_string or account_name")

    monkeypatch.setattr(bucket._fs, "rm_file", raise_no_rights, raising=False)
    with pytest.raises(UnwritableError, match="delete"):
        bucket.remove_chunk("a" * 64)
    monkeypatch.setitem(_registry, "az", NoAccount)
    with pytest.raises(ConfigError, match="az://box/run"):
        Bucket("az://box/run")


def make_run(folder: Path) -> tuple[RunDir, ChunkRef]:
    run_dir = RunDir(folder)
    run_id = create_run_id(run_dir, "r")
    keys, store = RunKeys.create(run_dir.keys), WeightStore(run_dir.weights)
    (ref,) = publish(store, 1, 9)
    store.put_manifest(1, sign(msgspec.structs.replace(decode(store.manifest(1)), run_id=run_id), keys.signer()))
    return run_dir, ref


# With --once the newest version is pushed, signatures checked, and the command ends.
def test_push_once(tmp_path):
    run_dir, ref = make_run(tmp_path / "run")
    target = tmp_path / "bucket"
    assert main([str(run_dir.root), "--push", target.as_uri(), "--once"]) == 0
    assert (target / "chunks" / ref.sha256).read_bytes() == b"\x09" * 100
    assert (target / "manifests" / "v000001.manifest").read_bytes() == WeightStore(run_dir.weights).manifest(1)


WRONG = [
    ([], "nothing to do"),
    (["--listen", "somewhere"], "--listen is 'somewhere'; expected HOST:PORT"),
    (["--once", "--listen", "127.0.0.1:0"], "--once ends after one push"),
    (["--push", "nowhere"], "'nowhere' is not a bucket"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_command_line_is_an_error(tmp_path, words, message):
    run_dir, _ = make_run(tmp_path)
    with pytest.raises(ConfigError, match=message):
        main([str(run_dir.root), *words])
    with pytest.raises(ConfigError, match="is not a run directory"):
        main([str(tmp_path / "none"), *words])


# The process serves and pushes together until SIGTERM, and writes what it did to metrics.jsonl.
@pytest.mark.process
def test_the_process_serves_and_pushes(tmp_path):
    run_dir, ref = make_run(tmp_path / "run")
    target = tmp_path / "bucket"
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.main", "weights", str(run_dir.root), "--listen", "127.0.0.1:0",
         "--push", target.as_uri()],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]

        async def pull() -> bytes | None:
            source = HttpSource(url, 100.0)
            try:
                piece = await source.read(ref.sha256, 40)
                async with asyncio.timeout(150):
                    while not (target / "manifests" / "v000001.manifest").exists():
                        await asyncio.sleep(0.05)
                return piece
            finally:
                await source.close()

        assert asyncio.run(pull()) == b"\x09" * 60
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 128 + signal.SIGTERM
        assert process.stdout is not None
        process.stdout.close()
