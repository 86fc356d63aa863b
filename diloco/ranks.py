"""What the ranks of one cluster decide together: each has a link of its own, and all must take the same turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

SLICE_S = 0.2
"""How often ranks that wait for something from outside compare notes."""


class Ranks:
    """The trainer ranks of this cluster; without a process group this rank alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group` must carry CPU tensors (gloo); None takes the default group, if there is one."""
        joined = dist.is_available() and dist.is_initialized()
        self._group = group
        self.rank = dist.get_rank(group) if joined else 0
        self.size = dist.get_world_size(group) if joined else 1

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Element by element over the ranks. A collective."""
        return self._reduce(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MIN)

    def total(self, values: Sequence[float]) -> list[float]:
        """Element by element over the ranks, rounded once, so that their order does not matter. A collective."""
        own = torch.tensor(values, dtype=torch.float64)
        parts = [own] if self.size == 1 else [torch.empty_like(own) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(parts, own, group=self._group)
        return [math.fsum(each) for each in zip(*(part.tolist() for part in parts), strict=True)]

    def all(self, flag: bool) -> bool:
        return bool(self.smallest([flag])[0])

    def any(self, flag: bool) -> bool:
        return not self.smallest([not flag])[0]

    def bounds(self, values: Sequence[int]) -> list[tuple[int, int]]:
        """Smallest and largest, element by element over the ranks. A collective."""
        found = self.smallest([*values, *(-value for value in values)])
        return [(low, -high) for low, high in zip(found[: len(values)], found[len(values) :], strict=True)]

    def alike(self, values: Sequence[int]) -> bool:
        """Whether all ranks gave the same. A collective."""
        return all(low == high for low, high in self.bounds(values))

    def exchange(
        self, given: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[torch.Tensor]]:
        """Give each rank the float32 vectors `given[rank]`, take from each those of `sizes[rank]`. A collective."""
        if self.size == 1:
            return [list(each) for each in given]
        outgoing, incoming = [sum(map(len, each)) for each in given], [sum(each) for each in sizes]
        sent = torch.cat([torch.empty(0), *itertools.chain.from_iterable(given)])
        taken = torch.empty(sum(incoming))
        dist.all_to_all_single(taken, sent, incoming, outgoing, group=self._group)
        return [list(part.split(list(each))) for part, each in zip(taken.split(incoming), sizes, strict=True)]

    def _reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> list:
        if self.size > 1:
            dist.all_reduce(values, op=operation, group=self._group)
        return values.tolist()
