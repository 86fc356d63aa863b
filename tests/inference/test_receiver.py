"""Weights reach the engine only whole, signed and proven; whatever fails leaves the old version in use."""

from __future__ import annotations

import contextlib
import weakref

import msgspec
import pytest
import safetensors.torch
import torch

from composer_prime.errors import (
    CanaryError,
    CorruptWeightsError,
    DeadlineError,
    MisfitError,
    SignatureError,
    WireError,
)
from composer_prime.run.weights import CHUNK_BYTES, Canary, ChunkRef, sign
from inference.engines.local.local_engine import LocalEngine
from inference.receiver import FolderSource, Receiver
from inference.snapshot import Snapshot, save_snapshot, word_sum
from tests.engines.models import MAX_CONTEXT
from tests.engines.reference import Reference
from tests.inference.publisher import CANARY, RUN_ID, Publisher


@pytest.fixture
def receive(publisher, folder):
    """receive(engine, source) -> Receiver, closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(engine, source=None, tolerance=1e-3) -> Receiver:
            made = Receiver(engine, source or FolderSource(publisher.store), folder, canary_tolerance=tolerance)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def receiver(engine, receive):
    return receive(engine)


async def in_use(engine, reference) -> int:
    """The version whose scores the engine gives."""
    scores = torch.tensor(await engine.score(CANARY))
    errors = {version: (scores - reference.score(CANARY, version)).abs().max().item() for version in range(5)}
    return min(errors, key=errors.__getitem__)


async def install(receiver, publisher, signed):
    await receiver.install(signed, publisher.verify_key, RUN_ID)


async def test_a_published_version_comes_into_use(engine, receiver, publisher, reference):
    # Chunks are pulled, verified, swapped in and proven by the canary.
    await install(receiver, publisher, publisher.publish(1))
    assert (receiver.version, engine.version, await in_use(engine, reference)) == (1, 1, 1)
    assert receiver.canary_error < 1e-4
    await install(receiver, publisher, publisher.publish(3))
    assert (receiver.version, await in_use(engine, reference)) == (3, 3)


async def test_the_start_version_is_proven_not_pulled(engine, receiver, publisher, reference):
    # Version 0 is the model folder: its canary is scored, its chunks need not even exist.
    manifest = publisher.manifest(0)
    for ref in manifest.chunks:
        (publisher.store.root / "chunks" / ref.sha256).unlink()
    await install(receiver, publisher, sign(manifest, publisher.keys.signer()))
    assert receiver.version == 0 and receiver.canary_error < 1e-4


async def test_a_start_folder_of_other_weights_is_replaced(engine, receiver, publisher, reference):
    # A node whose folder is not the run's version 0 notices by the canary and loads the published one.
    manifest = msgspec.structs.replace(publisher.manifest(2), version=0)
    await install(receiver, publisher, sign(manifest, publisher.keys.signer()))
    assert receiver.version == 0 and await in_use(engine, reference) == 2


async def test_another_signature_is_refused(engine, receiver, publisher, reference):
    # A manifest that another key signed, of another run, or that is no manifest, changes nothing.
    await install(receiver, publisher, publisher.publish(1))
    with pytest.raises(SignatureError, match="signature"):
        await install(receiver, publisher, publisher.forge(2))
    with pytest.raises(SignatureError, match="run-2"):
        await install(receiver, publisher, publisher.publish(2, run_id="run-2"))
    for garbage in (b"", b"\x00" * 100, publisher.publish(2)[:-9]):
        with pytest.raises(WireError):
            await install(receiver, publisher, garbage)
    assert (receiver.version, await in_use(engine, reference)) == (1, 1)


@pytest.mark.parametrize("keep", [None, 1000], ids=["altered", "truncated"])
async def test_a_damaged_chunk_is_refused_then_mended(engine, receiver, publisher, reference, keep):
    # A chunk that is altered or cut short is found before anything is loaded; once mended, the same version installs.
    manifest = publisher.manifest(2)
    publisher.damage(manifest, 1, keep=keep)
    with pytest.raises(CorruptWeightsError, match="chunk"):
        await install(receiver, publisher, sign(manifest, publisher.keys.signer()))
    assert (receiver.version, await in_use(engine, reference)) == (0, 0)
    path = publisher.store.root / "chunks" / manifest.chunks[1].sha256
    path.unlink()
    await install(receiver, publisher, publisher.publish(2))
    assert await in_use(engine, reference) == 2


async def test_the_file_s_header_is_checked(engine, receiver, publisher, reference):
    # Chunks of no safetensors file are refused.
    header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    for noise in (
        b"\xff" * 5000,
        b"\x00",
        len(header).to_bytes(8, "little") + header + b"\0" * 15,
        len(header).to_bytes(8, "little") + header.replace(b"16", b"12") + b"\0" * 16,
        (2).to_bytes(8, "little") + b"[]",
    ):
        with pytest.raises(CorruptWeightsError, match="safetensors"):
            await install(receiver, publisher, publisher.publish(1, chunks=publisher.store.put_chunks(noise)))
    assert await in_use(engine, reference) == 0


@pytest.mark.parametrize("name", ["../escaped", "{folder}/escaped", "a" * 63, "A" * 64, "a" * 64 + "\n", "."])
async def test_a_chunk_name_that_leads_out_of_the_folder_is_refused(receiver, publisher, tmp_path, name):
    """A signed manifest writes no file elsewhere: a chunk's name is a hash, and nothing is pulled."""
    ref = ChunkRef(name.format(folder=tmp_path), 8)
    with pytest.raises(WireError, match="expected a sha256"):
        await install(receiver, publisher, publisher.publish(1, chunks=[ref]))
    assert not list(receiver.versions.path.iterdir()) and not list(tmp_path.glob("**/escaped"))


