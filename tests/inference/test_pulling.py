"""From an enrollment to a model folder on the disk: what is cut goes on, what is wrong is refused."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import pytest
import safetensors.torch
import torch

from composer_prime.errors import CorruptWeightsError, DeadlineError, WireError
from composer_prime.run.weights import ChunkRef, ModelFile, ModelFiles, sign
from composer_prime.wire.node_messages import Enrolled
from inference import pulling
from inference.enrolling import NodeState
from inference.pulling import pull_files, pull_model
from inference.receiver import ChunkSource, FolderSource
from tests.gateway.gateway_made import invite_for

PIECE = 60_000


class CutSource(ChunkSource):
    """The run's store and model folder behind a link that breaks after so many small pieces."""

    def __init__(self, store, files: dict[str, bytes], left: int = 1 << 60) -> None:
        self.folder, self.files, self.left = FolderSource(store), files, left
        self.got: dict[str, int] = {}

    async def read(self, sha256: str, offset: int) -> bytes | None:
        if not self.left:
            raise ConnectionResetError("cut")
        self.left -= 1
        data = self.files.get(sha256)
        piece = await self.folder.read(sha256, offset) if data is None else data[offset:]
        if piece is not None:
            piece = piece[:PIECE]
            self.got[sha256] = self.got.get(sha256, 0) + len(piece)
        return piece


@pytest.fixture
def small_files(folder):
    """The small files of the model folder, by their hash."""
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".json", ".jinja", ".txt")
    }


@pytest.fixture
def source(publisher, small_files):
    """A link that has all of the run's chunks and small files."""
    return CutSource(publisher.store, {ref_of(data).sha256: data for data in small_files.values()})


@pytest.fixture
def invite(keys):
    return invite_for(keys)


@pytest.fixture
def enrolled(keys, small_files):
    """What the gateway answers, with these model files and this manifest."""

    def make(manifest: bytes, files: dict[str, bytes] = small_files) -> Enrolled:
        listed = [ModelFile(name, [ref_of(data)]) for name, data in files.items()]
        return Enrolled(
            node_id="box",
            model=sign(ModelFiles(run_id="run-1", files=listed), keys.signer()),
            manifest=manifest,
            max_context=64,
            inference=b"{}",
        )

    return make


def ref_of(data: bytes) -> ChunkRef:
    return ChunkRef(hashlib.sha256(data).hexdigest(), len(data))


def test_a_killed_pull_goes_on(publisher, invite, enrolled, source, small_files, tmp_path, monkeypatch):
    """Each start pulls what the ones before lacked; only a chunk in flight comes twice. The folder is the version's."""
    monkeypatch.setattr("inference.receiver._CHUNKS_AT_ONCE", 1)
    signed, manifest = publisher.publish(3), publisher.manifest(3)
    state = NodeState(tmp_path / "state", invite)
    cuts, source.left = 0, 9
    while True:
        try:
            asyncio.run(pull_model(source, state, enrolled(signed)))
            break
        except ConnectionResetError:
            cuts, source.left = cuts + 1, 9
            assert cuts < 100
    sizes = {ref.sha256: ref.size for ref in manifest.chunks}
    twice = sum(source.got[sha256] - size for sha256, size in sizes.items())
    assert cuts >= 3 and 0 <= twice <= cuts * max(sizes.values())
    assert all((state.model / name).read_bytes() == data for name, data in small_files.items())
    held, weights = safetensors.torch.load_file(state.model / "model.safetensors"), publisher.reference.weights(3)
    assert held.keys() == weights.keys() and all(torch.equal(held[name], weights[name]) for name in weights)
    before = dict(source.got)
    asyncio.run(pull_model(source, state, enrolled(signed)))  # a restart pulls nothing
    assert source.got == before
    second = NodeState(tmp_path / "state", invite, 1)  # nor does another node of the machine
    asyncio.run(pull_model(source, second, enrolled(signed)))
    assert source.got == before


def test_the_models_own_files_come_from_the_gateway(publisher, invite, enrolled, source, small_files, tmp_path):
    """No copy of the weight store has them, so none is asked and waited for."""
    signed = publisher.publish(1)
    state = NodeState(tmp_path / "state", invite)
    copy = CutSource(publisher.store, {})
    asyncio.run(pull_model(copy, state, enrolled(signed), source))
    refs, small = publisher.manifest(1).refs, {ref_of(data).sha256 for data in small_files.values()}
    assert (
        source.got.keys() >= small and sum(source.got.get(ref.sha256, 0) for ref in refs) <= 2
    )  # a byte says it is used
    assert copy.got.keys() == {ref.sha256 for ref in refs}


