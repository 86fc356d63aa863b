"""Fragments cover every trainable parameter exactly once; layouts that differ are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer_prime.config.load import resolve
from composer_prime.errors import ConfigError
from composer_prime.model_source import resolve_model
from composer_prime.plan.preflight import check_start
from diloco.fragments import parameter_layout, partition
from diloco.transport.messages import difference, layout_hash

ROOT = Path(__file__).parents[2]


def stack(blocks: int, width: int = 4) -> nn.Module:
    """Embedding, `blocks` blocks of two tensors, norm, and a head tied to the embedding."""
    model = nn.Module()
    model.embed = nn.Embedding(11, width)
    model.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
    model.norm = nn.LayerNorm(width)
    model.head = nn.Linear(width, 11, bias=False)
    model.head.weight = model.embed.weight
    return model


# Any model, any count: every parameter is in one fragment, the tied one once, and none is empty.
@given(blocks=st.integers(1, 12), count=st.integers(1, 6))
def test_each_parameter_once(blocks, count):
    model = stack(blocks)
    try:
        fragments = partition(model.named_parameters(remove_duplicate=False), count)
    except ConfigError:
        assert blocks < count
        return
    placed = [id(parameter) for fragment in fragments for _, parameter in fragment.parameters]
    assert sorted(placed) == sorted(id(parameter) for parameter in model.parameters())
    assert all(fragment.parameters for fragment in fragments)
    assert sum(fragment.numel for fragment in fragments) == sum(p.numel() for p in model.parameters())


# It deals blocks out in turn, whole.
def test_strided_takes_blocks_in_turn():
    fragments = partition(stack(7).named_parameters(), 3)
    for fragment in fragments:
        blocks = {int(name.split(".")[1]) for name, _ in fragment.parameters if name.startswith("layers")}
        assert blocks == {block for block in range(7) if block % 3 == fragment.index}


# Under LoRA only the adapters are synchronized.
def test_frozen_parameters_stay_out():
    model = stack(4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias") and "layers" in name
    names = [name for fragment in partition(model.named_parameters(), 2) for name, _ in fragment.parameters]
    assert sorted(names) == [f"layers.{block}.bias" for block in range(4)]


# Reading a fragment and writing it back changes nothing; writing other values sets exactly these, in any dtype.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_write(dtype):
    model = stack(3).to(dtype)
    for fragment in partition(model.named_parameters(), 2):
        before = fragment.read()
        fragment.write(before)
        assert torch.equal(fragment.read(), before)
        fragment.write(torch.arange(fragment.numel, dtype=torch.float32) % 64)
        assert torch.equal(fragment.read(), torch.arange(fragment.numel, dtype=torch.float32) % 64)


# Two layouts are the same exactly when their hashes are; the difference names the parameter and both sides.
def test_layout_difference():
    ours = parameter_layout(partition(stack(4).named_parameters(), 2))
    same = parameter_layout(partition(stack(4).named_parameters(), 2))
    wider = parameter_layout(partition(stack(4, width=6).named_parameters(), 2))
    longer = parameter_layout(partition(stack(5).named_parameters(), 2))
    assert layout_hash(ours) == layout_hash(same) and difference(ours, same) == ""
    assert len({layout_hash(each) for each in (ours, wider, longer)}) == 3
    assert difference(ours, wider) == (
        "parameter embed.weight: shape [11, 4], shard [11, 4], fragment 0 here, "
        "shape [11, 6], shard [11, 6], fragment 0 there"
    )
    assert "parameter layers.4.bias: not trained here, shape [4]" in difference(ours, longer)


# Too many fragments: refused with the number that works.
def test_too_many_fragments():
    with pytest.raises(ConfigError, match=r"fragments is 9, but the model has only 5 .* use fragments <= 5"):
        partition(stack(2).named_parameters(), 9)
    with pytest.raises(ConfigError, match="nothing to synchronize"):
        partition([], 1)


# The check before any role starts allows as many fragments as the model can be divided into, and refuses one more.
@pytest.mark.parametrize("lora", [(), ("--trainer.lora.rank", "4")])
def test_fragments_are_checked_against_the_model(tmp_path, lora):
    transformers = pytest.importorskip("transformers")
    settings = transformers.AutoConfig.from_pretrained(resolve_model("tiny"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    if lora:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "_proj." in name  # as adapters would stand
    most = max(count for count in range(1, 20) if _divides(model, count))

    def problems(fragments: int) -> list[str]:
        words = ["--diloco.delay", "0", "--diloco.fragments", str(fragments)]
        words += [word for key in ("--diloco.sync-every", "--run.max-steps") for word in (key, str(fragments))]
        files = ["@", str(ROOT / "configs/a1.toml"), "@", str(ROOT / "configs/diloco/peer.toml")]
        config = resolve([*files, "--run.output_dir", str(tmp_path), *words, *lora]).config
        return [each for each in check_start(config, gpus=0).problems if "diloco.fragments" in each]

    assert problems(most) == []
    (problem,) = problems(most + 1)
    assert f"diloco.fragments is {most + 1}, but the model 'tiny' has only {most} " in problem
    assert f"use diloco.fragments <= {most}" in problem


def _divides(model: nn.Module, count: int) -> bool:
    try:
        return len(partition(model.named_parameters(), count)) == count
    except ConfigError:
        return False
