"""Sums and means over the sequences that tokens laid end to end belong to."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths_of(sequence_T: Tensor, sequences: int, dtype: torch.dtype) -> Tensor:
    """Tokens of each sequence, [sequences] in `dtype`."""
    return torch.zeros(sequences, dtype=dtype, device=sequence_T.device).index_add(
        0, sequence_T, torch.ones_like(sequence_T, dtype=dtype)
    )


def sum_by(values_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """Each sequence's sum, [sequences]; differentiable."""
    zeros = torch.zeros(sequences, dtype=values_T.dtype, device=values_T.device)
    return zeros.index_add(0, sequence_T, values_T)


def mean_by(values_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """Each sequence's mean, [sequences]; 0 for a sequence without a token; differentiable."""
    lengths = lengths_of(sequence_T, sequences, values_T.dtype)
    return sum_by(values_T, sequence_T, sequences) / lengths.clamp(min=1)
