"""Muon's orthogonalized step for the matrices of the blocks, with the same bits on every machine and number of ranks.

    rank r: its rows of the mean delta --> owner: Newton-Schulz on the whole matrix --> rank r: its rows of the step

Every matrix has one owner, chosen by the shapes so that the ranks have like shares of the work. The owner computes

    X <- M / |M|_F;   five times   A = X X^T,   X <- a X + (b A + c A A) X

which brings the singular values of M near 1 (Keller Jordan, https://kellerjordan.github.io/posts/muon/; at scale:
arXiv 2502.16982). torch.optim.Muon computes it in bfloat16. There the result depends on the order of summation: on the
library, the processor and the number of threads. Peers must agree on every bit, so two things differ here:

1. Before a product, both operands are rounded to integers n 2^s, |n| <= 2^k, with 2 k + ceil(log2(inner size)) <= 53.
   Then every product of two elements and every partial sum, in any order, fused or not, is an integer of at most 2^53,
   which float64 holds. Nothing is rounded, so only the sign of a zero can differ, which is made +. Scaling by 2^s is
   exact too.
2. All else is elementwise float64, one operation after the other, each rounded once as IEEE 754 requires (no fused
   multiply-add, no division by a scalar, which is a product on CUDA), and Python's own arithmetic.

This relies on matrix products that add up products of elements in float64. Strassen's algorithm and emulated types do
not, and no library uses them by default. k is 21 for inner sizes up to 2048 and 20 up to 8192: an operand loses 2^-k of
its largest element, where bfloat16 loses 2^-9 of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from composer_prime.errors import ConfigError
from composer_prime.model_source import block_of
from diloco.fragments import Fragment, NamedParameter, local_shard
from diloco.ranks import Ranks

A, B, C = 3.4445, -4.7750, 2.0315
"""Keller Jordan's coefficients, also those of torch.optim.Muon."""
STEPS = 5


def orthogonalized(matrix_mn: Tensor) -> Tensor:
    """Return U S' V^T for `matrix_mn` = U S V^T with S' between about 0.7 and 1.2; float32 [m, n], on the same device.

    Singular values below about 1/500 of the Frobenius norm come out smaller. Only the direction of the float32
    `matrix_mn` counts, not its length; zeros give zeros. A transposed matrix gives the transposed result, a square one
    nearly the transposed result.

    Raises ValueError when an element is NaN or infinite.
    """
    rows, columns = matrix_mn.shape
    if rows > columns:
        return orthogonalized(matrix_mn.T).T
    x_mn, _ = _integers(matrix_mn.to(torch.float64), columns)
    norm = math.sqrt(_sum_of_squares(x_mn))
    if not norm:
        return torch.zeros_like(matrix_mn)
    x_mn = x_mn * (1.0 / norm)
    for _ in range(STEPS):
        gram_mm = exact_product(x_mn, x_mn.T)
        powers_mm = gram_mm * B + exact_product(gram_mm, gram_mm) * C
        x_mn = x_mn * A + exact_product(powers_mm, x_mn)
    return x_mn.to(torch.float32)


def frobenius_norm(matrix_mn: Tensor) -> float:
    """Return the norm of float32 [m, n], to about 2^-20, with the same bits on every machine.

    Raises ValueError when an element is NaN or infinite.
    """
    integers_mn, exponent = _integers(matrix_mn.to(torch.float64), matrix_mn.shape[1])
    return math.ldexp(math.sqrt(_sum_of_squares(integers_mn)), exponent)


def _sum_of_squares(integers_mn: Tensor) -> int:
    """Take integers as `_integers` gives them for sums of n: each row's sum is exact in any order."""
    return sum(map(int, (integers_mn * integers_mn).sum(dim=1).tolist()))


def exact_product(left_mi: Tensor, right_in: Tensor) -> Tensor:
    """Return the product of both, first rounded to `_integers`; float64 [m, n], the same bits on every machine."""
    inner = left_mi.shape[1]
    (left_mi, left), (right_in, right) = _integers(left_mi, inner), _integers(right_in, inner)
    return (left_mi @ right_in) * 2.0 ** (left + right) + 0.0  # libraries start sums at 0.0, or at the first product


def _integers(values: Tensor, inner: int) -> tuple[Tensor, int]:
    """Return float64 integers n and an exponent s: n 2^s are `values`, rounded for sums of `inner` products.

    Raises ValueError when an element is NaN or infinite.
    """
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        raise ValueError(f"a matrix of shape {list(values.shape)} holds NaN or infinity")
    bits = (53 - max(0, inner - 1).bit_length()) // 2
    exponent = math.frexp(largest)[1] - bits
    return (values * 2.0**-exponent).round_(), exponent


