"""A packed state is a safetensors file for every reader."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from composer_prime.errors import CheckpointError
from diloco.state import pack_state, unpack_state

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3)


# Whatever the shapes: the values come back, the safetensors package reads the same, and its own file is read too.
@settings(deadline=None)
@given(shapes=st.lists(SHAPES, max_size=5), facts=st.dictionaries(st.text(max_size=5), st.integers()))
def test_round_trip(shapes, facts):
    tensors = {f"master.{index}": torch.randn(shape) for index, shape in enumerate(shapes)}
    tensors["body"] = torch.arange(7, dtype=torch.uint8)
    raw = pack_state(tensors, facts)
    back, read = unpack_state(raw)
    for found in (back, load(bytes(raw)), load(save(tensors))):
        assert found.keys() == tensors.keys()
        assert all(found[name].equal(value) and found[name].dtype == value.dtype for name, value in tensors.items())
    assert read == facts


WHOLE = bytes(pack_state({"w": torch.ones(9)}, {}))


# Bytes that were cut off, whose header does not fit, or that are something else are refused.
@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"nonsense" * 9, WHOLE[:-1], WHOLE + b"x", save({"w": torch.ones(9)})),
        *(WHOLE.replace(b"[9]", wrong) for wrong in (b"[8]", b'"9"', b"1e9", b"{} ")),
        *(WHOLE.replace(b"[0,36]", wrong) for wrong in (b"[4,36]", b"[36,0]", b"[0,99]", b"[-1,6]", b"[0]   ")),
        *(WHOLE.replace(b'"F32"', wrong) for wrong in (b'"U8" ', b'"F64"', b"[[]] ")),
    ],
)
def test_no_state(raw):
    with pytest.raises(CheckpointError, match="bytes are not a packed global state"):
        unpack_state(raw)
