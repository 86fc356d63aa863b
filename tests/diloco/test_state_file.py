"""A packed state is a safetensors file, whoever reads it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from composer_prime.errors import CheckpointError
from diloco.state_file import packed, unpacked

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3)


# Whatever the shapes: the values come back, the safetensors package reads the same, and its own file is read too.
@given(shapes=st.lists(SHAPES, max_size=5), facts=st.dictionaries(st.text(max_size=5), st.integers()))
def test_round_trip(shapes, facts):
    tensors = {f"master.{index}": torch.randn(shape) for index, shape in enumerate(shapes)}
    tensors["body"] = torch.arange(7, dtype=torch.uint8)
    raw = packed(tensors, facts)
    back, read = unpacked(raw)
    for found in (back, load(bytes(raw)), load(save(tensors))):
        assert found.keys() == tensors.keys()
        assert all(found[name].equal(value) and found[name].dtype == value.dtype for name, value in tensors.items())
    assert read == facts


# What was cut off or is something else is no state.
@pytest.mark.parametrize("raw", [b"", b"nonsense" * 9, bytes(packed({"w": torch.ones(9)}, {}))[:-1]])
def test_no_state(raw):
    with pytest.raises(CheckpointError, match="bytes are no packed global state"):
        unpacked(raw)