@dataclass(slots=True, kw_only=True)
class Matrix:
    """A matrix of a block, of which this rank holds some rows."""

    place: slice
    """Of these rows in the fragment's vector."""
    rows: list[int]
    """How many each rank holds."""
    columns: int
    device: torch.device
    """Where it is orthogonalized."""
    owner: int = 0
    """The rank that orthogonalizes it."""

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz step."""
        short, long = sorted((sum(self.rows), self.columns))
        return short * short * (2 * long + short)

    @property
    def sizes(self) -> list[int]:
        """Elements that each rank holds."""
        return [rows * self.columns for rows in self.rows]


def matrices_of(fragment: Fragment, ranks: Ranks) -> tuple[list[Matrix], list[slice]]:
    """Return the matrices of blocks in a fragment's vector, and the places of all other parameters.

    Raises ConfigError when a matrix is not sharded by rows over `ranks`, as FSDP2 does.
    """
    matrices: list[Matrix] = []
    rest: list[slice] = []
    at = 0
    for name, parameter in fragment.parameters:
        shard = local_shard(parameter)
        place = slice(at, at + shard.numel())
        at = place.stop
        if parameter.ndim == 2 and block_of(name) is not None:
            device = shard.device if shard.device.type == "cuda" else torch.device("cpu")
            rows = _rows((name, parameter), ranks)
            matrices.append(Matrix(place=place, rows=rows, columns=parameter.shape[1], device=device))
        else:
            rest.append(place)
    _share_out(matrices, ranks.size)
    return matrices, rest


def _rows(named: NamedParameter, ranks: Ranks) -> list[int]:
    """Return how many rows of a matrix each rank holds. Raises ConfigError unless it is as torch.chunk splits them."""
    name, parameter = named
    total, own = parameter.shape[0], local_shard(parameter).shape[0]
    each = -(-total // ranks.size)
    rows = [max(0, min(each, total - rank * each)) for rank in range(ranks.size)]
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    if (ranks.size == 1 or placements == (Shard(0),)) and own == rows[ranks.rank]:
        return rows
    raise ConfigError(
        f"diloco.outer.type is 'muon', but rank {ranks.rank} of {ranks.size} holds {own} of the {total} rows of {name} "
        f"({', '.join(map(str, placements)) or 'not sharded'}), where Shard(0) over these ranks gives it "
        f"{rows[ranks.rank]}: shard as FSDP2 does, or use diloco.outer.type = 'nesterov'"
    )


def _share_out(matrices: Sequence[Matrix], ranks: int) -> None:
    """Give each matrix, the costliest first, to the rank with the least work so far."""
    work = [0] * ranks
    for matrix in sorted(matrices, key=lambda each: -each.cost):
        matrix.owner = work.index(min(work))
        work[matrix.owner] += matrix.cost


def orthogonal_steps(matrices: Sequence[Matrix], mean_n: Tensor, lr: float, ranks: Ranks) -> list[Tensor]:
    """Return this rank's rows of each matrix's step: the mean delta made orthogonal, `lr` times as long; float32, flat.

    A collective.
    """
    owned = [[matrix for matrix in matrices if matrix.owner == owner] for owner in range(ranks.size)]
    mine = owned[ranks.rank]
    gathered = ranks.exchange(
        [[mean_n[matrix.place] for matrix in each] for each in owned],
        [[matrix.sizes[source] for matrix in mine] for source in range(ranks.size)],
    )
    steps = [
        _orthogonal_step(matrix, torch.cat([parts[index] for parts in gathered]), lr).split(matrix.sizes)
        for index, matrix in enumerate(mine)
    ]
    returned = ranks.exchange(
        [[parts[target] for parts in steps] for target in range(ranks.size)],
        [[matrix.sizes[ranks.rank] for matrix in each] for each in owned],
    )
    by_owner = [iter(parts) for parts in returned]
    return [next(by_owner[matrix.owner]) for matrix in matrices]


def _orthogonal_step(matrix: Matrix, values_n: Tensor, lr: float) -> Tensor:
    """Return the step of a whole matrix, float32 [numel], on the CPU."""
    whole = values_n.view(sum(matrix.rows), matrix.columns).to(matrix.device)
    direction = orthogonalized(whole)
    length = frobenius_norm(direction)
    stretch = lr * frobenius_norm(whole) / length if length else 0.0
    return (direction.cpu().to(torch.float64) * stretch).to(torch.float32).flatten()
