"""What differs between two versions, as a file for vLLM's patch loader: the positions and new values of each tensor.

A trainer's difference adds up words; that loader puts values in place. So the node looks up the new values and writes
those that changed, with their positions: of a 16-bit type a third may change before whole tensors are fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from composer_prime.errors import CorruptWeightsError
from inference.engines.base import published_shapes
from inference.snapshot import save_snapshot, tensor_blocks

INDICES, VALUES = ".patch_indices", ".patch_values"
"""Follow a tensor's name in the file."""
_WORDS = {2: torch.int16, 4: torch.int32}
_LARGEST = 2**31
"""Elements of a tensor that 32-bit indices can tell apart."""


def save_patch(base: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], path: Path) -> bool:
    """Write what turns `base` into `tensors`. Return whether it can be told so, and in fewer bytes than whole."""
    if published_shapes(base) != published_shapes(tensors):
        return False
    try:
        save_snapshot(_Changes(base, tensors), path)
    except _NotSparse:
        return False
    return True


class _NotSparse(Exception):
    """The versions differ in more than some values."""


class _Changes(Mapping[str, torch.Tensor]):
    """Indices and values of each tensor. A tensor is compared when it is looked up, so that only one is in memory."""

    def __init__(self, base: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        self._base = base
        self._tensors = tensors
        self._sizes = {name: math.prod(shape) for name, shape in published_shapes(tensors).items()}
        self._last: tuple[str, dict[str, torch.Tensor]] = "", {}
        self._found_bytes = 0

    def __len__(self) -> int:
        return 2 * len(self._sizes)

    def __iter__(self) -> Iterator[str]:
        return (name + part for name in self._sizes for part in (INDICES, VALUES))

    def __getitem__(self, key: str) -> torch.Tensor:
        name = key.removesuffix(INDICES).removesuffix(VALUES)
        if self._last[0] != name:
            self._last = name, dict(zip((name + INDICES, name + VALUES), self._compared(name), strict=True))
        return self._last[1][key]

    def _compared(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises _NotSparse."""
        found = [
            _changed(start, old, new)
            for old, (start, new) in zip(self._old_blocks(name), tensor_blocks(self._tensors, name), strict=True)
        ]
        indices, values = map(torch.cat, zip(*found, strict=True))
        self._found_bytes += indices.nbytes + values.nbytes
        too_many = self._found_bytes >= sum(self._sizes.values()) * values.itemsize
        # vLLM marks what stays with NaN, so that no new value may be one.
        if too_many or self._sizes[name] > _LARGEST or values.isnan().any():
            raise _NotSparse
        return indices, values

    def _old_blocks(self, name: str) -> Iterator[torch.Tensor]:
        try:
            for _, old in tensor_blocks(self._base, name):
                yield old
        except CorruptWeightsError:  # Whole tensors do not need the old ones.
            raise _NotSparse from None


def _changed(start: int, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    words = _WORDS.get(new.itemsize)
    if words is None or not new.is_floating_point() or old.dtype != new.dtype or old.shape != new.shape:
        raise _NotSparse
    places = (old.view(words) != new.view(words)).nonzero()[:, 0]
    return (places + start).int(), new[places]
