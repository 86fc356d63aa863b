"""Keys and values of every slot: one pair of tensors per layer.

A slot is one sequence's row of columns. The layout is [heads, slots, columns, head size]: the new tokens of a step are
one `index_copy_`, and attention sees neighboring slots as one strided view without a copy.
"""

from __future__ import annotations

import math
import mmap

import torch

from composer_prime.errors import EngineError

_FIRST_COLUMNS = 128
"""For the pass that shows which layers there are."""


class KvCache:
    """Takes its shapes from the first forward pass, so it fits any model that uses the attention interface."""

    def __init__(self) -> None:
        self.slots = 1
        self.columns = _FIRST_COLUMNS
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of each layer, [heads, slots, columns, head size]."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers; known after the first forward pass."""
        tensors = [tensor for pair in self.layers.values() for tensor in pair]
        return sum(tensor.shape[0] * tensor.shape[3] * tensor.element_size() for tensor in tensors)

    def allocate(self, slots: int, columns: int) -> None:
        """Make room for `slots` rows of `columns`, and forget what there was."""
        self.slots, self.columns = slots, columns
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = self._empty(keys.shape[0], keys), self._empty(values.shape[0], values)

    def _empty(self, heads: int, like: torch.Tensor) -> torch.Tensor:
        return _zeros((heads, self.slots, self.columns, like.shape[-1]), like)

    def write(self, index: int, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor) -> None:
        """Store `key`, `value` [heads, N, head size] at flat `places` [N] (slot * columns + position)."""
        if index not in self.layers:
            self.layers[index] = self._empty(key.shape[0], key), self._empty(value.shape[0], value)
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