def test_what_was_damaged_on_the_disk_is_pulled_again(publisher, invite, enrolled, source, small_files, tmp_path):
    signed, manifest = publisher.publish(3), publisher.manifest(3)
    state = NodeState(tmp_path, invite)
    asyncio.run(pull_model(source, state, enrolled(signed)))
    damaged = state.chunks / manifest.chunks[0].sha256
    damaged.write_bytes(b"x" * manifest.chunks[0].size)
    (state.model / "config.json").write_bytes(b"{}")
    source.got.clear()
    asyncio.run(pull_model(source, state, enrolled(signed)))
    config = ref_of(small_files["config.json"])
    assert source.got == {manifest.chunks[0].sha256: manifest.chunks[0].size, config.sha256: config.size}
    assert (state.model / "config.json").read_bytes() == small_files["config.json"]


@pytest.mark.parametrize(("last", "is_torn"), [(4, True), (0, False)])
def test_a_weight_file_is_made_anew(publisher, invite, enrolled, source, tmp_path, last, is_torn):
    """One that lost bytes, as after a power cut: its mark has its size, so it is not taken for whole.

    Engines take a folder for version 0, so one that was made of a later version is none.
    """
    state = NodeState(tmp_path, invite)
    weights = state.model / "model.safetensors"
    asyncio.run(pull_model(source, state, enrolled(publisher.publish(3))))
    if is_torn:
        weights.write_bytes(weights.read_bytes()[:-100])
    asyncio.run(pull_model(source, state, enrolled(publisher.publish(last))))
    held = safetensors.torch.load_file(weights)
    assert all(torch.equal(held[name], values) for name, values in publisher.reference.weights(last).items())


def test_versions_that_are_adapters_bring_the_model_they_are_added_to(
    publisher, invite, enrolled, small_files, folder, tmp_path
):
    """Their base is no version, so it comes as a model file; without one the run cannot be joined."""
    signed = sign(publisher.adapters(2), publisher.keys.signer())
    weights = (folder / "model.safetensors").read_bytes()
    files = small_files | {"model.safetensors": weights}
    source = CutSource(publisher.store, {ref_of(data).sha256: data for data in files.values()})
    state = NodeState(tmp_path, invite)
    asyncio.run(pull_model(source, state, enrolled(signed, files)))
    assert (state.model / "model.safetensors").read_bytes() == weights
    with pytest.raises(WireError, match="are adapters, and its gateway has no copy of the model"):
        asyncio.run(pull_model(source, NodeState(tmp_path / "other", invite), enrolled(signed)))


class Faltering(CutSource):
    """A link that fails at every other read."""

    reads = 0

    async def read(self, sha256: str, offset: int) -> bytes | None:
        self.reads += 1
        if self.reads % 2:
            raise DeadlineError("nothing came")
        return await super().read(sha256, offset)


def test_a_link_that_falters_brings_a_long_file(publisher, invite, enrolled, tmp_path, monkeypatch):
    """What came of a model file is progress: more failures than are borne in a row do not end the pull."""
    monkeypatch.setattr(pulling, "_RETRY_S", 0.0)
    parts = [bytes([number]) * 1000 for number in range(2 * pulling._TRIES)]
    made, state = enrolled(publisher.publish(1)), NodeState(tmp_path, invite)
    files = [ModelFile("tokenizer.json", [ref_of(part) for part in parts]), ModelFile("empty.txt", [])]
    model = sign(ModelFiles(run_id="run-1", files=files), publisher.keys.signer())
    made = msgspec.structs.replace(made, model=model)
    link = Faltering(publisher.store, {ref_of(part).sha256: part for part in parts})
    asyncio.run(pull_model(CutSource(publisher.store, {}), state, made, link))
    assert (state.model / "tokenizer.json").read_bytes() == b"".join(parts)
    assert (state.model / "empty.txt").read_bytes() == b""


def test_a_wrong_model_file_is_refused(tmp_path, publisher, invite, monkeypatch):
    """Its hash is looked at before it is in the folder."""
    monkeypatch.setattr(pulling, "_RETRY_S", 0.0)
    state = NodeState(tmp_path, invite)
    state.model.mkdir(parents=True)
    source = CutSource(publisher.store, {"0" * 64: b"x" * 1000})
    with pytest.raises(CorruptWeightsError, match=r"tokenizer\.json: chunk 0000.* differs from its hash"):
        asyncio.run(pull_files(source, [ModelFile("tokenizer.json", [ChunkRef("0" * 64, 1000)])], state))
    assert not (state.model / "tokenizer.json").exists()
