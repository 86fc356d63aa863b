"""Error feedback: what one encoding lost is added to the next delta, so nothing is lost for good (arXiv 1901.09847)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codec.base import Codec


@dataclass(frozen=True, slots=True)
class Encoded:
    data: Tensor
    """uint8 [bytes], as the codec makes them."""
    residual_n: Tensor
    """float32 [n]: what `data` lacks."""


class ErrorFeedback:
    """The residual of every fragment."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.residuals: list[Tensor] = [torch.zeros(size) for size in sizes]
        """float32 [numel] a fragment."""

    def encode(self, fragment: int, delta_n: Tensor, codec: Codec) -> Encoded:
        """Encode the delta with what is owed to it. The residual counts from `settle` on."""
        wanted_n = delta_n + self.residuals[fragment]
        data = codec.encode(wanted_n)
        return Encoded(data, wanted_n - codec.decode(data, wanted_n.numel()))

    def settle(self, fragment: int, residual_n: Tensor) -> None:
        """The encoded delta entered the global model. A residual that is not finite is forgotten."""
        finite = bool(torch.isfinite(residual_n).all())
        self.residuals[fragment] = residual_n if finite else torch.zeros_like(residual_n)

    def reset(self, fragment: int) -> None:
        """Nothing is owed any more."""
        self.residuals[fragment].zero_()
