"""Patches of words: exact, and read with bounded memory whatever the bytes are."""

import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.errors import CorruptWeightsError
from composer_prime.run.weights import WORDS, difference, patches, stream_entry, word_sum
from inference.snapshot import word_sum as tensor_sum

WORD = WORDS["bfloat16"]


def changed(words: np.ndarray, seed: int, share: float) -> np.ndarray:
    """Some words moved by a little or replaced."""
    random = np.random.default_rng(seed)
    new = words.copy()
    where = np.flatnonzero(random.random(len(words)) < share)
    new[where] += random.choice([1, 65535, 7, 8, 65528, 65529, 300, 40000], len(where)).astype(words.dtype)
    return new


# Of both widths, from no change to every word changed: the patch turns old into new, whole and in slices, and it comes
# back bit for bit from its stream.
@given(
    st.sampled_from(["bfloat16", "float32"]),
    st.integers(1, 3000),
    st.sampled_from([0, 0.001, 0.1, 1]),
    st.integers(0, 99),
)
def test_a_patch_is_exact(dtype, count, share, seed):
    word = WORDS[dtype]
    old = np.random.default_rng(seed).integers(0, 1 << 16, count).astype(word)
    new = changed(old, seed + 1, share)
    [read] = patches([stream_entry(difference(old.tobytes(), new.tobytes(), word).encode())], [old.nbytes], word)
    target = bytearray(old.tobytes())
    read.apply(target)
    assert target == new.tobytes()
    start = count // 3
    piece = bytearray(old[start : start + 100].tobytes())
    read.apply(piece, start)
    assert piece == new[start : start + 100].tobytes()


# A stream may come in pieces of any length. A patch of nothing is one too.
@pytest.mark.parametrize("length", [1, 7, 1000])
def test_a_stream_in_pieces(length):
    old = np.arange(500, dtype=WORD)
    shares = [0.1, 0.0, 0.2]
    wanted = [difference(old.tobytes(), changed(old, 0, share).tobytes(), WORD) for share in shares]
    assert wanted[1].encode() == raw(0, b"", b"")
    stream = b"".join(stream_entry(patch.encode()) for patch in wanted)
    pieces = [stream[start : start + length] for start in range(0, len(stream), length)]
    assert [p.encode() for p in patches(pieces, [1000] * 3, WORD)] == [p.encode() for p in wanted]


def raw(count: int, runs: bytes, changes: bytes) -> bytes:
    return struct.pack("<II", count, len(runs)) + runs + changes


def entry(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "little") + frame


# Whatever a stream holds, it is refused before it takes memory: a bomb by the size it claims, positions outside of the
# chunk, counts that do not agree, changes of nothing, a stream that is cut or goes on. Positions cannot be unsorted:
# only gaps are stored.
@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (entry(zstandard.ZstdCompressor().compress(bytes(1 << 20))), "claims 1048576 bytes"),
        (entry(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))), "claims|not a zstd"),
        ((1 << 31).to_bytes(4, "little"), "2147483648 bytes for a chunk"),
        (entry(b"no frame"), "not a zstd frame"),
        (stream_entry(raw(1, b"\x64", b"\x01")), "changes word 100 of a chunk of 100"),
        (stream_entry(raw(2, b"\x63\x00", b"\x11")), "changes word 100 of a chunk of 100"),
        (stream_entry(raw(2, b"\x01", b"\x11")), "1 positions for 2 changes"),
        (stream_entry(raw(1, b"\x01\xff", b"\x01")), "positions for 1 changes"),
        (stream_entry(raw(1, b"\x01", b"\x00")), "changes of zero"),
        (stream_entry(raw(1, b"\x01", b"\x0f\x00\x00")), "changes of zero"),
        (stream_entry(raw(1, b"\x01", b"\x0f\x10")), "1 bytes do not hold 1 large"),
        (stream_entry(raw(1, b"\x01", b"\x01\x01")), "1 bytes do not hold 0 large"),
        (stream_entry(raw(4, b"\x01", b"\x11")), "do not hold 4 changes"),
        (stream_entry(raw(200, bytes(200), bytes([17] * 100))), "do not hold 200 changes of 100 words"),
        (stream_entry(b"\x00"), "do not hold"),
        (stream_entry(raw(0, b"", b""))[:-1], "1 bytes early"),
        (stream_entry(raw(0, b"", b"")) * 2, "continues after the last chunk"),
    ],
)
def test_hostile_streams_are_refused(stream, message):
    with pytest.raises(CorruptWeightsError, match=message):
        list(patches([stream], [200], WORD))


# The trainer's sum of a tensor's bytes is the engine's of the tensor, also of fused parts.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_trainer_and_engine_sum_alike(dtype):
    tensor = torch.randn(700, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    name = str(dtype).removeprefix("torch.")
    parts = [part.contiguous().view(torch.uint8).numpy().tobytes() for part in tensor.split(300)]
    assert sum(word_sum(part, WORDS[name]) for part in parts) % 2**64 == tensor_sum(tensor)
    assert word_sum(b"", WORDS[name]) == tensor_sum(tensor[:0]) == 0
