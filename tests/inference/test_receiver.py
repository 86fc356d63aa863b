"""Weights reach the engine only whole, signed and proven; whatever fails leaves the old version in use."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest
import safetensors.torch
import torch

from composer_prime.errors import (
    CanaryError,
    CorruptWeightsError,
    DeadlineError,
    SignatureError,
    WeightError,
    WireError,
)
from composer_prime.run.weights import Canary, sign
from composer_prime.wire.node import Sampling
from inference.engines.local.engine import LocalEngine
from inference.receiver import FolderSource, Receiver, tensor_sha256
from tests.inference.publisher import CANARY, RUN_ID


@pytest.fixture
def receiver(engine, publisher, folder):
    return Receiver(engine, FolderSource(publisher.store), folder, canary_tolerance=1e-3)


def in_use(loop, engine, reference) -> int:
    """The version whose scores the engine gives."""
    scores = torch.tensor(loop.run(engine.score(CANARY)))
    errors = {version: (scores - reference.score(CANARY, version)).abs().max().item() for version in range(5)}
    return min(errors, key=errors.__getitem__)


def install(loop, receiver, publisher, signed):
    loop.run(receiver.install(signed, publisher.verify_key, RUN_ID))


def test_a_published_version_comes_into_use(loop, engine, receiver, publisher, reference):
    # Chunks are pulled, verified, swapped in and proven by the canary.
    install(loop, receiver, publisher, publisher.publish(1))
    assert (receiver.version, engine.version, in_use(loop, engine, reference)) == (1, 1, 1)
    assert receiver.canary_error < 1e-4
    install(loop, receiver, publisher, publisher.publish(3))
    assert (receiver.version, in_use(loop, engine, reference)) == (3, 3)


def test_the_start_version_is_proven_not_pulled(loop, engine, receiver, publisher, reference):
    # Version 0 is the model folder: its canary is scored, its chunks need not even exist.
    manifest = publisher.manifest(0)
    for ref in manifest.chunks:
        (publisher.store.root / "chunks" / ref.sha256).unlink()
    install(loop, receiver, publisher, sign(manifest, publisher.keys.signer()))
    assert receiver.version == 0 and receiver.canary_error < 1e-4


def test_a_start_folder_of_other_weights_is_replaced(loop, engine, receiver, publisher, reference):
    # A node whose folder is not the run's version 0 notices by the canary and loads the published one.
    manifest = msgspec.structs.replace(publisher.manifest(2), version=0)
    install(loop, receiver, publisher, sign(manifest, publisher.keys.signer()))
    assert receiver.version == 0 and in_use(loop, engine, reference) == 2


def test_going_back_to_a_lower_version_works(loop, engine, receiver, publisher, reference):
    # A run that resumes from a checkpoint publishes a lower version than the node has.
    install(loop, receiver, publisher, publisher.publish(3))
    install(loop, receiver, publisher, publisher.publish(1))
    assert (receiver.version, engine.version, in_use(loop, engine, reference)) == (1, 1, 1)


def test_another_signature_is_refused(loop, engine, receiver, publisher, reference):
    # A manifest that another key signed, of another run, or that is no manifest, changes nothing.
    install(loop, receiver, publisher, publisher.publish(1))
    with pytest.raises(SignatureError, match="signature"):
        install(loop, receiver, publisher, publisher.forge(2))
    with pytest.raises(SignatureError, match="run-2"):
        install(loop, receiver, publisher, publisher.publish(2, run_id="run-2"))
    for garbage in (b"", b"\x00" * 100, publisher.publish(2)[:-9]):
        with pytest.raises(WireError):
            install(loop, receiver, publisher, garbage)
    assert (receiver.version, in_use(loop, engine, reference)) == (1, 1)


@pytest.mark.parametrize("keep", [None, 1000], ids=["altered", "truncated"])
def test_a_damaged_chunk_is_refused_then_mended(loop, engine, receiver, publisher, reference, keep):
    # A chunk that is altered or cut short is found before anything is loaded; once mended, the same version installs.
    manifest = publisher.manifest(2)
    publisher.damage(manifest, 1, keep=keep)
    with pytest.raises(CorruptWeightsError, match="chunk"):
        install(loop, receiver, publisher, sign(manifest, publisher.keys.signer()))
    assert (receiver.version, in_use(loop, engine, reference)) == (0, 0)
    path = publisher.store.root / "chunks" / manifest.chunks[1].sha256
    path.unlink()
    install(loop, receiver, publisher, publisher.publish(2))
    assert in_use(loop, engine, reference) == 2


def test_equal_chunks_are_pulled_once(loop, engine, receiver, publisher, reference):
    # Large tensors of zeros make chunks with one hash: each is pulled once, and the file is whole.
    zeros = {name: torch.zeros_like(tensor) for name, tensor in reference.weights(1).items()}
    data = safetensors.torch.save(zeros)
    header = 8 + int.from_bytes(data[:8], "little")
    chunks = publisher.store.put_chunks(data[:header])
    for start in range(header, len(data), 100_000):
        chunks += publisher.store.put_chunks(data[start : start + 100_000])
    assert len({ref.sha256 for ref in chunks}) <= 3 < len(chunks)
    vocabulary = reference.weights(1)["model.embed_tokens.weight"].shape[0]
    canary = Canary(token_ids=CANARY, logprobs=[-math.log(vocabulary)] * (len(CANARY) - 1))
    hashes = {name: tensor_sha256(tensor) for name, tensor in zeros.items()}
    install(loop, receiver, publisher, publisher.publish(1, chunks=chunks, tensors=hashes, canary=canary))
    assert receiver.version == 1 and receiver.canary_error < 1e-5


def test_a_pruned_chunk_is_named(loop, receiver, publisher):
    # A chunk that the source does not have is an error that names it.
    manifest = publisher.manifest(2)
    (publisher.store.root / "chunks" / manifest.chunks[2].sha256).unlink()
    with pytest.raises(CorruptWeightsError, match=manifest.chunks[2].sha256):
        install(loop, receiver, publisher, sign(manifest, publisher.keys.signer()))


def test_tensor_hashes_and_names_are_checked(loop, engine, receiver, publisher, reference):
    # Chunks that match while a tensor's hash or name does not are refused; so are chunks that are no safetensors file.
    manifest = publisher.manifest(1)
    name = next(iter(manifest.tensors))
    wrong = {**manifest.tensors, name: "0" * 64}
    with pytest.raises(CorruptWeightsError, match=name):
        install(loop, receiver, publisher, publisher.publish(1, tensors=wrong))
    with pytest.raises(CorruptWeightsError, match="strange"):
        install(loop, receiver, publisher, publisher.publish(1, tensors={**manifest.tensors, "strange": "0" * 64}))
    noise = publisher.store.put_chunks(b"\xff" * 5000)
    with pytest.raises(CorruptWeightsError, match="safetensors"):
        install(loop, receiver, publisher, publisher.publish(1, chunks=noise))
    assert in_use(loop, engine, reference) == 0


def test_another_model_is_refused(loop, engine, receiver, publisher, reference):
    # Tensors that do not fit the engine's model are refused, and the version before goes on.
    manifest = publisher.manifest(1)
    name = next(iter(manifest.tensors))
    tensors = {key: value for key, value in reference.weights(1).items() if key != name}
    chunks = publisher.store.put_chunks(safetensors.torch.save(tensors))
    hashes = {key: value for key, value in manifest.tensors.items() if key != name}
    with pytest.raises(WeightError, match=name):
        install(loop, receiver, publisher, publisher.publish(1, chunks=chunks, tensors=hashes))
    assert (receiver.version, engine.version, in_use(loop, engine, reference)) == (0, 0, 0)


@pytest.mark.parametrize("before", [0, 1])
def test_a_failed_canary_brings_the_old_weights_back(loop, engine, receiver, publisher, reference, before):
    # Weights that do not give the published logprobs are taken out again for the version before, or the folder's.
    if before:
        install(loop, receiver, publisher, publisher.publish(before))
    for logprobs in ([-1.0] * (len(CANARY) - 1), [float("nan")] * (len(CANARY) - 1), [-1.0]):
        canary = Canary(token_ids=CANARY, logprobs=logprobs)
        with pytest.raises(CanaryError, match="canary"):
            install(loop, receiver, publisher, publisher.publish(2, canary=canary))
        assert (receiver.version, engine.version, in_use(loop, engine, reference)) == (before, before, before)
    assert receiver.rollbacks == 3 and receiver.settled.is_set()
    install(loop, receiver, publisher, publisher.publish(2))
    assert in_use(loop, engine, reference) == 2


class Stuck:
    """An engine whose canary does not come back in time, once."""

    def __init__(self, inner: LocalEngine) -> None:
        self.inner, self.stuck = inner, True
        self.load_weights = inner.load_weights

    @property
    def version(self) -> int:
        return self.inner.version

    async def score(self, token_ids: list[int]) -> list[float]:
        if self.stuck:
            self.stuck = False
            raise DeadlineError("the canary's scores did not come")
        return await self.inner.score(token_ids)


def test_weights_that_could_not_be_proven_are_taken_out(loop, engine, publisher, folder, reference):
    # A canary without an answer is no proof: the version before goes on, and what was sampled meanwhile is not used.
    receiver = Receiver(Stuck(engine), FolderSource(publisher.store), folder, canary_tolerance=1e-3)
    signed = publisher.publish(2)
    with pytest.raises(DeadlineError):
        install(loop, receiver, publisher, signed)
    assert (receiver.version, engine.version, in_use(loop, engine, reference)) == (0, 0, 0)
    assert receiver.rollbacks == 1 and receiver.settled.is_set()
    install(loop, receiver, publisher, signed)
    assert (receiver.version, in_use(loop, engine, reference)) == (2, 2)


class Flaky:
    """A source that gives small pieces and fails now and then."""

    def __init__(self, inner: FolderSource, fail_after: int) -> None:
        self.inner, self.left, self.offsets = inner, fail_after, []

    async def read(self, sha256: str, offset: int) -> bytes | None:
        self.offsets.append((sha256, offset))
        if self.left == 0:
            raise DeadlineError("the link is gone")
        self.left -= 1
        piece = await self.inner.read(sha256, offset)
        return piece and piece[:50_000]


def test_a_pull_resumes_where_it_stopped(loop, engine, publisher, folder, reference):
    # After a lost link the next try asks for the bytes that are missing, not for those that came.
    source = Flaky(FolderSource(publisher.store), fail_after=13)
    receiver = Receiver(engine, source, folder, canary_tolerance=1e-3)
    signed = publisher.publish(2)
    with pytest.raises(DeadlineError):
        install(loop, receiver, publisher, signed)
    source.left, before = -1, len(source.offsets)
    install(loop, receiver, publisher, signed)
    whole = sum(-(-ref.size // 50_000) for ref in publisher.manifest(2).chunks)
    in_flight = 4
    assert len(source.offsets) - before <= whole - 13 + in_flight
    assert in_use(loop, engine, reference) == 2


def test_running_requests_survive_the_install(loop, engine, receiver, publisher):
    # A request that runs while weights are installed ends normally and shows both versions.
    async def scenario():
        work = asyncio.ensure_future(
            engine.generate("r", [5, 6, 7], Sampling(max_tokens=240, seed=1, ignore_eos=True), "s")
        )
        await asyncio.sleep(0.05)
        await receiver.install(publisher.publish(1), publisher.verify_key, RUN_ID)
        return await work

    done = loop.run(scenario())
    assert len(done.token_ids) == 240 and {span.version for span in done.version_spans} <= {0, 1}
