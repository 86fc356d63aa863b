"""Channel 1's noun: the trained tokens of a micro-batch.

Sums and means over the sequences that tokens laid end to end belong to.

Ratios of probabilities from differences of log-probabilities, bounded so that one broken token stays a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Sums = dict[str, Tensor]
"""Scalars that add up over micro-batches and ranks. Which names there are depends on the configuration alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The trained tokens of one micro-batch, laid end to end; T may be 0."""

    logprobs_T: Tensor
    """float [T], with gradient: log pi under the sampling temperature."""
    sampler_logprobs_T: Tensor
    """float [T]: log mu, what the inference engine recorded."""
    advantages_T: Tensor
    """float [T]."""
    entropy_T: Tensor
    """float [T]: entropy of pi at the token, in nats; with gradient where `entropy_weight` > 0."""
    sequence_T: Tensor
    """int64 [T]: which sequence of the micro-batch the token belongs to."""
    sequences: int
    """Sequences in the micro-batch."""
    reference_logprobs_T: Tensor | None = None
    """float [T]: log-probability under the reference policy; needed where `kl.weight` > 0."""
    weight_T: Tensor | None = None
    """float [T]: factor of each token's whole loss that its maker asks for; None is 1."""


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


LOG_RATIO_LIMIT = 20.0
"""Nats."""


def bounded(log_T: Tensor) -> Tensor:
    """A log ratio [T] clamped to +-20 nats."""
    return log_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bounded_exp(log_T: Tensor) -> Tensor:
    """exp of a log ratio [T] clamped to +-20 nats."""
    return bounded(log_T).exp()


def capped(ratio_T: Tensor, cap: float | None) -> Tensor:
    """min(ratio, cap) [T] by a detached factor: a capped ratio keeps a gradient, cap * grad log pi."""
    return ratio_T if cap is None else ratio_T * (cap / ratio_T.detach()).clamp(max=1.0)
