"""What differs between two versions of a tensor file, without loss.

A file of one element type is a row of words: 2 bytes for bfloat16 and float16, 4 for float32. A patch belongs to one
chunk of the file. It holds `new word - old word` (modulo 2^16 or 2^32) wherever that is not zero.

A patch is small: an optimizer step changes few 16-bit values, and most of those by one unit in the last place.

    stream of patches    one a chunk of the anchor: length of the frame (4 bytes), zstd frame
    in a frame           number of changes, bytes of gaps (4 bytes each)
                         gaps: words between two changes, as bytes of 255 that add up and one smaller byte
                         changes: signed numbers folded to 0, -1, 1, -2, ..., two to a byte, 15 for a larger one
                         the larger ones: all lowest bytes first

Half bytes because zstd finds a repetition in any row of bytes that has so few values, and one costs more than what it
stands for: changes of +1 and -1 take 2.1 bits as half bytes, 2.7 as bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard

from composer_prime.errors import CorruptWeightsError

WORDS = {"bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2"), "float32": np.dtype("<u4")}
"""Type of a word by the version's dtype."""
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_LEVEL = 1
_SUM_WORDS = 1 << 18
_WIDE = 15
"""Half byte of a change that does not fit one."""


@dataclass(frozen=True, slots=True)
class Patch:
    positions: np.ndarray
    """[n] uint32, ascending: which words of the chunk change."""
    changes: np.ndarray
    """[n] words: new - old, never zero."""

    def apply(self, target: memoryview | bytearray, first: int = 0) -> None:
        """Change the words in `target`, which are those of the chunk from word `first` on."""
        words = np.frombuffer(target, self.changes.dtype)
        start, end = np.searchsorted(self.positions, [first, first + len(words)])
        words[self.positions[start:end] - np.uint32(first)] += self.changes[start:end]

    def encode(self) -> bytes:
        """Return the bytes of a frame before compression. Equal patches have equal bytes."""
        count, bits = len(self.positions), 8 * self.changes.itemsize
        gap_bytes = _gap_bytes(self.positions)
        signed = self.changes.view(f"<i{self.changes.itemsize}")
        folded = ((signed << 1) ^ (signed >> (bits - 1))).view(self.changes.dtype)
        halves = np.zeros(count + count % 2, np.uint8)
        halves[:count] = np.minimum(folded, _WIDE)
        wide = folded[folded >= _WIDE]
        planes = wide.view(np.uint8).reshape(len(wide), self.changes.itemsize).T
        pairs = halves[0::2] | halves[1::2] << 4
        head = _HEAD.pack(count, len(gap_bytes))
        return b"".join([head, gap_bytes.tobytes(), pairs.tobytes(), planes.tobytes()])


