"""Every element as a number of its own: 32 bits, exact, or 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codec.base import Codec, as_bytes, from_bytes


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
