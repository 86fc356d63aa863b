"""The matrices of the blocks, orthogonalised whole although each rank of a cluster holds some of their rows.

    rank r: its rows of the mean delta --> owner: Newton-Schulz on the whole matrix --> rank r: its rows of the step

Every matrix has one owner, chosen by the shapes so that the ranks have like shares of the work. Any number of ranks
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from composer_prime.blocks import block_of
from composer_prime.errors import ConfigError
from diloco.fragments import Fragment, Named, shard
from diloco.newton_schulz import frobenius_norm, orthogonalized
from diloco.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class Matrix:
    """A matrix of a block, of which this rank holds some rows."""

    place: slice
    """Of these rows in the fragment's vector."""
    rows: list[int]
    """How many each rank brings."""
    columns: int
    device: torch.device
    """Where it is orthogonalised."""
    owner: int = 0
    """The rank that orthogonalises it."""

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz step."""
        short, long = sorted((sum(self.rows), self.columns))
        return short * short * (2 * long + short)

    @property
    def sizes(self) -> list[int]:
        """Elements that each rank brings."""
        return [rows * self.columns for rows in self.rows]


def matrices_of(fragment: Fragment, ranks: Ranks) -> tuple[list[Matrix], list[slice]]:
    """The matrices of blocks in a fragment's vector, and the places of all other parameters.

    Raises ConfigError when a matrix is not sharded by rows over `ranks`, as FSDP2 does.
    """
    matrices: list[Matrix] = []
    rest: list[slice] = []
    at = 0
    for name, parameter in fragment.parameters:
        own = shard(parameter)
        place = slice(at, at + own.numel())
        at = place.stop
        if parameter.ndim == 2 and block_of(name) is not None:
            device = own.device if own.device.type == "cuda" else torch.device("cpu")
            rows = _rows((name, parameter), ranks)
            matrices.append(Matrix(place=place, rows=rows, columns=parameter.shape[1], device=device))
        else:
            rest.append(place)
    _share_out(matrices, ranks.size)
    return matrices, rest


def _rows(named: Named, ranks: Ranks) -> list[int]:
    """How many rows of a matrix each rank holds. Raises ConfigError when they are not as torch.chunk deals them out."""
    name, parameter = named
    total, own = parameter.shape[0], shard(parameter).shape[0]
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
    """Give each matrix to the rank that has least to do by then, the costliest first."""
    work = [0] * ranks
    for matrix in sorted(matrices, key=lambda each: -each.cost):
        matrix.owner = work.index(min(work))
        work[matrix.owner] += matrix.cost


def orthogonal_steps(matrices: Sequence[Matrix], mean_n: Tensor, lr: float, ranks: Ranks) -> list[Tensor]:
    """What each matrix's mean delta becomes, orthogonal and `lr` times as long: this rank's rows, float32, flat.

    A collective.
    """
    owned = [[matrix for matrix in matrices if matrix.owner == owner] for owner in range(ranks.size)]
    mine = owned[ranks.rank]
    brought = ranks.exchange(
        [[mean_n[matrix.place] for matrix in each] for each in owned],
        [[matrix.sizes[source] for matrix in mine] for source in range(ranks.size)],
    )
    cut = [
        _orthogonal_step(matrix, torch.cat([parts[index] for parts in brought]), lr).split(matrix.sizes)
        for index, matrix in enumerate(mine)
    ]
    returned = ranks.exchange(
        [[parts[target] for parts in cut] for target in range(ranks.size)],
        [[matrix.sizes[ranks.rank] for matrix in each] for each in owned],
    )
    by_owner = [iter(parts) for parts in returned]
    return [next(by_owner[matrix.owner]) for matrix in matrices]


def _orthogonal_step(matrix: Matrix, values_n: Tensor, lr: float) -> Tensor:
    """float32 [numel] of a whole matrix, on the CPU."""
    whole = values_n.view(sum(matrix.rows), matrix.columns).to(matrix.device)
    direction = orthogonalized(whole)
    length = frobenius_norm(direction)
    stretch = lr * frobenius_norm(whole) / length if length else 0.0
    return (direction.cpu().to(torch.float64) * stretch).to(torch.float32).flatten()
