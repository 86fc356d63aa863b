"""Channel 1's noun: the trained tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

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
