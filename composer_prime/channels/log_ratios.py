"""Ratios of probabilities from differences of log-probabilities, bounded so that one broken token stays a number."""

from __future__ import annotations

from torch import Tensor

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
