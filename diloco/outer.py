"""The outer optimizer: one step of a fragment's global values along the mean pseudo-gradient.

    Delta = mean_i w_i (global - local_i)
    v <- m v + Delta;   global <- global - lr (Delta + m v)        Nesterov as in torch.optim.SGD; DiLoCo, 2311.08105

Departures:
1. v starts at 0, as torch's first step does in effect (its first v is Delta).
2. Global values and momentum are float32 on the CPU whatever the parameters are: an outer step below the resolution of
   bfloat16 would vanish.
3. Products and sums are separate operations. A fused multiply-add rounds once where two operations round twice, and
   which of the two a library takes depends on the processor; so every peer gets the same bits on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from composer_prime.config.diloco import OuterConfig


class OuterOptimizer(Protocol):
    """What turns a round's mean delta into the next global values."""

    velocity: list[Tensor]
    """Momentum, float32 [numel] a fragment; none where the optimizer has none."""

    def step(self, fragment: int, master_n: Tensor, mean_n: Tensor) -> None:
        """Update `master_n` (float32 [numel]) in place; `mean_n` is left as it is."""
        ...

    def reach(self, fragment: int, largest: float) -> float:
        """No intermediate value, change or momentum of a step is larger than this, no element of its mean `largest`."""
        ...


class Averaging:
    """The global model becomes the mean of the peers'."""

    def __init__(self) -> None:
        self.velocity: list[Tensor] = []

    def step(self, fragment: int, master_n: Tensor, mean_n: Tensor) -> None:
        master_n.sub_(mean_n)

    def reach(self, fragment: int, largest: float) -> float:
        return largest


class Nesterov:
    """Gradient descent with Nesterov momentum; without momentum plain steps of `lr`."""

    def __init__(self, lr: float, momentum: float, sizes: Sequence[int]) -> None:
        """`sizes`: elements of each fragment on this rank."""
        self.lr, self.momentum = lr, momentum
        self.velocity = [torch.zeros(size) for size in sizes] if momentum else []

    def step(self, fragment: int, master_n: Tensor, mean_n: Tensor) -> None:
        direction_n = mean_n
        if self.velocity:
            velocity_n = self.velocity[fragment].mul_(self.momentum).add_(mean_n)
            direction_n = mean_n + velocity_n * self.momentum
        master_n.sub_(direction_n if self.lr == 1.0 else direction_n * self.lr)

    def reach(self, fragment: int, largest: float) -> float:
        velocity = largest + (largest_of(self.velocity[fragment]) if self.velocity else 0.0)
        return max(1.0, self.lr) * (largest + velocity)


def largest_of(values_n: Tensor) -> float:
    """The largest absolute value, 0 of none; NaN when an element is."""
    low, high = torch.aminmax(values_n) if values_n.numel() else (torch.zeros(()), torch.zeros(()))
    return max(-float(low), float(high))


def build_outer(config: OuterConfig, sizes: Sequence[int]) -> OuterOptimizer:
    """`sizes`: elements of each fragment on this rank."""
    return Averaging() if config.type == "average" else Nesterov(config.lr, config.momentum, sizes)


def weighted_mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i (w_i / sum w) delta_i, float32 [numel], added up in the order given; weights are tokens, samples or ones.

    Weights that are all 0 count the same.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights] if total > 0 else [1.0 / len(weights)] * len(weights)
    mean_n = deltas[0] * shares[0]
    for delta_n, share in zip(deltas[1:], shares[1:], strict=True):
        mean_n.add_(delta_n * share)
    return mean_n
