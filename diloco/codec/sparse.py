"""The largest entries of each chunk of 4096, with 2-bit values (SparseLoCo, arXiv 2508.15706).

    entry = 12 bits of position, a sign bit, a bit that chooses between the chunk's two magnitudes
    the magnitudes are the means of the kept entries above and below their mean

Wire form, k = entries kept a chunk: magnitudes [chunks, 2] float32, then positions [chunks, k] at two in three bytes,
then values [chunks, k] at four a byte, padded to a whole byte. 14 k / 4096 + 1 / 64 bits a parameter: 0.23 at k = 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codec.base import Codec, as_bytes, from_bytes, in_blocks


class SparseCodec(Codec):
    CHUNK = 4096

    def __init__(self, *, kept: int) -> None:
        """`kept`: entries of each chunk, even."""
        if kept % 2:
            raise ValueError(f"sparse keeps {kept} entries a chunk; two positions share three bytes, so use {kept + 1}")
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
        return torch.cat([as_bytes(levels), _pack_positions(positions), _pack_codes(codes.view(-1))])

    def decode(self, data: Tensor, n: int) -> Tensor:
        self.check(data, n)
        chunks = -(-n // self.CHUNK)
        first, second = 8 * chunks, 8 * chunks + chunks * self.kept * 3 // 2
        levels = from_bytes(data[:first], torch.float32).view(chunks, 2)
        positions = _unpack_positions(data[first:second]).view(chunks, self.kept)
        codes = _unpack_codes(data[second:])[: chunks * self.kept].view(chunks, self.kept)
        values = levels.gather(1, (codes & 1).to(torch.int64))
        values = torch.where((codes & 2) > 0, -values, values)
        return torch.zeros(chunks, self.CHUNK).scatter_(1, positions, values).view(-1)[:n]


def _mean_where(values: Tensor, mask: Tensor) -> Tensor:
    """Mean [rows] of the masked entries of each row; 0 for a row without any."""
    picked = torch.where(mask, values, torch.zeros_like(values))
    return picked.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def _pack_positions(positions: Tensor) -> Tensor:
    first, second = positions.to(torch.int32).reshape(-1, 2).unbind(1)
    word = first | (second << 12)
    return torch.stack([word & 255, (word >> 8) & 255, word >> 16], dim=1).to(torch.uint8).reshape(-1)


def _unpack_positions(data: Tensor) -> Tensor:
    low, middle, high = data.to(torch.int64).view(-1, 3).unbind(1)
    word = low | (middle << 8) | (high << 16)
    return torch.stack([word & 4095, word >> 12], dim=1).reshape(-1)


def _pack_codes(codes: Tensor) -> Tensor:
    quads = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    return quads[:, 0] | (quads[:, 1] << 2) | (quads[:, 2] << 4) | (quads[:, 3] << 6)


def _unpack_codes(data: Tensor) -> Tensor:
    return torch.stack([(data >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).reshape(-1)
