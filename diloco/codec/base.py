"""What a codec does, and the packing that several share.

Lossless coding of a codec's bytes: 4-bit codes are far from evenly used, so they take about 3.2 to 3.8 bits.

Wire form: one byte that says which, then a zstd frame or, where that is no shorter, the bytes as they are.

Error feedback: what one encoding lost is added to the next delta, so nothing is lost for good (arXiv 1901.09847).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import zstandard
from torch import Tensor


class Codec(ABC):
    """Encodes float32 [n] to uint8 [bytes] and back. CPU tensors."""

    spec: str
    """Its name in headers, with its parameter."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Bytes of an encoded vector of n elements; the most, where an entropy code makes them vary."""

    @abstractmethod
    def encode(self, values_n: Tensor) -> Tensor:
        """uint8 [bytes]. A block with NaN or infinity decodes to values that are not finite either."""

    @abstractmethod
    def decode(self, data: Tensor, n: int) -> Tensor:
        """float32 [n]. Raises ValueError when `data` is not as long as n values take."""

    def check(self, data: Tensor, n: int) -> None:
        if data.numel() != self.size(n):
            raise ValueError(f"{self.spec}: {data.numel()} bytes, but {n} values take {self.size(n)}")


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of `tensor` as uint8 [bytes]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of uint8 [bytes] as [elements] of `dtype`; the copy is aligned."""
    return data.clone().view(dtype)


def shared(body: memoryview) -> Tensor:
    """uint8 [bytes] that shares the memory of `body`, which must be writable."""
    return torch.frombuffer(body, dtype=torch.uint8) if len(body) else torch.empty(0, dtype=torch.uint8)


SCALE = torch.bfloat16
"""Of a block: float32's range, so that NaN, infinity and the smallest deltas travel, in half of the bytes."""


def in_blocks(values_n: Tensor, block: int) -> Tensor:
    """[blocks, block], the last one padded with zeros."""
    missing = -values_n.numel() % block
    return torch.nn.functional.pad(values_n, (0, missing)).view(-1, block)


def in_scale(blocks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scales [blocks, 1], max |x| / `top` as bfloat16 rounds it, and `blocks` divided by them.

    A subnormal scale has too few digits to divide by: it becomes 0, and such a block is sent as zeros and stays in the
    error feedback.
    """
    scales = (blocks.abs().amax(dim=1, keepdim=True) / top).to(SCALE).to(torch.float32)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, torch.zeros_like(scales), scales)
    return scales, blocks / torch.where(scales == 0, torch.ones_like(scales), scales)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 values below 16, an even number of them, two to a byte."""
    pairs = codes.reshape(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    return torch.stack([data & 15, data >> 4], dim=1).reshape(-1)


_PLAIN, _ZSTD = 0, 1
_LEVEL = 1
"""Codes have no repeats to look for: zstd's Huffman coder does all of the work at any level."""


class EntropyCodec(Codec):
    def __init__(self, inner: Codec) -> None:
        self.inner, self.spec = inner, inner.spec

    def size(self, n: int) -> int:
        return 1 + self.inner.size(n)

    def encode(self, values_n: Tensor) -> Tensor:
        plain = self.inner.encode(values_n).numpy()
        frame = zstandard.ZstdCompressor(level=_LEVEL).compress(memoryview(plain))
        kind, body = (_ZSTD, frame) if len(frame) < plain.nbytes else (_PLAIN, plain.tobytes())
        return torch.frombuffer(bytearray([kind]) + body, dtype=torch.uint8)

    def decode(self, data: Tensor, n: int) -> Tensor:
        raw, plain_size = memoryview(data.numpy()), self.inner.size(n)
        if not len(raw) or raw[0] not in (_PLAIN, _ZSTD):
            raise ValueError(f"{self.spec}: {len(raw)} bytes do not begin with {_PLAIN} (as is) or {_ZSTD} (zstd)")
        if raw[0] == _PLAIN:
            return self.inner.decode(data[1:], n)
        try:
            # A frame says how much it unfolds to: looked at first, so that a small one cannot take all memory.
            if (unfolded := zstandard.frame_content_size(raw[1:])) != plain_size:
                raise ValueError(f"{self.spec}: a frame of {unfolded} bytes, but {n} values take {plain_size}")
            plain = zstandard.ZstdDecompressor().decompress(raw[1:])
        except zstandard.ZstdError as error:
            raise ValueError(f"{self.spec}: {error}") from None
        return self.inner.decode(torch.frombuffer(bytearray(plain), dtype=torch.uint8), n)


@dataclass(frozen=True, slots=True)
class Encoded:
    data: Tensor
    """uint8 [bytes], as the codec makes them."""
    residual_n: Tensor
    """float32 [n]: what `data` lacks."""


class ErrorFeedback:
    """The residual of every fragment."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.residuals: list[Tensor] = [torch.zeros(size) for size in sizes]
        """float32 [numel] a fragment."""

    def encode(self, fragment: int, delta_n: Tensor, codec: Codec) -> Encoded:
        """Encode the delta with what is owed to it. The residual counts from `settle` on."""
        wanted_n = delta_n + self.residuals[fragment]
        data = codec.encode(wanted_n)
        return Encoded(data, wanted_n - codec.decode(data, wanted_n.numel()))

    def settle(self, fragment: int, residual_n: Tensor) -> None:
        """The encoded delta entered the global model. A residual that is not finite is forgotten."""
        finite = bool(torch.isfinite(residual_n).all())
        self.residuals[fragment] = residual_n if finite else torch.zeros_like(residual_n)

    def reset(self, fragment: int) -> None:
        """Nothing is owed any more."""
        self.residuals[fragment].zero_()