@pytest.mark.parametrize("size", [-1, CHUNK_BYTES + 1])
async def test_a_chunk_size_that_no_release_writes_is_refused(receiver, publisher, size):
    """The size that a manifest claims for a chunk cannot fill the disk."""
    with pytest.raises(WireError, match=f"{size} bytes"):
        await install(receiver, publisher, publisher.publish(1, chunks=[ChunkRef("a" * 64, size)]))


async def test_another_model_is_refused(engine, receiver, publisher, reference):
    # Tensors that do not fit the engine's model are refused, and the version before goes on.
    manifest = publisher.manifest(1)
    name = next(iter(manifest.tensors))
    tensors = {key: value for key, value in reference.weights(1).items() if key != name}
    chunks = publisher.store.put_chunks(safetensors.torch.save(tensors))
    names = {key: value for key, value in manifest.tensors.items() if key != name}
    with pytest.raises(MisfitError, match=name):
        await install(receiver, publisher, publisher.publish(1, chunks=chunks, tensors=names))
    assert (receiver.version, engine.version, await in_use(engine, reference)) == (0, 0, 0)
    # Nothing had changed, so nothing is taken back and no running answer is thrown away.
    assert receiver.rollbacks == 0 and receiver.settled.is_set()


@pytest.mark.parametrize("before", [0, 1])
async def test_a_failed_canary_brings_the_old_weights_back(engine, receiver, publisher, reference, before):
    # Weights that do not give the published logprobs are taken out again for the version before, or the folder's.
    if before:
        await install(receiver, publisher, publisher.publish(before))
    for logprobs in ([-1.0] * (len(CANARY) - 1), [float("nan")] * (len(CANARY) - 1), [-1.0]):
        canary = Canary(token_ids=CANARY, logprobs=logprobs)
        with pytest.raises(CanaryError, match="canary"):
            await install(receiver, publisher, publisher.publish(2, canary=canary))
        assert (receiver.version, engine.version, await in_use(engine, reference)) == (before, before, before)
    assert receiver.rollbacks == 3 and receiver.settled.is_set()
    await install(receiver, publisher, publisher.publish(2))
    assert await in_use(engine, reference) == 2


class Altered:
    """An engine with some methods replaced."""

    def __init__(self, inner: LocalEngine, **methods) -> None:
        self.inner, self.methods = inner, methods

    def __getattr__(self, name: str):
        return self.methods.get(name) or getattr(self.inner, name)


def no_score_once(inner: LocalEngine):
    """The first score does not come in time."""
    stuck: list[bool] = []

    async def score(token_ids: list[int]) -> list[float]:
        if not stuck:
            stuck.append(True)
            raise DeadlineError("the canary's scores did not come")
        return await inner.score(token_ids)

    return score


async def test_weights_that_could_not_be_proven_are_taken_out(engine, receive, publisher, reference):
    # A canary without an answer is no proof: the version before goes on, and what was sampled meanwhile is not used.
    receiver = receive(Altered(engine, score=no_score_once(engine)))
    signed = publisher.publish(2)
    with pytest.raises(DeadlineError):
        await install(receiver, publisher, signed)
    assert (receiver.version, engine.version, await in_use(engine, reference)) == (0, 0, 0)
    assert receiver.rollbacks == 1 and receiver.settled.is_set()
    await install(receiver, publisher, signed)
    assert (receiver.version, await in_use(engine, reference)) == (2, 2)


async def test_requests_count_as_refused_until_the_old_weights_are_in_use(engine, receive, publisher):
    """A request that starts while the old weights are loaded again has sampled with the refused ones."""
    seen = []

    async def load(version, tensors, begin=lambda: None):
        seen.append((version, receiver.rollbacks))
        await engine.load_weights(version, tensors)

    receiver = receive(Altered(engine, load_weights=load))
    with pytest.raises(CanaryError):
        await install(receiver, publisher, publisher.publish(1, canary=Canary(token_ids=CANARY, logprobs=[-1.0] * 7)))
    started_during_the_reload = dict(seen)[0]
    assert receiver.rollbacks > started_during_the_reload and receiver.settled.is_set()


