"""Lossless coding of a codec's bytes: 4-bit codes are far from evenly used, so they take about 3.2 to 3.8 bits.

Wire form: one byte that says which, then a zstd frame or, where that is no shorter, the bytes as they are.
"""

from __future__ import annotations

import torch
import zstandard
from torch import Tensor

from diloco.codec.base import Codec

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
