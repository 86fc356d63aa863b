"""Codecs: exact sizes, bounds of what a round trip loses, and error feedback."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.config.diloco import CodecConfig
from diloco.codec import ErrorFeedback, build_codec, codec_from_spec

SPECS = ["fp32", "bf16", "int8/256", "int4/64", "e3m0/256", "sparse/64"]
vectors = st.builds(
    lambda n, seed, scale: torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 10.0**scale,
    n=st.integers(1, 9000), seed=st.integers(0, 2**31), scale=st.integers(-20, 20),
)  # fmt: skip


def block_maxima(values: torch.Tensor, block: int) -> torch.Tensor:
    """max |x| of the block that each element belongs to, by a plain loop."""
    parts = [part.abs().max().expand(len(part)) for part in values.split(block)]
    return torch.cat(parts)


# Every codec's bytes are what size() says, and any vector of that many bytes decodes to n numbers.
@settings(deadline=None)
@given(values=vectors, spec=st.sampled_from(SPECS), seed=st.integers(0, 2**31))
def test_size_is_exact(values, spec, seed):
    codec = codec_from_spec(spec)
    data = codec.encode(values)
    assert data.dtype == torch.uint8 and data.numel() == codec.size(values.numel())
    noise = torch.randint(0, 256, data.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert codec.decode(noise, values.numel()).shape == values.shape


# fp32 is exact; bf16 rounds by at most 2^-8 of the value.
@settings(deadline=None)
@given(values=vectors)
def test_dense_bounds(values):
    assert torch.equal(codec_from_spec("fp32").decode(codec_from_spec("fp32").encode(values), len(values)), values)
    rounded = codec_from_spec("bf16").decode(codec_from_spec("bf16").encode(values), len(values))
    assert ((rounded - values).abs() <= values.abs() * 2.0**-8 + 1e-38).all()


# Integers are within half a step of the value, the step being the block's maximum / (2^(bits-1) - 1).
@settings(deadline=None)
@given(values=vectors, bits=st.sampled_from([8, 4]), block=st.sampled_from([8, 64, 256]))
def test_integer_bound(values, bits, block):
    codec = codec_from_spec(f"int{bits}/{block}")
    step = block_maxima(values, block).double() / (2 ** (bits - 1) - 1)
    error = (codec.decode(codec.encode(values), len(values)).double() - values.double()).abs()
    assert (error <= step * (0.5 + 1e-5) + 2e-38).all()


# E3M0 takes the nearest of its fifteen levels, found here by trying all of them in float64.
@settings(deadline=None)
@given(values=vectors, block=st.sampled_from([8, 256]))
def test_e3m0_is_nearest_level(values, block):
    codec = codec_from_spec(f"e3m0/{block}")
    scale = block_maxima(values, block).double()[:, None]
    levels = torch.tensor([0.0] + [sign * 2.0**-power for power in range(7) for sign in (1, -1)], dtype=torch.float64)
    best = (levels * scale - values.double()[:, None]).abs().min(dim=1).values
    error = (codec.decode(codec.encode(values), len(values)).double() - values.double()).abs()
    assert torch.allclose(error, best, rtol=1e-5, atol=2e-38)


# Sparse sends the largest entries of each chunk with the right sign and the mean magnitude of their half.
def test_sparse_by_hand():
    values = torch.zeros(5000)
    values[[3, 77, 4095, 4096, 4999]] = torch.tensor([8.0, -2.0, 4.0, -1.0, 1.0])
    decoded = codec_from_spec("sparse/2").decode(codec_from_spec("sparse/2").encode(values), 5000)
    expected = torch.zeros(5000)
    expected[[3, 4095, 4096, 4999]] = torch.tensor([8.0, 4.0, -1.0, 1.0])
    assert torch.equal(decoded, expected)


# What sparse sends is no farther from the vector than sending nothing, and it sends at most `kept` entries a chunk.
@settings(deadline=None)
@given(values=vectors, kept=st.sampled_from([2, 64, 256]))
def test_sparse_contracts(values, kept):
    codec = codec_from_spec(f"sparse/{kept}")
    decoded = codec.decode(codec.encode(values), len(values)).double()
    assert all(int((part != 0).sum()) <= kept for part in decoded.split(4096))
    assert (values.double() - decoded).norm() <= values.double().norm() * (1 + 1e-6)


# NaN or infinity anywhere cannot be decoded into a finite block: receivers see it and reject the delta.
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_stays_visible(spec, bad):
    values = torch.randn(600, generator=torch.Generator().manual_seed(1))
    values[123] = bad
    codec = codec_from_spec(spec)
    assert not torch.isfinite(codec.decode(codec.encode(values), 600)).all()


# With feedback, what has been sent after any number of rounds is what was asked for but the last residual.
@settings(deadline=None)
@given(spec=st.sampled_from(SPECS), seed=st.integers(0, 2**31), rounds=st.integers(1, 8))
def test_feedback_loses_nothing(spec, seed, rounds):
    codec, feedback = codec_from_spec(spec), ErrorFeedback([700])
    generator = torch.Generator().manual_seed(seed)
    asked, sent = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    for _ in range(rounds):
        delta = torch.randn(700, generator=generator)
        encoded = feedback.encode(0, delta, codec)
        feedback.settle(0, encoded.residual_n)
        asked += delta.double()
        sent += codec.decode(encoded.data, 700).double()
    assert torch.allclose(asked - sent, feedback.residuals[0].double(), atol=1e-4)


# Bits a parameter of a large model, as the configuration's help states them.
@pytest.mark.parametrize(
    ("kind", "bits"),
    [("fp32", 32.0), ("bf16", 16.0), ("int8", 8.125), ("int4", 4.125), ("e3m0", 4.125), ("sparse", 0.234)],
)
def test_bits_per_parameter(kind, bits):
    n = 1 << 20
    assert build_codec(CodecConfig(type=kind)).size(n) * 8 / n == pytest.approx(bits, abs=0.001)


@pytest.mark.parametrize("spec", ["", "fp16", "fp32/2", "int4", "int4/3", "int4/-2", "sparse/4096", "sparse/3"])
def test_unknown_specs_are_refused(spec):
    with pytest.raises(ValueError):
        codec_from_spec(spec)
