"""Versions through the store to a node's disk: bit for bit, by the way with the fewest bytes, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.errors import CanaryError, CorruptWeightsError, DeadlineError, LostWeightsError
from composer_prime.run.weights import Canary, ChunkRef, Manifest, WeightStore
from inference.engines.local.local_engine import LocalEngine
from inference.receiver import ChunkSource, FolderSource, Receiver, VersionFolder
from inference.snapshot import word_sum
from tests.engines.models import MAX_CONTEXT
from tests.inference.publisher import CANARY, RUN_ID
from trainer.weights.publish import VersionWriter

KEEP = 3
KEY = Ed25519PrivateKey.generate()


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode(raw: bytes) -> Manifest:
    return msgspec.msgpack.decode(raw, type=Manifest)


class Training:
    """Weights that change a little at each step, and the store that they are written to."""

    def __init__(
        self, root: Path, *, anchor_every: int = 4, dtype: torch.dtype = torch.bfloat16, threads: int = 1
    ) -> None:
        self.store = WeightStore(root, chunk_bytes=8192)
        self.anchor_every, self.dtype, self.threads = anchor_every, dtype, threads
        self.random = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(shape, generator=self.random).to(dtype)
            for name, shape in {"embed": (70, 64), "norm": (64,), "up": (96, 64), "none": (0, 4)}.items()
        }
        self.written: dict[int, tuple[Manifest, dict[str, torch.Tensor]]] = {}
        self.restart()

    def restart(self) -> None:
        """A new trainer process: it knows no version."""
        more = {"anchor_every": self.anchor_every, "threads": self.threads}
        self.writer = VersionWriter(self.store, KEY, "r", keep=KEEP, **more)

    def step(self, share: float = 0.01) -> None:
        for tensor in self.tensors.values():
            moved = torch.rand(tensor.shape, generator=self.random) < share
            tensor += (moved * 0.01 * torch.randn(tensor.shape, generator=self.random)).to(self.dtype)

    def publish(self, version: int) -> Manifest:
        described = Manifest(
            run_id="r", version=version, kind="anchor", dtype=str(self.dtype).removeprefix("torch."),
            chunks=[], tensors={}, canary=Canary(token_ids=[1, 2], logprobs=[-1.0]),
        )  # fmt: skip
        manifest = self.writer.write(described, self.tensors)
        self.store.put_manifest(version, encode(manifest))
        self.store.prune(KEEP, decode)
        self.written[version] = manifest, {name: tensor.clone() for name, tensor in self.tensors.items()}
        return manifest

    def train(self, versions: range, share: float = 0.01) -> Manifest:
        for version in versions:
            self.step(share)
            manifest = self.publish(version)
        return manifest


class Cut(ChunkSource):
    """A source that breaks off after some reads."""

    def __init__(self, store: WeightStore) -> None:
        self.inner, self.left = FolderSource(store), -1

    async def read(self, sha256: str, offset: int) -> bytes | None:
        if self.left == 0:
            raise DeadlineError("the link is gone")
        self.left -= 1
        piece = await self.inner.read(sha256, offset)
        return piece and piece[:1000]


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path / "weights")


@pytest.fixture
def open_node(training, tmp_path):
    with contextlib.ExitStack() as stack:

        def make(source=None) -> VersionFolder:
            node = VersionFolder(source or FolderSource(training.store), tmp_path)
            stack.callback(node.close)
            return node

        yield make


def fetch(node: VersionFolder, training: Training, version: int) -> int:
    """Bring a version to the node and compare every bit; return the bytes pulled."""
    manifest, expected = training.written[version]
    before = node.bytes_pulled
    tensors = asyncio.run(node.fetch(manifest))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name].view(torch.int16), tensor.view(torch.int16))
        assert torch.equal(torch.cat([block for _, block in tensors.blocks(name, 77)]), tensor.reshape(-1))
    node.settle(manifest)
    return node.bytes_pulled - before


def size_of(chunks: list[ChunkRef]) -> int:
    return sum(ref.size for ref in chunks)


# After one whole version the next ones are patches of it, and the fifth is whole again; it still has the patch from the
# anchor before. A node that follows pulls one patch a version, also over the new anchor.
def test_a_follower_pulls_patches_only(training, open_node):
    node = open_node()
    kinds = []
    for version in range(12):
        manifest = training.train(range(version, version + 1))
        kinds.append(manifest.kind)
        assert fetch(node, training, version) == size_of(manifest.patch if version else manifest.chunks)
        assert {path.name for path in node.path.iterdir()} == {ref.sha256 for ref in manifest.files}
    assert kinds == ["anchor", "delta", "delta", "delta"] * 3


# A node that joins at any version pulls one anchor and one patch; one that skipped versions pulls one patch.
def test_a_joiner_pulls_an_anchor_and_a_patch(tmp_path, open_node):
    training = Training(tmp_path / "far", anchor_every=60)
    training.train(range(2), share=0.001)
    slow = open_node(FolderSource(training.store))
    fetch(slow, training, 1)
    manifest = training.train(range(2, 51), share=0.001)
    assert fetch(slow, training, 50) == size_of(manifest.patch) < size_of(manifest.chunks) / 3
    assert fetch(open_node(FolderSource(training.store)), training, 50) == size_of(manifest.refs)


# With anchor_every = 1, and for another model, each version is whole.
def test_whole_versions_on_request_and_for_another_model(training, tmp_path):
    assert training.train(range(2)).kind == "delta"
    training.tensors["more"] = torch.ones(3, dtype=torch.bfloat16)
    assert training.publish(2).kind == "anchor"
    plain = Training(tmp_path / "plain", anchor_every=1)
    assert [plain.train(range(v, v + 1)).kind for v in range(3)] == ["anchor"] * 3 and not plain.written[2][0].patch


# A chunk of the anchor that the store lost or that was altered there: the next version is whole, and right, although
# it has that very chunk: steps are lost in the rounding of large values.
@pytest.mark.parametrize("data", [None, b"\x00" * 8192])
def test_the_trainer_notices_a_damaged_anchor(training, open_node, data):
    training.tensors = {"still": torch.full((8192,), 1e4, dtype=torch.bfloat16), **training.tensors}
    manifest = training.train(range(2))
    path = training.store.root / "chunks" / manifest.chunks[1].sha256
    path.unlink() if data is None else path.write_bytes(data)
    after = training.train(range(2, 3))
    assert after.kind == "anchor" and after.chunks[1] == manifest.chunks[1]
    fetch(open_node(), training, 2)


# A rewind gives known numbers to other weights: the anchor is not certain, so the next version is whole.
def test_a_rewind_does_not_mislead(training, open_node):
    node = open_node()
    training.train(range(4))
    fetch(node, training, 3)
    training.store.rewind(2)
    training.writer.forget()
    training.tensors = {name: tensor.clone() for name, tensor in training.written[2][1].items()}
    training.step(0.02)
    assert training.publish(3).kind == "anchor"
    training.train(range(4, 5))
    assert fetch(node, training, 4) >= size_of(training.written[4][0].chunks) / 2


# A patch that does not lead to the new anchor is noticed by the chunks' hashes, and the anchor is pulled.
@pytest.mark.parametrize("stream", ["other", "longer"])
def test_a_wrong_patch_falls_back_to_the_anchor(training, open_node, stream, caplog):
    node = open_node()
    training.train(range(4))
    fetch(node, training, 3)
    manifest = training.train(range(4, 5))
    patch = training.written[2][0].patch
    if stream == "longer":
        patch = training.store.put_chunks(b"".join(map(training.store.read, manifest.patch)) + b"more")
    training.written[4] = msgspec.structs.replace(manifest, patch=patch), training.written[4][1]
    assert manifest.kind == "anchor" and fetch(node, training, 4) > 0
    assert "weights v4 are pulled whole" in caplog.text


# A pulled patch that changes on the node's disk before it is used: the next try pulls it again.
def test_a_patch_that_the_disk_damaged_is_pulled_again(training, open_node):
    node = open_node()
    manifest = training.train(range(2))
    asyncio.run(node.pull("v1", manifest.patch))
    path = node.path_of(manifest.patch[0])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CorruptWeightsError):
        fetch(node, training, 1)
    assert fetch(node, training, 1) == size_of(manifest.patch)


# A damaged chunk of the version in use is pulled again alone: its patch may be gone elsewhere.
def test_a_repair_needs_no_patch_that_is_here(training, open_node):
    node = open_node()
    training.store.chunk_bytes = 1024
    manifest = training.train(range(2), share=0.1)
    fetch(node, training, 1)
    assert len(manifest.patch) > 1
    for ref in manifest.patch:
        (training.store.root / "chunks" / ref.sha256).unlink()
    node.path_of(manifest.chunks[0]).write_bytes(b"")
    node.drop_damaged(manifest.files)
    assert fetch(node, training, 1) == manifest.chunks[0].size


# What finds no room on the disk is an error with the remedy.
def test_no_room_on_the_disk(training, open_node, monkeypatch):
    node = open_node()
    manifest = training.train(range(1))

    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    ref, data = manifest.chunks[0], training.store.read(manifest.chunks[0])
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"weights v0 .* No space left on device; give this node room .* set TMPDIR"):
        node.write("weights v0", ref, data)
    assert not list(node.path.iterdir()) and not node.has(ref)


# What a killed process left of a chunk is removed, and so is what is not what its name says.
def test_only_whole_chunks_are_taken_over(tmp_path):
    names = [hashlib.sha256(data).hexdigest() for data in (b"whole", b"altered")]
    (tmp_path / f"{names[0]}.part").write_bytes(b"wh")
    (tmp_path / names[0]).write_bytes(b"whole")
    (tmp_path / names[1]).write_bytes(b"other")
    chunks = VersionFolder(None, tmp_path, kept=tmp_path)  # type: ignore[arg-type]
    assert [chunks.has(ChunkRef(name, 5)) for name in names] == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == names[:1]


# The thread of a pull that was given up may still write a chunk when the next pull does.
def test_threads_change_no_version(tmp_path):
    # However many threads sum, compare and write the chunks, anchors and patches are the same.
    one, four = (Training(tmp_path / str(count), threads=count) for count in (1, 4))
    for each in (one, four):
        each.train(range(6))
    assert {manifest.kind for manifest, _ in one.written.values()} == {"anchor", "delta"}
    assert all(one.written[version][0] == four.written[version][0] for version in range(6))


def test_two_threads_write_one_chunk(tmp_path):
    data = bytes(4 << 20)
    ref = ChunkRef(hashlib.sha256(data).hexdigest(), len(data))
    chunks = VersionFolder(None, tmp_path, kept=tmp_path)  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as threads:
        for writing in [threads.submit(chunks.write, "weights v0", ref, data) for _ in range(40)]:
            writing.result()
    assert chunks.read(ref, "weights v0") == data and len(list(tmp_path.iterdir())) == 1


# Patches that a signed manifest names but that are none are refused as well; the version in use stays.
@pytest.mark.parametrize("stream", [b"\xff" * 50, b"", bytes(2000)], ids=["noise", "nothing", "zeros"])
def test_signed_nonsense_is_refused(training, open_node, stream):
    node = open_node()
    training.train(range(2))
    fetch(node, training, 1)
    manifest = msgspec.structs.replace(training.train(range(2, 3)), patch=training.store.put_chunks(stream))
    for changes, named in (({}, ""), ({"dtype": "float8"}, "'float8'"), ({"kind": "guess"}, "'guess'")):
        if stream or not changes:
            with pytest.raises(CorruptWeightsError, match=named):
                asyncio.run(node.fetch(msgspec.structs.replace(manifest, **changes)))
    assert fetch(node, training, 1) == 0


# `prune` keeps the anchor and the patch of kept versions, and an anchor that is being pulled for a version that is
# no longer among the newest. What the trainer itself reads is no pull.
@pytest.mark.parametrize("pulled", [True, False])
def test_prune_spares_what_a_kept_version_needs(training, pulled):
    training.train(range(3))
    anchor = training.written[2][0].chunks
    if pulled:
        training.store.chunk(anchor[0].sha256, 0, 64)
    training.train(range(3, 9))
    assert training.written[4][0].kind == "anchor"
    for version in training.store.versions():
        for ref in training.written[version][0].refs:
            assert len(training.store.read(ref)) == ref.size
    assert {(training.store.root / "chunks" / ref.sha256).exists() for ref in anchor} == {pulled}


ACTIONS = st.sampled_from(["step", "dense", "still", "restart", "rewind", "resume", "fetch", "cut", "join"])


# Bit-exact after any sequence of steps small and large, restarts and rewinds of the trainer, pulls that break off, and
# versions that a node skips; hundreds of versions in all.
@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(ACTIONS, min_size=10, max_size=30), st.integers(0, 9))
def test_any_history_is_bit_exact(actions, cut_after):
    with tempfile.TemporaryDirectory() as name:
        training = Training(Path(name) / "weights")
        source = Cut(training.store)
        node = VersionFolder(source, Path(name))
        version = 0
        training.publish(0)
        for action in [*actions, "fetch"]:
            if action in ("step", "dense", "still"):
                training.step({"step": 0.01, "dense": 1.0, "still": 0.0}[action])
                version += 1
                training.publish(version)
            elif action == "restart":
                training.restart()
            elif action in ("rewind", "resume"):
                version, newest = training.store.versions()[0], training.written[version][0]
                training.store.rewind(version)
                training.writer.forget()
                if action == "resume":
                    training.writer.continue_from(newest)
                training.tensors = {key: value.clone() for key, value in training.written[version][1].items()}
            elif action == "join":
                node.close()
                node = VersionFolder(source, Path(name))
            elif action == "cut":
                source.left = cut_after
                with contextlib.suppress(DeadlineError):
                    fetch(node, training, version)
                source.left = -1
            else:
                fetch(node, training, version)
        node.close()


# The engine's own sums must be those that the trainer signed. An engine that loaded the old weights under the new
# number, and a file on the node's disk that changed after its hash was checked, are refused; the old version serves on.
# So it is where the engine computes in another type than the published one.
@pytest.mark.parametrize(("fault", "dtype"), [("old weights", "float32"), ("disk", "float32"), ("disk", "bfloat16")])
async def test_the_engine_must_hold_the_signed_sums(publisher, folder, config, reference, fault, dtype):
    engine = LocalEngine(folder, config.model_copy(update={"dtype": dtype}), MAX_CONTEXT)
    await engine.start()
    receiver = Receiver(engine, FolderSource(publisher.store), folder, canary_tolerance=100.0)

    def signed(version: int) -> bytes:
        sums = {name: f"{word_sum(tensor):x}" for name, tensor in reference.weights(version).items()}
        return publisher.publish(version, tensors=sums)

    async def load(version, tensors, begin=lambda: None):
        if fault == "old weights" and version == 2:
            tensors = reference.weights(1)
        elif version == 2:
            path = receiver.versions.path / publisher.manifest(2).chunks[-1].sha256
            path.write_bytes(path.read_bytes()[:-1] + b"\x00")
        await plain_load(version, tensors, begin)

    await receiver.install(signed(1), publisher.verify_key, RUN_ID)
    plain_load, engine.load_weights = engine.load_weights, load
    with pytest.raises(CanaryError, match="holds other values"):
        await receiver.install(signed(2), publisher.verify_key, RUN_ID)
    assert (receiver.version, engine.version) == (1, 1) and receiver.settled.is_set()
    engine.load_weights = plain_load
    await receiver.install(signed(2), publisher.verify_key, RUN_ID)
    assert (receiver.version, engine.version) == (2, 2)
    receiver.close()
    await engine.close()


# Going back is proven too: old weights that changed on the disk are pulled again, and an engine that does not take them
# ends the node.
@pytest.mark.parametrize("fault", ["disk", "engine"])
async def test_going_back_is_proven(engine, publisher, folder, reference, fault):
    receiver = Receiver(engine, FolderSource(publisher.store), folder, canary_tolerance=100.0)
    sums = {name: word_sum(tensor) for name, tensor in reference.weights(1).items()}
    first = publisher.publish(1, tensors={name: f"{value:x}" for name, value in sums.items()})
    await receiver.install(first, publisher.verify_key, RUN_ID)
    path = receiver.versions.path / publisher.manifest(1).chunks[-1].sha256
    whole, plain_load = path.read_bytes(), engine.load_weights
    if fault == "disk":
        path.write_bytes(whole[:-1] + b"\x00")

    async def load(version, tensors, begin=lambda: None):
        await plain_load(version, reference.weights(2) if fault == "engine" else tensors)

    engine.load_weights = load
    refused = publisher.publish(2, canary=Canary(token_ids=CANARY, logprobs=[math.nan] * (len(CANARY) - 1)))
    with pytest.raises(CanaryError if fault == "disk" else LostWeightsError, match="v2"):
        await receiver.install(refused, publisher.verify_key, RUN_ID)
    if fault == "disk":
        held = await engine.read_back(list(sums))
        assert sum(part.checksum for part in held) % 2**64 == sum(sums.values()) % 2**64
        assert path.read_bytes() == whole and receiver.version == 1
    assert receiver.rollbacks == 1 and receiver.settled.is_set() == (fault == "disk")
    receiver.close()


# After a resume the next version is what differs from the anchor of the newest one before: who has that anchor pulls no
# other. Later versions and anchors come as ever.
@pytest.mark.parametrize("checkpoint", [3, 5])
def test_a_resume_needs_no_snapshot(training, open_node, checkpoint):
    follower, behind = open_node(), open_node()
    training.train(range(5))
    fetch(behind, training, 4)
    training.train(range(5, 6))
    fetch(follower, training, 5)
    training.restart()
    training.writer.continue_from(training.written[5][0])
    training.store.rewind(checkpoint)
    training.tensors = {name: tensor.clone() for name, tensor in training.written[checkpoint][1].items()}
    manifest = training.publish(checkpoint)
    assert manifest.kind == "delta" and manifest.chunks == training.written[4][0].chunks
    for version in range(checkpoint, 9):
        manifest = training.train(range(version, version + 1)) if version > checkpoint else manifest
        for node in (follower, behind):
            assert fetch(node, training, version) <= size_of(manifest.patch)
    assert {manifest.kind for manifest, _ in training.written.values()} == {"anchor", "delta"}
