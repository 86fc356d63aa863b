"""Every element as a number of its own: 32 bits, exact, or 16 bits.

Symmetric integers with one bfloat16 scale a block: 8 or 4 bits and 16 / block, before entropy coding.

    q = round(x / s),  s = max |x| / (2^(bits-1) - 1);   |x - s q| <= s / 2

Wire form: the scales [blocks] bfloat16, then the integers, at 4 bits two to a byte and shifted by 8.

Four bits: a sign and a power of two (E3M0, arXiv 2501.18512), one bfloat16 scale a block.

    s = max |x|;  code 0 is zero, code e = 1..7 is s * 2^(e-7); bit 3 is the sign; values take the nearest level

Wire form: the scales [blocks] bfloat16, then two codes to a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codec.base import SCALE, Codec, as_bytes, from_bytes, in_blocks, in_scale, pack_nibbles, unpack_nibbles


class Float32Codec(Codec):
    spec = "fp32"

    def size(self, n: int) -> int:
        return 4 * n

    def encode(self, values_n: Tensor) -> Tensor:
        return as_bytes(values_n.to(torch.float32))

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        return from_bytes(data, torch.float32)


class Bfloat16Codec(Codec):
    """Rounded to nearest, ties to even: a relative error of at most 2^-8 for normal numbers."""

    spec = "bf16"

    def size(self, n: int) -> int:
        return 2 * n

    def encode(self, values_n: Tensor) -> Tensor:
        return as_bytes(values_n.to(torch.bfloat16))

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        return from_bytes(data, torch.bfloat16).to(torch.float32)


class IntegerCodec(Codec):
    def __init__(self, *, bits: int, block: int) -> None:
        """`bits`: 8 or 4."""
        self.bits, self.block = bits, block
        self.top = 2 ** (bits - 1) - 1
        self.spec = f"int{bits}/{block}"

    def size(self, n: int) -> int:
        blocks = -(-n // self.block)
        return blocks * (2 + self.block * self.bits // 8)

    def encode(self, values_n: Tensor) -> Tensor:
        # At most top + 1/4, for the scale is rounded: that rounds to top.
        scales, codes = in_scale(in_blocks(values_n, self.block), self.top)
        codes = codes.round_().nan_to_num_().clamp_(-self.top, self.top).to(torch.int8)
        packed = as_bytes(codes) if self.bits == 8 else pack_nibbles((codes + 8).to(torch.uint8))
        return torch.cat([as_bytes(scales.to(SCALE)), packed])

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        blocks = -(-n // self.block)
        scales = from_bytes(data[: 2 * blocks], SCALE).to(torch.float32).view(-1, 1)
        body = data[2 * blocks :]
        codes = from_bytes(body, torch.int8) if self.bits == 8 else unpack_nibbles(body).to(torch.int8) - 8
        return (codes.to(torch.float32).view(-1, self.block) * scales).view(-1)[:n]


_LEVELS = torch.tensor([0.0] + [2.0 ** (code - 7) for code in range(1, 8)])
_EXPONENT_BITS, _EXPONENT_OF_ZERO = 23, 127 - 7
"""Where float32 keeps its exponent, and what it is there for 2^-7: one below code 1."""


class E3M0Codec(Codec):
    def __init__(self, *, block: int) -> None:
        self.block = block
        self.spec = f"e3m0/{block}"

    def size(self, n: int) -> int:
        return -(-n // self.block) * (2 + self.block // 2)

    def encode(self, values_n: Tensor) -> Tensor:
        scales, relative = in_scale(in_blocks(values_n, self.block), 1)
        relative.nan_to_num_()
        codes = _codes(relative.abs()).to(torch.uint8) | ((relative < 0).to(torch.uint8) << 3)
        return torch.cat([as_bytes(scales.to(SCALE)), pack_nibbles(codes)])

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        blocks = -(-n // self.block)
        scales = from_bytes(data[: 2 * blocks], SCALE).to(torch.float32).view(-1, 1)
        codes = unpack_nibbles(data[2 * blocks :])
        values = torch.cat([_LEVELS, -_LEVELS])[codes.to(torch.int32)]
        return (values.view(-1, self.block) * scales).view(-1)[:n]


def _codes(magnitudes: Tensor) -> Tensor:
    """int32, the nearest level's code of each magnitude, the scale being 1.

    2^k is nearest from 3/4 2^k to 3/2 2^k, so the exponent of 4/3 x says it; but from 2^-7 on 0 is farther than 2^-6.
    """
    codes = ((magnitudes * (4 / 3)).view(torch.int32) >> _EXPONENT_BITS) - _EXPONENT_OF_ZERO
    return codes.clamp_(0, 7).maximum((magnitudes > 2.0**-7).to(torch.int32))