async def test_a_chunk_that_the_node_s_disk_lost_is_pulled_again(engine, receive, publisher, reference):
    """A damaged file that old and new versions share fails the swap, the reload pulls it, and the next try passes."""
    receiver = receive(engine)
    await install(receiver, publisher, publisher.publish(1))
    signed = sign(msgspec.structs.replace(publisher.manifest(1), version=2), publisher.keys.signer())
    shared = publisher.manifest(1).chunks[3].sha256
    (receiver.versions.path / shared).write_bytes(b"")
    with pytest.raises(CorruptWeightsError, match=shared):
        await install(receiver, publisher, signed)
    assert (receiver.version, engine.version, await in_use(engine, reference)) == (1, 1, 1)
    assert receiver.rollbacks == 1 and receiver.settled.is_set()
    await install(receiver, publisher, signed)
    assert (receiver.version, engine.version) == (2, 2)


@pytest.fixture
def close_versions(publisher, folder):
    """A publisher whose versions differ as those of consecutive steps at a learning rate of 1e-6."""
    return Publisher(publisher.store.root, publisher.keys, Reference(folder, scale=1e-6))


async def test_answers_leave_until_the_first_weight_changes(engine, receive, publisher):
    """What an engine prepares for a swap, such as a file of the weights, holds back no answer."""
    seen = []

    async def load(version, tensors, begin=lambda: None):
        seen.append(receiver.settled.is_set())
        begin()
        seen.append(receiver.settled.is_set())
        await engine.load_weights(version, tensors)

    receiver = receive(Altered(engine, load_weights=load))
    await install(receiver, publisher, publisher.publish(1))
    assert seen == [True, False] and receiver.settled.is_set()


async def test_one_tensor_that_was_not_loaded_is_found(engine, receive, publisher):
    # All but one tensor are swapped: it is named, although the canary hardly shows it.
    name = "model.layers.1.mlp.up_proj.weight"

    async def load(version, tensors, begin=lambda: None):
        old = {part: tensors[part] if part != name else publisher.reference.weights(0)[name] for part in tensors}
        await engine.load_weights(version, old)

    receiver = receive(Altered(engine, load_weights=load), tolerance=50)
    with pytest.raises(CanaryError, match=rf"other values in {name} \(1 of "):
        await install(receiver, publisher, publisher.publish(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_small_steps_are_proven(folder, config, receive, close_versions, dtype):
    # Three versions at a learning rate of 1e-6 pass, also where the engine's rounding is more than they differ by.
    engine = LocalEngine(folder, config.model_copy(update={"dtype": dtype}), MAX_CONTEXT)
    await engine.start()
    receiver = receive(engine, tolerance=0.5)
    for version in range(3):
        await install(receiver, close_versions, close_versions.publish(version))
    assert receiver.version == 2 and receiver.rollbacks == 0
    await engine.close()


class Watched(Snapshot):
    """A snapshot that counts the blocks that are in memory."""

    def __init__(self, inner: Snapshot) -> None:
        vars(self).update(vars(inner))
        self.alive: set[int] = set()
        self.most = self.read = 0

    def blocks(self, name: str, elements: int = 0):
        for start, values in super().blocks(name, elements):
            self.read += values.nbytes
            self.alive.add(self.read)
            weakref.finalize(values, self.alive.discard, self.read)
            self.most = max(self.most, len(self.alive))
            yield start, values


async def test_a_swap_holds_a_block_at_a_time(engine, receive, publisher):
    # While a second version comes in, no more than two blocks of it are in memory at any moment, and none afterwards.
    seen: list[Watched] = []

    async def load(version, tensors, begin=lambda: None):
        seen.append(Watched(tensors))
        await engine.load_weights(version, seen[-1])

    receiver = receive(Altered(engine, load_weights=load))
    for version in (1, 2):
        await install(receiver, publisher, publisher.publish(version))
    for watched in seen:
        assert watched.most <= 2 and not watched.alive
        assert watched.read == sum(tensor.nbytes for tensor in publisher.reference.weights(2).values())


def test_blocks_join_to_the_tensor(tmp_path):
    # Blocks of any size, over chunk borders, are the tensor; a file that ends early is refused.
    tensors = {"a": torch.randn(7, 5), "empty": torch.ones(0, 3), "b": torch.randn(11).bfloat16(), "c": torch.tensor(2)}
    save_snapshot(tensors, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    assert safetensors.torch.load(whole).keys() == tensors.keys()
    parts = []
    for start in range(0, len(whole), 100):
        parts.append((tmp_path / f"part{start}", len(whole[start : start + 100])))
        parts[-1][0].write_bytes(whole[start : start + 100])
    read = Snapshot("parts", [parts])
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for elements in (1, 4, 1000):
            assert torch.equal(torch.cat([block for _, block in read.blocks(name, elements)]), tensor.reshape(-1))
        assert word_sum(read[name]) == sum(word_sum(block) for _, block in read.blocks(name, 3)) % 2**64
    parts[-1][0].write_bytes(b"")
    with pytest.raises(CorruptWeightsError, match="cannot be read from"):
        [read[name] for name in read]
