"""Adapters: what is published is the adapted policy, with fused experts and adapted routers too."""

from __future__ import annotations

import asyncio

import pytest
import torch
import transformers
from safetensors.torch import load_file
from small_runs import make_samples, rows_of
from step_peer import StepPeer
from test_publish import published, train_once
from test_ranks import difference, moved
from transformers import AutoTokenizer

from composer_prime.config.inference import InferenceConfig
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from inference.engines.local.local_engine import LocalEngine
from inference.receiver import FolderSource, Receiver
from trainer.model.adapters import factors
from trainer.model.build import build_policy
from trainer.model.policy_model import adapters_off
from trainer.weights.publish import Publisher, export

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8}  # fmt: skip
QWEN3_MOE = ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16})
FAMILIES = {
    "experts": QWEN3_MOE,
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "dense": ("Qwen3", {}),
}


@pytest.fixture
def folder_of(tmp_path, model_folder):
    """folder_of((family, values)) -> a folder with a random model and the tokenizer of `model_folder`."""

    def make(family: tuple[str, dict]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family[0]}Config")(**SMALL | family[1])
        folder = tmp_path / f"model-{family[0]}"
        getattr(transformers, f"{family[0]}ForCausalLM")(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_published_logits_are_the_adapted_policy_s(make_run, folder_of, world, family):
    # A model folder with the published tensors gives the trained policy's log-probabilities to 1e-5, under every linear
    # layer adapted: in a mixture of experts these include the fused expert tensors. So does the canary.
    folder = folder_of(FAMILIES[family])
    run = make_run(trainer={"lora": {"rank": 4}, "optim": {"lr": 1e-2}})
    policy = train_once(run, folder, world)
    publisher = Publisher(run.config, run.dir, "run", folder, world, None)
    publisher.publish(policy, 3)
    publisher.settle()
    manifest, tensors = published(run, 3, folder)
    start = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start.save_pretrained(folder.with_name("published"), state_dict=tensors, save_original_format=False)
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder.with_name("published"), dtype=torch.float32)
    sample = make_samples(1, 1)[0]
    (row,) = rows_of([sample], world.device)
    with torch.no_grad():
        trained = policy(row).logprobs_R
        expected, before = (
            model(input_ids=row.input_ids).logits[0, row.source_R].log_softmax(-1).gather(1, row.targets_R[:, None])
            for model in (lm, start)
        )
        ids = torch.tensor([manifest.canary.token_ids])
        canary = lm(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    assert (trained - expected.squeeze(1)).abs().max() < 1e-5 and (trained - before.squeeze(1)).abs().max() > 1e-3
    assert (canary.squeeze(1) - torch.tensor(manifest.canary.logprobs)).abs().max() < 1e-5


def test_adapted_experts_scaled_off_are_the_base(make_run, folder_of, world):
    # adapters_off reaches the adapters of fused experts and of routers as well; after it they count as before.
    folder = folder_of(QWEN3_MOE)
    adapted = make_run(trainer={"lora": {"rank": 4}, "optim": {"lr": 1e-2}})
    policy, plain = train_once(adapted, folder, world), build_policy(make_run("plain").config, folder, world)
    (row,) = rows_of(make_samples(1, 3), world.device)
    with torch.no_grad(), adapters_off(policy):
        assert (policy(row).logprobs_R - plain(row).logprobs_R).abs().max() < 1e-6
    with torch.no_grad():
        assert (policy(row).logprobs_R - plain(row).logprobs_R).abs().max() > 1e-3


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_publish_the_experts_of_one(make_run, folder_of):
    # Shards cut the factors of fused experts apart. Two ranks still end with the merged weights of one, to 1e-5.
    folder = folder_of(("Qwen3Moe", QWEN3_MOE[1] | {"num_experts": 3}))
    runs = {}
    for ranks in (1, 2):
        settings = {"model": {"path": str(folder)}, "trainer": {"lora": {"rank": 4}, "optim": {"lr": 1e-2}}}
        run = runs[ranks] = make_run(f"ranks-{ranks}", run={"max_steps": 2}, **settings)
        with StepPeer(run.dir, make_samples, max_steps=2):
            codes, outputs = run.train(ranks)
        assert codes == [0] * ranks, "\n".join(outputs)
    assert difference(runs[1], runs[2]) < 1e-5 and moved(runs[1]) > 1e-3


# A node that adds the published factors to its base holds the very bits of the merged model that the trainer exports,
# in bfloat16 too. The version has the factors' bytes alone.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_on_a_node_give_the_exported_model(make_run, folder_of, world, dtype):
    folder = folder_of(FAMILIES["dense"])
    run = make_run(inference={"dtype": dtype}, trainer={"lora": {"rank": 4}, "optim": {"lr": 1e-2}})
    policy = train_once(run, folder, world)
    publisher = Publisher(run.config, run.dir, "run", folder, world, None)
    size = publisher.publish(policy, 3)
    publisher.settle()
    _, tensors = published(run, 3, folder)
    export(policy, run.config, folder, run.dir.final, world, publisher.dtype)
    final = load_file(run.dir.final / "model.safetensors")
    assert tensors.keys() == final.keys() and all(tensors[name].equal(final[name]) for name in final)
    base = load_file(folder / "model.safetensors")
    assert any(not tensors[name].equal(base[name].to(tensors[name].dtype)) for name in base)
    assert (
        size == 4 * sum(factor.numel() for factor in factors(policy.lm).values()) < sum(map(torch.numel, base.values()))
    )


# A version of mixed experts, whose adapters are no plain factors, is published merged.
def test_adapted_experts_are_published_merged(make_run, folder_of, world):
    folder = folder_of(QWEN3_MOE)
    run = make_run(trainer={"lora": {"rank": 4}})
    publisher = Publisher(run.config, run.dir, "run", folder, world, None)
    publisher.publish(build_policy(run.config, folder, world), 0)
    publisher.settle()
    assert published(run, 0)[0].kind == "anchor"


# A node on the local engine swaps to a version of mixed experts, which is published unfused, reads each tensor back and
# gives the trainer's log-probabilities to 1e-5. So do full weights and merged adapters.
@pytest.mark.parametrize("family", ["experts", "mixtral"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_node_swaps_to_mixed_experts(make_run, folder_of, world, family, lora):
    folder = folder_of(FAMILIES[family])
    run = make_run(trainer={"lora": lora, "optim": {"lr": 1e-2}})
    publisher = Publisher(run.config, run.dir, "run", folder, world, None)
    policy = train_once(run, folder, world)
    publisher.publish(policy, 3)
    publisher.settle()
    (row,) = rows_of(make_samples(1, 1), world.device)
    with torch.no_grad():
        trained = policy(row).logprobs_R
    names = [*published(run, 3)[0].tensors]
    store, verify_key = WeightStore(run.dir.weights), RunKeys(run.dir.keys).verifier().public_bytes_raw()

    async def swap() -> tuple[list[float], list[float], set[str]]:
        engine = LocalEngine(folder, InferenceConfig(device="cpu"), 128)
        await engine.start()
        receiver = Receiver(engine, FolderSource(store), folder, canary_tolerance=1e-3)
        try:
            before = await engine.score(row.input_ids[0].tolist())
            await receiver.install(store.manifest(3), verify_key, "run")
            after = await engine.score(row.input_ids[0].tolist())
            return before, after, {name for part in await engine.read_back(names) for name in part.names}
        finally:
            receiver.close()
            await engine.close()

    before, after, held = asyncio.run(swap())
    places = row.source_R
    assert held == {*names} and any("experts.3." in name for name in names)
    assert (trained - torch.tensor(after)[places]).abs().max() < 1e-5
    assert (trained - torch.tensor(before)[places]).abs().max() > 1e-3
