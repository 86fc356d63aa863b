"""The outer optimizer: one step of a fragment's global values along the mean pseudo-gradient.

    Delta = mean_i w_i (global - local_i)
    v <- m v + Delta;   global <- global - lr (Delta + m v)   Nesterov as in torch.optim.SGD; DiLoCo, arXiv 2311.08105

Departures:
1. v starts at 0, as torch's first step does in effect (its first v is Delta).
2. Global values and momentum are float32 on the CPU whatever the parameters are: an outer step below the resolution of
   bfloat16 would vanish. Deltas are taken against the global values as the parameters hold them, so such a step stays.
3. Products and sums are separate operations, so every peer gets the same bits on any machine. A fused multiply-add
   rounds once where two operations round twice, and which of the two a library takes depends on the processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Nesterov:
    """Gradient descent with Nesterov momentum. With `lr` 1 and no momentum, the peers' models are averaged."""

    def __init__(self, lr: float, momentum: float, sizes: Sequence[int]) -> None:
        """`sizes`: elements of each fragment on this rank."""
        self.lr = lr
        self.momentum = momentum
        self.velocity = [torch.zeros(size) for size in sizes] if momentum else []
        """float32 [numel] a fragment; empty without momentum."""

    def step(self, fragment: int, master_n: Tensor, mean_n: Tensor) -> None:
        """Update `master_n` (float32 [numel]) in place; leave `mean_n` as it is."""
        direction_n = mean_n
        if self.velocity:
            velocity_n = self.velocity[fragment].mul_(self.momentum).add_(mean_n)
            direction_n = mean_n + velocity_n * self.momentum
        master_n.sub_(direction_n if self.lr == 1.0 else direction_n * self.lr)

    def reach(self, fragment: int, largest: float) -> float:
        """Return a bound on every intermediate value, change and momentum of a step whose mean is at most `largest`."""
        velocity = largest + largest_of(self.velocity[fragment]) if self.velocity else 0.0
        return max(1.0, self.lr) * (largest + velocity)


def largest_of(values_n: Tensor) -> float:
    """Return the largest absolute value, 0 of none; NaN when an element is NaN."""
    low, high = torch.aminmax(values_n) if values_n.numel() else (torch.zeros(()), torch.zeros(()))
    return max(-float(low), float(high))


def weighted_mean(deltas: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum_i (w_i / sum w) delta_i, float32 [numel], added up in the order given, one delta at a time.

    Weights are tokens, samples or ones. Weights that are all 0 count the same.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights] if total > 0 else [1.0 / len(weights)] * len(weights)
    each_n = iter(deltas)
    mean_n = next(each_n) * shares[0]
    for share in shares[1:]:
        mean_n.add_(next(each_n) * share)
    return mean_n
