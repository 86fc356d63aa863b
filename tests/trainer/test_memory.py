"""Shapes on the meta device, and the plan's figures for memory before a run."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import init_empty_weights
from pydantic import ValidationError
from small_runs import make_config
from transformers import AutoModelForCausalLM, Qwen3Config

from composer_prime.packing.pack import model_flops
from composer_prime.plan.footprint import ModelShape, disk_bytes, rank_need
from trainer.model.build import blocks
from trainer.train import peak_bytes

QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip


def test_qwen3_8b_on_the_meta_device():
    # The real architecture without storage: 8.19 B parameters in 36 blocks; the plan's count and FLOPs agree with it.
    with init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3_8B))
    count = sum(p.numel() for p in lm.parameters())
    assert count == 8_190_735_360 and len(blocks(lm)) == 36
    assert abs(ModelShape.of(QWEN3_8B).parameters - count) / count < 1e-3
    matrices = sum(p.numel() for block in blocks(lm) for p in block.parameters() if p.ndim == 2)
    assert model_flops(QWEN3_8B).per_token == 2 * (matrices + 151936 * 4096)


def test_peak_memory_covers_what_is_held():
    # The peak of this process grows at least by a tensor that it allocated and filled.
    before = peak_bytes(torch.device("cpu"))
    held = torch.ones(60_000_000)
    assert peak_bytes(torch.device("cpu")) >= max(before, held.numel() * 4)


def test_other_weights_are_planned(model_folder, tmp_path):
    # An average teacher costs 4 bytes a trained parameter and rank, in memory and in checkpoints; so do start weights,
    # but not beside adapters, whose base they are, nor for simpo, which has no reference.
    shape = ModelShape.read(model_folder)

    def planned(lora=None, **channels) -> tuple[int, int]:
        config = make_config(model_folder, tmp_path, channels=channels, trainer={"ranks": 2, "lora": lora})
        parts = rank_need(config, shape, cuda=False).parts
        return parts["other weights"], disk_bytes(config, shape, cuda=False)["checkpoints"]

    nothing, plain = planned()
    average = {"weight": 1.0, "teacher": {"kind": "ema"}}
    assert nothing == 0 and planned(sdpo=average) == (2 * shape.parameters, plain + 3 * 4 * shape.parameters)
    assert planned(replay_dpo={"weight": 1.0}) == (2 * shape.parameters, plain)
    assert planned(sdpo=average, policy={"kl": {"weight": 0.1}})[0] == 4 * shape.parameters
    assert planned({"rank": 2}, replay_dpo={"weight": 1.0})[0] == 0
    assert planned(replay_dpo={"weight": 1.0, "loss": "simpo"}) == (0, plain)


def test_what_is_offloaded_is_planned_on_the_host(model_folder, tmp_path):
    # Of AdamW 8 bytes a parameter, and each block's input, move from a GPU to the host. On a CPU they are there anyway.
    shape, needs = ModelShape.read(model_folder), {}
    for cuda in (True, False):
        for offload in ([], ["activations", "moments"]):
            trainer = {"activation_checkpointing": True, "offload": offload}
            config = make_config(model_folder, tmp_path, trainer=trainer)
            needs[cuda, bool(offload)] = rank_need(config, shape, cuda=cuda)
    moved = 8 * shape.parameters + 128 * shape.hidden * shape.layers * 2
    assert needs[True, True].device_bytes == needs[True, False].device_bytes - moved
    assert needs[True, True].host_bytes == needs[True, False].host_bytes + moved
    assert needs[False, True] == needs[False, False]
    with pytest.raises(ValidationError, match="activation_checkpointing"):
        make_config(model_folder, tmp_path, trainer={"offload": ["activations"]})


def test_shape_of_a_folder_is_the_model_s(model_folder, tmp_path):
    # What the plan reads from the folder alone is what the loaded model has.
    lm = AutoModelForCausalLM.from_pretrained(model_folder)
    shape = ModelShape.read(model_folder)
    assert shape.parameters == sum(p.numel() for p in lm.parameters())
    assert shape.vocabulary == json.loads((model_folder / "config.json").read_text())["vocab_size"]
    assert make_config(model_folder, tmp_path).model.path == str(model_folder)


def test_the_plan_counts_the_versions_that_pulls_hold(model_folder, tmp_path):
    # Beside the newest versions as many older ones stay while nodes pull them, and one is being written.
    shape = ModelShape.read(model_folder)
    # There may also be an anchor that only deltas need.
    config = make_config(model_folder, tmp_path, trainer={"weights": {"keep": 3}})
    assert disk_bytes(config, shape, cuda=False)["weight store"] == (3 + 3 + 1 + 1) * 4 * shape.parameters
