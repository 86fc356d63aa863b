"""Tokens of the policy loss, and the arithmetic that the loss terms share.

Tokens of all sequences lie end to end; sums and means are taken by sequence. Log ratios are bounded before exp, so that
one broken token gives a large number and not an infinity. torch is loaded at its first use: the settings of loss terms
are read in processes that never load it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


Function = TypeVar("Function", bound=Callable[..., Any])


class _Torch:
    """Stands for the module; each name is looked up once."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("torch"), name)
        setattr(self, name, value)
        return value


torch: Any = _Torch()


def without_gradient(function: Function) -> Function:
    """Let `function` compute under torch.no_grad."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]


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
    """float [T]: entropy of pi at the token, in nats."""
    sequence_T: Tensor
    """int64 [T]: the token's sequence within the micro-batch."""
    sequences: int
    """Sequences in the micro-batch."""
    reference_logprobs_T: Tensor | None = None
    """float [T]: log-probability under the reference policy; needed where `kl.weight` > 0."""


def sum_by(values_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """Return each sequence's sum, [sequences]; differentiable."""
    zeros = torch.zeros(sequences, dtype=values_T.dtype, device=values_T.device)
    return zeros.index_add(0, sequence_T, values_T)


def mean_by(values_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """Return each sequence's mean, [sequences]; 0 for a sequence without a token; differentiable."""
    lengths = sum_by(torch.ones_like(values_T), sequence_T, sequences)
    return sum_by(values_T, sequence_T, sequences) / lengths.clamp(min=1)


LOG_RATIO_LIMIT = 20.0
"""Nats."""


def bounded(log_T: Tensor) -> Tensor:
    """Clamp a log ratio [T] to +-20 nats."""
    return log_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bounded_exp(log_T: Tensor) -> Tensor:
    """Return exp of a log ratio [T] clamped to +-20 nats."""
    return bounded(log_T).exp()


def capped(ratio_T: Tensor, cap: float | None) -> Tensor:
    """Return min(ratio, cap) [T] by a detached factor: a capped ratio keeps a gradient, cap * grad log pi."""
    return ratio_T if cap is None else ratio_T * (cap / ratio_T.detach()).clamp(max=1.0)
