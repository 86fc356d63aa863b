"""Codecs: exact sizes, bounds of what a round trip loses, and error feedback."""

import contextlib
import math

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.codec import ErrorFeedback, IntegerCodec, codec_of

NAMES = ["fp32", "bf16", "int8", "int4"]
vectors = st.builds(
    lambda n, seed, scale: torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 10.0**scale,
    n=st.integers(1, 9000), seed=st.integers(0, 2**31), scale=st.integers(-20, 20),
)  # fmt: skip


def block_maxima(values: torch.Tensor, block: int) -> torch.Tensor:
    """max |x| of the block that each element belongs to, by a plain loop."""
    parts = [part.abs().max().expand(len(part)) for part in values.split(block)]
    return torch.cat(parts)


# A codec's bytes are at most size(); noise decodes to n numbers or is refused.
@settings(deadline=None)
@given(values=vectors, name=st.sampled_from(NAMES), seed=st.integers(0, 2**31))
def test_size(values, name, seed):
    codec, n = codec_of(name), values.numel()
    data = codec.encode(values)
    assert data.dtype == torch.uint8 and data.numel() <= codec.size(n)
    noise = torch.randint(0, 256, (codec.size(n),), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    with contextlib.suppress(ValueError):
        assert codec.decode(noise, n).shape == values.shape


# The entropy code loses nothing and never adds more than its first byte, whatever the values are like.
@settings(deadline=None)
@given(values=vectors, bits=st.sampled_from([8, 4]))
def test_entropy_code_is_lossless(values, bits):
    codec, n = IntegerCodec(f"int{bits}"), values.numel()
    plain = codec.encode_plain(values)
    as_is = torch.cat([torch.zeros(1, dtype=torch.uint8), plain])
    for data in (codec.encode(values), as_is):
        assert torch.equal(codec.decode(data, n), codec.decode_plain(plain, n))


# A frame that unfolds to another size than the values take, however large, is refused before it is unfolded.
@pytest.mark.parametrize("unfolded", [0, 1, 1 << 40])
def test_frames_of_another_size_are_refused(unfolded):
    frame = bytearray(zstandard.ZstdCompressor().compress(b"x" * min(unfolded, 100)))
    if unfolded > 100:  # claimed in the frame's header: single segment, 8 bytes of content size
        frame = bytearray(b"\x28\xb5\x2f\xfd\xe0") + unfolded.to_bytes(8, "little") + frame[6:]
    data = torch.frombuffer(bytearray([1]) + frame, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"a frame of {unfolded} bytes, but 700 values take 390"):
        codec_of("int4").decode(data, 700)


# Bytes after the frame are refused, for int8 as for 4 bits: they were accepted, so two bodies decoded to one delta.
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_bytes_after_the_frame_are_refused(name):
    codec = codec_of(name)
    data = codec.encode(torch.zeros(700))
    assert data[0] == 1 and not codec.decode(data, 700).any()
    for extra in (data[:1], data[1:]):
        with pytest.raises(ValueError, match=f"{name}: .*unused data"):
            codec.decode(torch.cat([data, extra]), 700)


# fp32 is exact; bf16 rounds by at most 2^-8 of the value.
@settings(deadline=None)
@given(values=vectors)
def test_dense_bounds(values):
    assert torch.equal(codec_of("fp32").decode(codec_of("fp32").encode(values), len(values)), values)
    rounded = codec_of("bf16").decode(codec_of("bf16").encode(values), len(values))
    assert ((rounded - values).abs() <= values.abs() * 2.0**-8 + 1e-38).all()


# Integers are within half a step of the value, the step being the block's maximum / (2^(bits-1) - 1), rounded to bf16.
@settings(deadline=None)
@given(values=vectors, bits=st.sampled_from([8, 4]))
def test_integer_bound(values, bits):
    codec = codec_of(f"int{bits}")
    step = block_maxima(values, 256).double() / (2 ** (bits - 1) - 1)
    error = (codec.decode(codec.encode(values), len(values)).double() - values.double()).abs()
    assert (error <= step * (0.5 + 2**-9) + 2e-38).all()


# NaN or infinity anywhere cannot be decoded into a finite block: receivers see it and reject the delta.
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_stays_visible(name, bad):
    values = torch.randn(600, generator=torch.Generator().manual_seed(1))
    values[123] = bad
    codec = codec_of(name)
    assert not torch.isfinite(codec.decode(codec.encode(values), 600)).all()


# With feedback, what has been sent after any number of rounds is what was asked for but the last residual.
@settings(deadline=None)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**31), rounds=st.integers(1, 8))
def test_feedback_loses_nothing(name, seed, rounds):
    codec, feedback = codec_of(name), ErrorFeedback([700])
    generator = torch.Generator().manual_seed(seed)
    asked, sent = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    for _ in range(rounds):
        delta = torch.randn(700, generator=generator)
        data, residual_n = feedback.encode(0, delta, codec)
        feedback.settle(0, residual_n)
        asked += delta.double()
        sent += codec.decode(data, 700).double()
    assert torch.allclose(asked - sent, feedback.residuals[0].double(), atol=1e-4)


# What is owed stays finite: a residual with NaN or infinity would spoil every delta to come.
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_feedback_forgets_what_is_not_finite(bad):
    feedback = ErrorFeedback([3])
    feedback.settle(0, torch.tensor([1.0, 2.0, 3.0]))
    feedback.settle(0, torch.tensor([1.0, bad, 3.0]))
    assert torch.equal(feedback.residuals[0], torch.zeros(3))


# Bits a parameter of a large model, as the configuration's help states them: the codec's own for the dense
# ones, about what normally distributed deltas take for those with an entropy code.
@pytest.mark.parametrize(
    ("kind", "bits", "within"), [("fp32", 32, 0), ("bf16", 16, 0), ("int8", 7.5, 0.1), ("int4", 3.4, 0.1)]
)
def test_bits_per_parameter(kind, bits, within):
    n = 1 << 20
    deltas = torch.randn(n, generator=torch.Generator().manual_seed(0))
    data = codec_of(kind).encode(deltas)
    assert data.numel() * 8 / n == pytest.approx(bits, abs=within)


@pytest.mark.parametrize("name", ["", "fp16", "int4/3", "sparse/64"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError):
        codec_of(name)
