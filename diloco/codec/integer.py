"""Symmetric integers with one bfloat16 scale a block: 8 or 4 bits and 16 / block, before entropy coding.

    q = round(x / s),  s = max |x| / (2^(bits-1) - 1);   |x - s q| <= s / 2

Wire form: the scales [blocks] bfloat16, then the integers, at 4 bits two to a byte and shifted by 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codec.base import (
    SCALE,
    Codec,
    as_bytes,
    from_bytes,
    in_blocks,
    in_scale,
    pack_nibbles,
    unpack_nibbles,
)


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
