"""Keys and values of every slot: one pair of tensors per layer, grown as sequences get longer.

A slot is one sequence's row of columns. The layout is [heads, slots, columns, head size]: the new tokens of a step are
one `index_copy_`, and attention sees neighboring slots as one strided view without a copy.
"""

from __future__ import annotations

import math
import mmap

import torch

from composer_prime.errors import EngineError

_COLUMNS_STEP = 128


class KvCache:
    """Takes its shapes from the first forward pass, so it fits any model that uses the attention interface."""

    def __init__(self) -> None:
        self.slots = 1
        self.columns = _COLUMNS_STEP
        self._limits = (1 << 62, 1 << 62)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of each layer, [heads, slots, columns, head size]."""

    def limit(self, slots: int, columns: int) -> None:
        """Bound growth to this many slots and columns. On a CPU, reserve the address space at once."""
        self._limits = (slots, columns)
        if all(keys.device.type == "cpu" for keys, _ in self.layers.values()):
            self.reserve(slots, columns)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers; known after the first forward pass."""
        tensors = [tensor for pair in self.layers.values() for tensor in pair]
        return sum(tensor.shape[0] * tensor.shape[3] * tensor.element_size() for tensor in tensors)

    def reserve(self, slots: int, columns: int) -> None:
        """Grow to at least `slots` rows of `columns`; what they hold stays. Growth is geometric, layer by layer."""
        if slots <= self.slots and columns <= self.columns:
            return
        self.slots = max(self.slots, min(_grown(self.slots, slots, step=8), self._limits[0]))
        self.columns = max(self.columns, min(_grown(self.columns, columns, step=_COLUMNS_STEP), self._limits[1]))
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = (self._enlarged(keys), self._enlarged(values))

    def _enlarged(self, old: torch.Tensor) -> torch.Tensor:
        heads, slots, columns, size = old.shape
        new = _zeros((heads, self.slots, self.columns, size), old)
        new[:, :slots, :columns] = old
        return new

    def write(self, index: int, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor) -> None:
        """Store `key`, `value` [heads, N, head size] at flat `places` [N] (slot * columns + position)."""
        if index not in self.layers:
            shape = (key.shape[0], self.slots, self.columns)
            self.layers[index] = (_zeros((*shape, key.shape[2]), key), _zeros((*shape, value.shape[2]), value))
        keys, values = self.layers[index]
        if keys.shape[0] != key.shape[0] or keys.shape[3] != key.shape[2]:
            raise EngineError(f"layer {index} changed its KV shape; the local engine cannot serve this model")
        keys.view(key.shape[0], -1, key.shape[2]).index_copy_(1, places, key)
        values.view(value.shape[0], -1, value.shape[2]).index_copy_(1, places, value)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` columns of one slot to another: a shared prefix, or a move."""
        for pair in self.layers.values():
            for tensor in pair:
                tensor[:, target, :count] = tensor[:, source, :count]


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return zeros: a masked column may be read and must be finite. On a CPU untouched pages cost no memory."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    pages = mmap.mmap(-1, math.prod(shape) * like.element_size())
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def _grown(have: int, need: int, *, step: int) -> int:
    """Return the next size: at least `need`, at least 1.5 times `have` when growing, a multiple of `step`."""
    if need <= have:
        return have
    return -(-max(need, have + have // 2) // step) * step
