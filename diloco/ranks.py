"""What the ranks of one cluster decide together. Each has its own link, and all must take the same turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

POLL_S = 0.2
"""How often ranks that wait for something from outside compare what they know."""


class Ranks:
    """The trainer ranks of this cluster; without a process group, this rank alone. Every method is a collective."""

    def __init__(self) -> None:
        """The default group, if there is one, must carry CPU tensors (gloo)."""
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.size = dist.get_world_size() if distributed else 1

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest over the ranks, element by element."""
        reduced = torch.tensor(values, dtype=torch.int64)
        if self.size > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN)
        return reduced.tolist()

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum over the ranks, element by element, rounded once: the order of ranks does not matter."""
        own = torch.tensor(values, dtype=torch.float64)
        parts = [own] if self.size == 1 else [torch.empty_like(own) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(parts, own)
        return [math.fsum(each) for each in zip(*(part.tolist() for part in parts), strict=True)]

    def all(self, flag: bool) -> bool:
        return bool(self.smallest([flag])[0])

    def any(self, flag: bool) -> bool:
        return not self.smallest([not flag])[0]

    def bounds(self, values: Sequence[int]) -> list[tuple[int, int]]:
        """Return the smallest and the largest over the ranks, element by element."""
        reduced = self.smallest([*values, *(-value for value in values)])
        return [(low, -high) for low, high in zip(reduced[: len(values)], reduced[len(values) :], strict=True)]

    def equal(self, values: Sequence[int]) -> bool:
        """Return whether all ranks gave the same values."""
        return all(low == high for low, high in self.bounds(values))

    def exchange(
        self, outgoing: Sequence[Sequence[torch.Tensor]], incoming_sizes: Sequence[Sequence[int]]
    ) -> list[list[torch.Tensor]]:
        """Send each rank the float32 vectors `outgoing[rank]`; receive from each those of `incoming_sizes[rank]`."""
        if self.size == 1:
            return [list(each) for each in outgoing]
        send_counts, receive_counts = [sum(map(len, each)) for each in outgoing], [sum(each) for each in incoming_sizes]
        sent = torch.cat([torch.empty(0), *itertools.chain.from_iterable(outgoing)])
        received = torch.empty(sum(receive_counts))
        dist.all_to_all_single(received, sent, receive_counts, send_counts)
        parts = zip(received.split(receive_counts), incoming_sizes, strict=True)
        return [list(part.split(list(each))) for part, each in parts]
