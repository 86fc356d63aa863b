"""Versions that hold adapters alone: a node adds them to its own base."""

import msgspec
import pytest
import safetensors.torch
import torch

from composer_prime.errors import CorruptWeightsError, MisfitError
from composer_prime.run.weights import sign
from inference.receiver import FolderSource, Receiver
from tests.inference.publisher import CANARY, RUN_ID


@pytest.fixture
def receiver(engine, publisher, folder):
    made = Receiver(engine, FolderSource(publisher.store), folder, canary_tolerance=1e-3)
    yield made
    made.close()


async def install(receiver, publisher, manifest) -> None:
    signed = sign(manifest, publisher.keys.signer())
    await receiver.install(signed, publisher.verify_key, RUN_ID)


async def scores(engine) -> torch.Tensor:
    return torch.tensor(await engine.score(CANARY))


# Adapters are added to the model folder's tensors: the engine then scores as the merged model, and the next version,
# whole or adapters again, replaces them instead of adding to them.
async def test_adapters_are_added_to_the_base(engine, receiver, publisher, reference):
    for version in (1, 2):
        manifest = publisher.adapters(version)
        await install(receiver, publisher, manifest)
        loaded = await scores(engine)
        assert (loaded - torch.tensor(manifest.canary.logprobs)).abs().max() < 1e-4
        assert (loaded - reference.score(CANARY, 0)).abs().max() > 1e-2 and receiver.version == version
    await install(receiver, publisher, publisher.manifest(3))
    assert (await scores(engine) - reference.score(CANARY, 3)).abs().max() < 1e-4


# Adapters of another model, or of a kind that this release does not know, are refused; the old weights stay in use.
@pytest.mark.parametrize(
    ("change", "error"), [("name", MisfitError), ("shape", MisfitError), ("kind", CorruptWeightsError)]
)
async def test_adapters_of_another_model(engine, receiver, publisher, reference, change, error):
    manifest = publisher.adapters(1)
    if change == "name":
        manifest = msgspec.structs.replace(manifest, tensors=manifest.tensors | {"model.extra": ""})
    if change == "shape":
        name = "model.layers.0.self_attn.q_proj.weight"
        factors = {f"{name}.lora_A": torch.zeros(2, 7), f"{name}.lora_B": torch.zeros(128, 2)}
        chunks = publisher.store.put_chunks(safetensors.torch.save(factors))
        manifest = msgspec.structs.replace(manifest, chunks=chunks)
    if change == "kind":
        manifest = msgspec.structs.replace(manifest, kind="unknown")
    with pytest.raises(error, match=r"use the same model\.path|use one release"):
        await install(receiver, publisher, manifest)
    assert receiver.version == 0 and (await scores(engine) - reference.score(CANARY, 0)).abs().max() < 1e-4
