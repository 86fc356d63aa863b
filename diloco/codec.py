"""How a pseudo-gradient travels: a flat float32 vector [n] to bytes and back. CPU tensors.

    fp32, bf16      every element on its own: exact, or rounded to 16 bits
    int8, int4      symmetric integers with one bfloat16 scale a block
    e3m0            a sign and a power of two in 4 bits (arXiv 2501.18512), one bfloat16 scale a block
    sparse          the largest entries of each chunk of 4096 with 2-bit values (SparseLoCo, arXiv 2508.15706)

Every codec is a pure function of its input, so all peers decode the same values. `ErrorFeedback` adds what one encoding
lost to the next delta. Integer and e3m0 codes are far from evenly used, so they are entropy coded (EntropyCodec).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import zstandard
from torch import Tensor

from composer_prime.config.diloco import MAX_BLOCK, CodecConfig


def build_codec(config: CodecConfig) -> Codec:
    """Return the codec that `config` asks for."""
    if config.type in _FLOAT_TYPES:
        return codec_from_spec(config.type)
    if config.type == "sparse":
        return codec_from_spec(f"sparse/{max(2, round(config.density * SparseCodec.CHUNK / 2) * 2)}")
    return codec_from_spec(f"{config.type}/{config.block}")


def codec_from_spec(spec: str) -> Codec:
    """Return the codec that a header's `codec` field names, such as "int4/256" or "sparse/64".

    Raises ValueError for an unknown name.
    """
    kind, _, number = spec.partition("/")
    if kind in _FLOAT_TYPES and not number:
        return FloatCodec(kind)
    if number.isdecimal() and 0 < (size := int(number)) <= MAX_BLOCK and size % 2 == 0:
        if kind in ("int8", "int4"):
            return EntropyCodec(IntegerCodec(bits=int(kind[3:]), block=size))
        if kind == "e3m0":
            return EntropyCodec(E3M0Codec(block=size))
        if kind == "sparse" and size <= SparseCodec.CHUNK // 2:
            return SparseCodec(kept=size)
    raise ValueError(f"no codec is called {spec!r}")


class Codec(ABC):
    """Encodes float32 [n] to uint8 [bytes] and back."""

    spec: str
    """Its name in headers, with its parameter."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Return the bytes of an encoded vector of n elements; the most, where an entropy code makes them vary."""

    @abstractmethod
    def encode(self, values_n: Tensor) -> Tensor:
        """Return uint8 [bytes]. A block with NaN or infinity decodes to values that are not finite either."""

    @abstractmethod
    def decode(self, data: Tensor, n: int) -> Tensor:
        """Return float32 [n]. Raises ValueError when `data` does not have the size that n values take."""

    def check(self, data: Tensor, n: int) -> None:
        if data.numel() != self.size(n):
            raise ValueError(f"{self.spec}: {data.numel()} bytes, but {n} values take {self.size(n)}")


class ErrorFeedback:
    """The residual of every fragment: what encoding lost is added to the next delta (arXiv 1901.09847)."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.residuals: list[Tensor] = [torch.zeros(size) for size in sizes]
        """float32 [numel] a fragment."""

    def encode(self, fragment: int, delta_n: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
        """Encode the delta plus the fragment's residual. The new residual counts from `settle` on.

        Return the bytes, uint8, and what they lack, float32 [numel].
        """
        target_n = delta_n + self.residuals[fragment]
        data = codec.encode(target_n)
        return data, target_n - codec.decode(data, target_n.numel())

    def settle(self, fragment: int, residual_n: Tensor) -> None:
        """Keep the residual of a delta that entered the global model; zeros where it is not finite."""
        finite = bool(torch.isfinite(residual_n).all())
        self.residuals[fragment] = residual_n if finite else torch.zeros_like(residual_n)

    def reset(self, fragment: int) -> None:
        self.residuals[fragment].zero_()


# -- one number an element ---------------------------------------------------------------------------------------

_FLOAT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FloatCodec(Codec):
    """fp32 is exact. bf16 rounds to nearest, ties to even: a relative error of at most 2^-8 for normal numbers."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.dtype = _FLOAT_TYPES[spec]

    def size(self, n: int) -> int:
        return self.dtype.itemsize * n

    def encode(self, values_n: Tensor) -> Tensor:
        return as_bytes(values_n.to(self.dtype))

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        return from_bytes(data, self.dtype).to(torch.float32)


# -- blocks with one scale ---------------------------------------------------------------------------------------

SCALE = torch.bfloat16
"""Type of a block's scale. It has float32's range, so NaN, infinity and the smallest deltas travel."""


