"""What a codec does, and the packing that several share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
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
