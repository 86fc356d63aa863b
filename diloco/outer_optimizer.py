"""The outer optimizer: one step of a fragment's global values along the mean pseudo-gradient.

    Delta = mean_i w_i (global - local_i)
    v <- m v + Delta;   global <- global - lr (Delta + m v)   Nesterov as in torch.optim.SGD; DiLoCo, arXiv 2311.08105
    global <- global - muon_lr |Delta|_F O / |O|_F,   O = orthogonalized(Delta)         Muon, for matrices of the blocks

Departures:
1. v starts at 0, as torch's first step does in effect (its first v is Delta).
2. Global values and momentum are float32 on the CPU whatever the parameters are: an outer step below the resolution of
   bfloat16 would vanish. Deltas are taken against the global values as the parameters hold them, so such a step stays.
3. Products and sums are separate operations, so every peer gets the same bits on any machine. A fused multiply-add
   rounds once where two operations round twice, and which of the two a library takes depends on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from composer_prime.config.diloco import OuterConfig
from composer_prime.errors import ConfigError
from diloco.fragments import Fragment
from diloco.muon import matrices_of, orthogonal_steps
from diloco.ranks import Ranks


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


class Muon:
    """Orthogonalized steps without momentum for the matrices of the blocks, and Nesterov for the rest.

    A step is as long as the mean delta, times the learning rate, so one rate serves any H and inner rate. (Muon as an
    inner optimizer has steps of a fixed length.) Such an outer optimizer is an experiment of our own, not a published
    recipe: docs/reference/results.md has its results.
    """

    def __init__(self, config: OuterConfig, fragments: Sequence[Fragment], ranks: Ranks) -> None:
        """Raises ConfigError when no parameter is a matrix of a block, or `ranks` do not hold one by rows."""
        assert config.muon_lr is not None  # OuterConfig sets it
        self._lr = config.muon_lr
        self._ranks = ranks
        parts = [matrices_of(fragment, ranks) for fragment in fragments]
        self._matrices = [matrices for matrices, _ in parts]
        self._rest = [rest for _, rest in parts]
        if not any(self._matrices):
            raise ConfigError(
                "diloco.outer.type is 'muon', but no trainable parameter is a matrix of a numbered block (such as "
                "layers.0.proj.weight): use diloco.outer.type = 'nesterov'"
            )
        sizes = [sum(part.stop - part.start for part in rest) for rest in self._rest]
        self._nesterov = Nesterov(config.lr, config.momentum, sizes)
        self.velocity = self._nesterov.velocity

    def step(self, fragment: int, master_n: Tensor, mean_n: Tensor) -> None:
        """Update `master_n` in place. A collective."""
        self._step_rest(fragment, master_n, mean_n)
        matrices = self._matrices[fragment]
        for matrix, step_n in zip(matrices, orthogonal_steps(matrices, mean_n, self._lr, self._ranks), strict=True):
            master_n[matrix.place].sub_(step_n)

    def _step_rest(self, fragment: int, master_n: Tensor, mean_n: Tensor) -> None:
        parts = [master_n[place] for place in self._rest[fragment]]
        if not parts:
            return
        values_r = torch.cat(parts)
        self._nesterov.step(fragment, values_r, torch.cat([mean_n[place] for place in self._rest[fragment]]))
        for part, values in zip(parts, values_r.split([len(part) for part in parts]), strict=True):
            part.copy_(values)

    def reach(self, fragment: int, largest: float) -> float:
        # It holds on the rank with the largest element of all; the other ranks rely on that rank's answer.
        longest = max((math.sqrt(sum(matrix.sizes)) * largest for matrix in self._matrices[fragment]), default=0.0)
        return max(self._nesterov.reach(fragment, largest), self._lr * longest)


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
