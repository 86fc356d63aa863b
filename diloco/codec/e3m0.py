"""Four bits: a sign and a power of two (E3M0, arXiv 2501.18512), one float32 scale a block.

    code 0 is zero, code e = 1..7 is s * 2^(e-7), s = max |x| of the block; bit 3 is the sign

Values are rounded to the nearest level: an error of at most |x| / 3 from s / 64 upwards, at most s / 128 below.
Wire form: the scales [blocks] float32, then two codes to a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codec.base import Codec, as_bytes, from_bytes, in_blocks, pack_nibbles, unpack_nibbles

_LEVELS = torch.tensor([0.0] + [2.0 ** (code - 7) for code in range(1, 8)])
_MIDDLES = (_LEVELS[1:] + _LEVELS[:-1]) / 2
"""A magnitude above the i-th belongs to code i + 1 or higher."""


class E3M0Codec(Codec):
    def __init__(self, *, block: int) -> None:
        self.block = block
        self.spec = f"e3m0/{block}"

    def size(self, n: int) -> int:
        return -(-n // self.block) * (4 + self.block // 2)

    def encode(self, values_n: Tensor) -> Tensor:
        blocks = in_blocks(values_n, self.block)
        scales = blocks.abs().amax(dim=1, keepdim=True)
        scales = torch.where(scales < torch.finfo(torch.float32).tiny, torch.zeros_like(scales), scales)
        relative = (blocks / torch.where(scales == 0, torch.ones_like(scales), scales)).nan_to_num_()
        codes = torch.bucketize(relative.abs(), _MIDDLES, out_int32=True).to(torch.uint8)
        codes |= (relative < 0).to(torch.uint8) << 3
        return torch.cat([as_bytes(scales), pack_nibbles(codes)])

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        blocks = -(-n // self.block)
        scales = from_bytes(data[: 4 * blocks], torch.float32).view(-1, 1)
        codes = unpack_nibbles(data[4 * blocks :])
        values = torch.cat([_LEVELS, -_LEVELS])[codes.to(torch.int32)]
        return (values.view(-1, self.block) * scales).view(-1)[:n]
