"""Fragments cover every trainable parameter exactly once; layouts that differ are told apart."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composer_prime.errors import ConfigError
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
    with pytest.raises(ConfigError, match=r"fragments is 9, .* the model has 5 .* lower diloco.fragments"):
        partition(stack(2).named_parameters(), 9)
    with pytest.raises(ConfigError, match="nothing to synchronize"):
        partition([], 1)
