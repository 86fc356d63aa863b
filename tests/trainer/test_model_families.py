"""Families with layers that carry a state, routers with a frozen bias, and text as a part of a larger model."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
import transformers
from hinted_runs import make_hinted, make_pairs, three_channels
from safetensors.torch import load_file
from small_runs import make_samples, rows_of
from step_peer import StepPeer
from test_publish import published, train_once
from test_ranks import difference, lines, moved
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from composer_prime.config.inference import InferenceConfig
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import Sampling
from inference.engines.local.local_engine import LocalEngine
from inference.receiver import FolderSource, Receiver
from trainer.data import reading_of
from trainer.model.policy_model import PACKED, Policy
from trainer.weights.publish import Publisher, export

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.05,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
          "first_k_dense_replace": 1, "num_hidden_layers": 2}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4, "head_dim": 8}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
          "patch_size": 4, "num_position_embeddings": 16}  # fmt: skip
FAMILIES = {
    "Qwen3Next": LINEAR | EXPERTS,
    "Qwen3_5": LINEAR,
    "Qwen3_5Moe": LINEAR | EXPERTS,
    "FalconH1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64},
    "Glm4Moe": ROUTED,
    "DeepseekV3": ROUTED | LATENT,
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "rotary_dim": 8},
}
PROMPT = [5, 6, 7, 8, 9]
BIAS = "e_score_correction_bias"


@pytest.fixture
def folder_of(tmp_path, model_folder):
    """folder_of(family) -> a folder with a random model, and the tokenizer of `model_folder`."""

    def make(family: str):
        torch.manual_seed(0)
        values, made = SMALL | FAMILIES[family], getattr(transformers, f"{family}ForCausalLM")
        if family.startswith("Qwen3_5"):  # as the Hub has them: text beside a vision tower
            made = getattr(transformers, f"{family}ForConditionalGeneration")
            values = {"text_config": values, "vision_config": VISION}
        lm = made(made.config_class(**values))
        for name, buffer in lm.named_buffers():
            if name.endswith(BIAS):
                buffer.copy_(torch.randn(buffer.shape))
        lm.save_pretrained(tmp_path / family)
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "FalconH1"])
def test_a_row_gives_the_gradients_of_its_documents(folder_of, family):
    # Documents in one row have the log-probabilities and gradients of transformers' own pass over each alone, with
    # activations computed again. They share no beginning.
    lm = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32, attn_implementation=PACKED)
    samples = make_samples(1, 6)
    policy = Policy(lm, PACKED).train()
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    (row,) = rows_of(samples, torch.device("cpu"), share=policy.shares_prefixes)
    assert len(row.trees) == 6 and not policy.shares_prefixes
    packed = policy(row).logprobs_R
    packed.mean().backward()
    grads = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    lm.set_attn_implementation("sdpa")
    alone = []
    for start, tree in zip(np.cumsum([0, *(tree.tokens for tree in row.trees)]), row.trees, strict=False):
        places = (row.source_R >= start) & (row.source_R < start + tree.tokens)
        logits = lm(input_ids=row.input_ids[:, start : start + tree.tokens], use_cache=False).logits[0]
        logprobs = logits[row.source_R[places] - start].log_softmax(-1)
        alone.append(logprobs.gather(1, row.targets_R[places, None]).squeeze(1))
    assert (packed - torch.cat(alone)).abs().max() < 2e-6
    torch.cat(alone).mean().backward()
    for name, parameter in lm.named_parameters():
        assert (grads[name] - parameter.grad).abs().max() < 1e-6, name


def few(step: int):
    return make_hinted(step, 6)


@pytest.mark.process
@pytest.mark.parametrize("family", ["Qwen3_5", pytest.param("Glm4Moe", marks=pytest.mark.slow)])
def test_two_ranks_that_resume_are_one_rank(make_run, folder_of, family):
    # All loss terms: 2 ranks that stop after step 3 and resume have the losses and parameters of one rank over 5 steps,
    # to 1e-5. What is not trained (a vision tower, a router's bias) has its first bytes in final/.
    folder = folder_of(family)
    channels = three_channels().model_dump(exclude={"policy": {"max_completion_length"}})
    settings = {"model": {"path": str(folder)}, "channels": channels, "trainer": {"optim": {"lr": 1e-3}}}
    runs = {}
    for ranks, steps in ((1, 5), (2, 3), (2, 5)):
        of_run = {"max_steps": steps, "resume": ranks in runs}
        run = runs.setdefault(ranks, make_run(f"ranks-{ranks}", run=of_run, **settings))
        run.write(run.config.model_copy(update={"run": run.config.run.model_copy(update=of_run)}))
        with StepPeer(run.dir, few, pairs_of=lambda step: make_pairs(step, 1), max_steps=steps):
            codes, outputs = run.train(ranks)
        assert codes == [0] * ranks, "\n".join(outputs)
    names = ("loss/policy", "loss/sdpo", "loss/replay_dpo")
    one, two = (np.array([[line[name] for name in names] for line in lines(runs[ranks])]) for ranks in (1, 2))
    assert one.shape == (5, 3) and np.abs(one).min() > 0 and np.abs(one - two).max() < 1e-5
    assert difference(runs[1], runs[2]) < 1e-5 and moved(runs[1]) > 1e-3
    start, final = (load_file(path / "model.safetensors") for path in (folder, runs[2].dir.final))
    kept = [name for name in start if name.endswith(BIAS) or name.startswith("model.visual.")]
    assert kept and all(start[name].equal(final[name]) for name in kept) and start.keys() == final.keys()


@pytest.mark.parametrize("lora", [None, {"rank": 4, "target_modules": ["o_proj"]}], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe", "Glm4Moe", "DeepseekV3", "MiniMaxM2"])
def test_nodes_and_final_have_the_policy_under_the_folder_s_names(make_run, folder_of, world, family, lora):
    # Versions, final/ and the model of a checkpoint have the names of the model folder. A bias stays in float32, bit by
    # bit, where all else is bfloat16. A node proves the version, a delta too, and samples with the policy's own
    # log-probabilities. final/ loads as the class that the folder names.
    folder = folder_of(family)
    start = load_file(folder / "model.safetensors")
    names, untrained = start.keys(), {name for name in start if name.startswith("model.visual.")}
    for dtype in ("float32", "bfloat16"):
        run = make_run(dtype, inference={"dtype": dtype}, trainer={"lora": lora, "optim": {"lr": 1e-2}},
                       model={"path": str(folder)})  # fmt: skip
        policy = train_once(run, folder, world)
        publisher = publish_twice(run, folder, world, policy)
        manifest, tensors = published(run, 2, folder)
        assert (
            manifest.kind == ("delta" if lora is None else "adapters")
            and tensors.keys() == manifest.tensors.keys() == names
        )
        as_they_are = {name for name in names if name.endswith(BIAS) or (name in untrained and lora is None)}
        types = {"float32" if name in as_they_are else dtype for name in names}
        assert {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()} == types
        export(policy, run.config, folder, run.dir.final, world, publisher.dtype)
        final = load_file(run.dir.final / "model.safetensors")
        assert final.keys() == names and all(final[name].equal(tensors[name]) for name in names - untrained)
        assert all(final[name].equal(start[name]) for name in names if name in untrained or name.endswith(BIAS))
        drawn, logprobs, held = asyncio.run(sampled(run, folder, [*names]))
        assert {part.dtype for part in held if part.names[0].endswith(BIAS)} <= {"float32"}
        assert {name for part in held for name in part.names} == names - untrained
        if dtype == "float32":
            ids = np.r_[PROMPT, drawn].astype(np.int32)
            reading = reading_of([ids], [np.arange(len(PROMPT), len(ids))], world.device, share=False)
            with torch.no_grad():
                scores = policy.scores(reading, torch.tensor(drawn))
            assert (scores - torch.tensor(logprobs)).abs().max() < 1e-4
    if "text_config" in json.loads((folder / "config.json").read_text()):
        whole, info = AutoModelForImageTextToText.from_pretrained(run.dir.final, dtype="auto", output_loading_info=True)
        assert whole.dtype == torch.bfloat16 and not any(info.values())
        assert whole.model.language_model.norm.weight.equal(final["model.language_model.norm.weight"])


def publish_twice(run, folder, world, policy):
    publisher = Publisher(run.config, run.dir, "run", folder, world, None)
    publisher.publish(policy, 1)
    publisher.settle()
    with torch.no_grad():
        trained = next(parameter for parameter in policy.parameters() if parameter.requires_grad)
        trained.to_local().view(-1)[0] += 0.01
    publisher.publish(policy, 2)
    publisher.settle()
    return publisher


async def sampled(run, folder, names: list[str]):
    """What a local node draws after PROMPT under version 2, which it proves, and what it holds of `names`."""
    dtype = run.config.inference.dtype
    engine = LocalEngine(folder, InferenceConfig(device="cpu", dtype=dtype), 128)
    await engine.start()
    store, key = WeightStore(run.dir.weights), RunKeys(run.dir.keys).verifier().public_bytes_raw()
    receiver = Receiver(
        engine, FolderSource(store), folder, canary_tolerance=1e-3 if run.config.inference.dtype == "float32" else 0.2
    )
    try:
        await receiver.install(store.manifest(2), key, "run")
        done = await engine.generate("r", PROMPT, Sampling(max_tokens=20, seed=1, ignore_eos=True), "s")
        held = await engine.read_back(names)
        return done.ids.tolist(), done.token_logprobs.tolist(), held
    finally:
        receiver.close()
        await engine.close()