class BlockCodec(Codec):
    """Wire form: the scales [blocks] bfloat16, then the codes, at 4 bits two to a byte."""

    def __init__(self, kind: str, *, bits: int, block: int, top: int) -> None:
        """`top`: the code of a block's largest value."""
        self.spec = f"{kind}/{block}"
        self.bits = bits
        self.block = block
        self.top = top

    def size(self, n: int) -> int:
        return -(-n // self.block) * (2 + self.block * self.bits // 8)

    def encode(self, values_n: Tensor) -> Tensor:
        scales, relative = in_scale(in_blocks(values_n, self.block), self.top)
        return torch.cat([as_bytes(scales.to(SCALE)), self._pack(relative)])

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        end = 2 * -(-n // self.block)
        scales = from_bytes(data[:end], SCALE).to(torch.float32).view(-1, 1)
        return (self._unpack(data[end:]).view(-1, self.block) * scales).view(-1)[:n]

    @abstractmethod
    def _pack(self, relative: Tensor) -> Tensor:
        """Return the codes of values [blocks, block] in units of their scales, uint8 [bytes]."""

    @abstractmethod
    def _unpack(self, data: Tensor) -> Tensor: ...


class IntegerCodec(BlockCodec):
    """Symmetric integers: q = round(x / s), s = max |x| / (2^(bits-1) - 1), |x - s q| <= s / 2; 4 bits shifted by 8."""

    def __init__(self, *, bits: int, block: int) -> None:
        """`bits`: 8 or 4."""
        super().__init__(f"int{bits}", bits=bits, block=block, top=2 ** (bits - 1) - 1)

    def _pack(self, relative: Tensor) -> Tensor:
        # At most top + 1/4, because the scale is rounded: that rounds to top.
        codes = relative.round_().nan_to_num_().clamp_(-self.top, self.top).to(torch.int8)
        return as_bytes(codes) if self.bits == 8 else pack_nibbles((codes + 8).to(torch.uint8))

    def _unpack(self, data: Tensor) -> Tensor:
        codes = from_bytes(data, torch.int8) if self.bits == 8 else unpack_nibbles(data).to(torch.int8) - 8
        return codes.to(torch.float32)


_LEVELS = torch.tensor([0.0] + [2.0 ** (code - 7) for code in range(1, 8)])
_EXPONENT_BITS, _EXPONENT_OF_ZERO = 23, 127 - 7
"""Where float32 keeps its exponent, and its value there for 2^-7, one below code 1."""


class E3M0Codec(BlockCodec):
    """With s = max |x|, code 0 is zero, code e = 1..7 is s 2^(e-7), bit 3 is the sign; the nearest level is taken."""

    def __init__(self, *, block: int) -> None:
        super().__init__("e3m0", bits=4, block=block, top=1)

    def _pack(self, relative: Tensor) -> Tensor:
        relative.nan_to_num_()
        return pack_nibbles(_nearest_levels(relative.abs()).to(torch.uint8) | ((relative < 0).to(torch.uint8) << 3))

    def _unpack(self, data: Tensor) -> Tensor:
        return torch.cat([_LEVELS, -_LEVELS])[unpack_nibbles(data).to(torch.int32)]


def _nearest_levels(magnitudes: Tensor) -> Tensor:
    """Return the code of the level nearest to each magnitude, int32, for a scale of 1.

    2^k is nearest from 3/4 2^k to 3/2 2^k, so the exponent of 4/3 x gives k. From 2^-7 on, 0 is farther than 2^-6.
    """
    codes = ((magnitudes * (4 / 3)).view(torch.int32) >> _EXPONENT_BITS) - _EXPONENT_OF_ZERO
    return codes.clamp_(0, 7).maximum((magnitudes > 2.0**-7).to(torch.int32))


def in_blocks(values_n: Tensor, block: int) -> Tensor:
    """Return [blocks, block], the last block padded with zeros."""
    missing = -values_n.numel() % block
    return torch.nn.functional.pad(values_n, (0, missing)).view(-1, block)


def in_scale(blocks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the scales [blocks, 1], max |x| / `top` as bfloat16 rounds it, and `blocks` divided by them.

    A subnormal scale has too few digits to divide by, so it becomes 0. Such a block is sent as zeros and stays in the
    error feedback.
    """
    scales = (blocks.abs().amax(dim=1, keepdim=True) / top).to(SCALE).to(torch.float32)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, torch.zeros_like(scales), scales)
    return scales, blocks / torch.where(scales == 0, torch.ones_like(scales), scales)


# -- the largest entries -----------------------------------------------------------------------------------------


class SparseCodec(Codec):
    """An entry has 12 bits of position, a sign bit, and a bit that chooses between the chunk's two magnitudes.

    The magnitudes are the means of the kept entries above and below their mean. Wire form, k = entries kept a chunk:
    magnitudes [chunks, 2] float32, then positions [chunks, k] at two in three bytes, then values [chunks, k] at four a
    byte, padded to a whole byte. 14 k / 4096 + 1 / 64 bits a parameter: 0.23 at k = 64.
    """

    CHUNK = 4096

    def __init__(self, *, kept: int) -> None:
        """`kept`: entries of each chunk, even: two positions share three bytes."""
        self.kept = kept
        self.spec = f"sparse/{kept}"

    def size(self, n: int) -> int:
        chunks = -(-n // self.CHUNK)
        return chunks * (8 + self.kept * 3 // 2) + -(-chunks * self.kept // 4)

    def encode(self, values_n: Tensor) -> Tensor:
        chunks = in_blocks(values_n, self.CHUNK)
        magnitudes, positions = chunks.abs().topk(self.kept, dim=1, sorted=False)
        positions, order = positions.sort(dim=1)
        magnitudes = magnitudes.gather(1, order)
        negative = chunks.gather(1, positions) < 0
        high = magnitudes > magnitudes.mean(dim=1, keepdim=True)
        levels = torch.stack([_mean_where(magnitudes, ~high), _mean_where(magnitudes, high)], dim=1)
        codes = (negative.to(torch.uint8) << 1) | high.to(torch.uint8)
        return torch.cat([as_bytes(levels), _pack_positions(positions), _pack_quarters(codes.view(-1))])

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        chunks = -(-n // self.CHUNK)
        first, second = 8 * chunks, 8 * chunks + chunks * self.kept * 3 // 2
        levels = from_bytes(data[:first], torch.float32).view(chunks, 2)
        positions = _unpack_positions(data[first:second]).view(chunks, self.kept)
        codes = _unpack_quarters(data[second:])[: chunks * self.kept].view(chunks, self.kept)
        values = levels.gather(1, (codes & 1).to(torch.int64))
        values = torch.where((codes & 2) > 0, -values, values)
        return torch.zeros(chunks, self.CHUNK).scatter_(1, positions, values).view(-1)[:n]


def _mean_where(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean [rows] of the masked entries of each row; 0 for a row without any."""
    picked = torch.where(mask, values, torch.zeros_like(values))
    return picked.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


# -- the lossless outer layer ------------------------------------------------------------------------------------

_PLAIN, _ZSTD = 0, 1
_LEVEL = 1
"""Codes have no repeats to look for: zstd's Huffman coder does all of the work at any level."""


class EntropyCodec(Codec):
    """Lossless: one byte that names the form, then a zstd frame or, where that is not shorter, the inner bytes.

    4-bit codes take about 3.2 to 3.8 bits.
    """

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.spec = inner.spec

    def size(self, n: int) -> int:
        return 1 + self.inner.size(n)

    def encode(self, values_n: Tensor) -> Tensor:
        plain = self.inner.encode(values_n).numpy()
        frame = zstandard.ZstdCompressor(level=_LEVEL).compress(plain.data)
        kind, body = (_ZSTD, frame) if len(frame) < plain.nbytes else (_PLAIN, plain.tobytes())
        return torch.frombuffer(bytearray([kind]) + body, dtype=torch.uint8)

    def decode(self, data: Tensor, n: int) -> Tensor:
        raw, plain_size = data.numpy().data, self.inner.size(n)
        if not len(raw) or raw[0] not in (_PLAIN, _ZSTD):
            raise ValueError(f"{self.spec}: {len(raw)} bytes do not begin with {_PLAIN} (as is) or {_ZSTD} (zstd)")
        if raw[0] == _PLAIN:
            return self.inner.decode(data[1:], n)
        try:
            # Check the announced size first, so that a small frame cannot take all memory.
            if (announced := zstandard.frame_content_size(raw[1:])) != plain_size:
                raise ValueError(f"{self.spec}: a frame of {announced} bytes, but {n} values take {plain_size}")
            plain = zstandard.ZstdDecompressor().decompress(raw[1:], allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"{self.spec}: {error}") from None
        return self.inner.decode(torch.frombuffer(bytearray(plain), dtype=torch.uint8), n)


# -- bytes and bits ----------------------------------------------------------------------------------------------


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of `tensor` as uint8 [bytes]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of uint8 [bytes] as [elements] of `dtype`; the copy is aligned."""
    return data.clone().view(dtype)


def shared_bytes(body: memoryview) -> Tensor:
    """Return uint8 [bytes] that shares the memory of `body`, which must be writable."""
    return torch.frombuffer(body, dtype=torch.uint8) if len(body) else torch.empty(0, dtype=torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 values below 16, an even number of them, two to a byte."""
    pairs = codes.reshape(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    return torch.stack([data & 15, data >> 4], dim=1).reshape(-1)


def _pack_positions(positions: Tensor) -> Tensor:
    first, second = positions.to(torch.int32).reshape(-1, 2).unbind(1)
    word = first | (second << 12)
    return torch.stack([word & 255, (word >> 8) & 255, word >> 16], dim=1).to(torch.uint8).reshape(-1)


def _unpack_positions(data: Tensor) -> Tensor:
    low, middle, high = data.to(torch.int64).view(-1, 3).unbind(1)
    word = low | (middle << 8) | (high << 16)
    return torch.stack([word & 4095, word >> 12], dim=1).reshape(-1)


def _pack_quarters(codes: Tensor) -> Tensor:
    quads = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    return quads[:, 0] | (quads[:, 1] << 2) | (quads[:, 2] << 4) | (quads[:, 3] << 6)


def _unpack_quarters(data: Tensor) -> Tensor:
    return torch.stack([(data >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).reshape(-1)