def _gap_bytes(positions: np.ndarray) -> np.ndarray:
    """Return the gaps between `positions`, [n] uint32, as bytes, [m] uint8. m <= n + last position / 255: 32 bits."""
    gaps = np.diff(positions, prepend=np.uint32(0))
    gaps[1:] -= 1
    ends = np.cumsum(gaps // 255 + 1, dtype=np.uint32) - 1
    runs = np.full(int(ends[-1]) + 1 if len(ends) else 0, 255, np.uint8)
    runs[ends] = gaps % 255
    return runs


def difference(old: bytes | memoryview, new: bytes | memoryview, word: np.dtype) -> Patch:
    """Return what turns the chunk `old` into `new`, of the same length."""
    before, after = np.frombuffer(old, word), np.frombuffer(new, word)
    positions = np.flatnonzero(before != after)
    return Patch(positions.astype(np.uint32), after[positions] - before[positions])


def stream_entry(encoded: bytes) -> bytes:
    """Return one entry of a stream of patches."""
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(encoded)
    return _LENGTH.pack(len(frame)) + frame


def patches(stream: Iterable[bytes], sizes: Iterable[int], word: np.dtype) -> Iterator[Patch]:
    """Yield the patches of a stream that comes in pieces, one for each of an anchor's chunks of `sizes` bytes.

    Raises CorruptWeightsError; no frame takes more memory than its chunk can need.
    """
    pieces, pending = iter(stream), bytearray()

    def take(count: int, index: int) -> bytes:
        while len(pending) < count and (piece := next(pieces, None)) is not None:
            pending.extend(piece)
        taken = bytes(pending[:count])
        del pending[:count]
        if len(taken) < count:
            raise CorruptWeightsError(f"patch {index}: the stream ends {count - len(taken)} bytes early")
        return taken

    for index, size in enumerate(sizes):
        words = size // word.itemsize
        limit = _HEAD.size + words + words // 255 + 1 + words // 2 + 1 + size
        (length,) = _LENGTH.unpack(take(_LENGTH.size, index))
        if length > limit + limit // 128 + 64:
            raise CorruptWeightsError(f"patch {index}: {length} bytes for a chunk of {size}, at most {limit} fit")
        yield _decode(_decompress(take(length, index), limit, index), words, word, index)
    if pending or next(pieces, None):
        raise CorruptWeightsError("the stream of patches continues after the last chunk")


def patch_starts(read: Callable[[int, int], bytes], count: int) -> list[int]:
    """Return where each of `count` patches of a stream starts, and where the last one ends.

    `read` returns so many bytes from an offset on.
    """
    starts = [0]
    for _ in range(count):
        (length,) = _LENGTH.unpack(read(starts[-1], _LENGTH.size))
        starts.append(starts[-1] + _LENGTH.size + length)
    return starts


def _decompress(frame: bytes, limit: int, index: int) -> bytes:
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= limit:
            raise CorruptWeightsError(f"patch {index}: its frame claims {size} bytes, at most {limit} fit")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptWeightsError(f"patch {index} is not a zstd frame: {error}") from None


def _decode(raw: bytes, words: int, word: np.dtype, index: int) -> Patch:
    count, gaps = _HEAD.unpack_from(raw) if len(raw) >= _HEAD.size else (0, 0)
    pairs_at, wide_at = _HEAD.size + gaps, _HEAD.size + gaps + (count + 1) // 2
    if len(raw) < max(wide_at, _HEAD.size) or count > words or gaps > words + words // 255 + 1:
        raise CorruptWeightsError(f"patch {index}: {len(raw)} bytes do not hold {count} changes of {words} words")
    pairs = np.frombuffer(raw, np.uint8, wide_at - pairs_at, pairs_at)
    folded = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:count].astype(word)
    is_wide = folded == _WIDE
    num_wide = int(np.count_nonzero(is_wide))
    if len(raw) != wide_at + num_wide * word.itemsize:
        raise CorruptWeightsError(f"patch {index}: {len(raw) - wide_at} bytes do not hold {num_wide} large changes")
    planes = np.frombuffer(raw, np.uint8, num_wide * word.itemsize, wide_at).reshape(word.itemsize, num_wide)
    folded[is_wide] = np.ascontiguousarray(planes.T).view(word).reshape(num_wide)
    runs = np.frombuffer(raw, np.uint8, gaps, _HEAD.size)
    is_end = runs != 255
    num_ends = int(np.count_nonzero(is_end))
    if num_ends != count or (gaps and not is_end[-1]):
        raise CorruptWeightsError(f"patch {index}: it has {num_ends} positions for {count} changes")
    positions = np.cumsum(runs + is_end, dtype=np.uint32)[is_end] - 1  # An end is below 255: no byte overflows.
    if count and positions[-1] >= words:
        raise CorruptWeightsError(f"patch {index}: it changes word {positions[-1]} of a chunk of {words}")
    changes = (folded >> 1) ^ np.negative(folded & 1)
    if not changes.all():
        raise CorruptWeightsError(f"patch {index}: it has changes of zero")
    return Patch(positions, changes)


def word_sum(raw: bytes | memoryview, word: np.dtype) -> int:
    """Return the sum, modulo 2^64, of the squares of the words, each taken as a signed number.

    Engines give the same sum of what they hold (inference/snapshot.py, word_sum). It does not depend on the order.
    """
    bits, total = np.frombuffer(raw, f"<i{word.itemsize}"), 0
    for start in range(0, len(bits), _SUM_WORDS):
        piece = bits[start : start + _SUM_WORDS].astype(np.int64)
        total += int(np.sum(piece * piece))
    return total % (1 << 64)
