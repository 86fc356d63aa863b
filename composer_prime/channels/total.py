"""The whole loss: the sum of its terms, each over its own tokens and its own global denominator.

    L = L_policy + alpha(step) L_sdpo + beta(step) L_replay_dpo + weight(step) L_other ...

A term whose weight is 0 at a step adds nothing at all, so without other terms this is the policy loss to the last bit.
A term with a weight but without tokens in this micro-batch is a zero that is attached to the graph, so FSDP ranks stay
in step. A term's metric sums are there whenever it is on, whatever its weight at the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer_prime.channels.term import Sums, Term
from composer_prime.errors import ConfigError
from composer_prime.wire.types import StepTotals

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """One micro-batch's share of the step's loss."""

    total: Tensor
    """Scalar, with gradient."""
    sums: Sums
    """Detached scalars that add up over micro-batches and ranks: `loss/...` and those of each term, prefixed."""


def total_loss(terms: Sequence[Term], inputs: Mapping[str, Any], totals: StepTotals, step: int = 1) -> LossParts:
    """Return the sum of `terms` at `step` (from 1), whose `inputs` are given by their names.

    Raises ConfigError when a term has a weight, but no input.
    """
    losses: dict[str, Tensor] = {}
    sums: Sums = {}
    total: Tensor | None = None
    for term in terms:
        if term.name not in inputs:
            raise ConfigError(
                f"channels.{term.name} has a weight, but the batch has no input for this loss term: set "
                f"channels.{term.name}.weight = 0"
            )
        loss, term_sums = term.loss(inputs[term.name], totals)
        losses[f"loss/{term.name}"] = loss.detach()
        sums |= {f"{term.prefix or term.name}/{name}": value for name, value in term_sums.items()}
        weight = term.weight_at(step)
        if total is None:
            total = loss
        elif weight != 0:
            total = total + weight * loss
    assert total is not None
    return LossParts(total=total, sums=losses | sums | {"loss/total": total.detach()})


def channel_metrics(terms: Sequence[Term], sums: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics from sums that were added over all its micro-batches and ranks."""
    metrics = {name: value for name, value in sums.items() if name.startswith("loss/")}
    for term in terms:
        prefix = f"{term.prefix or term.name}/"
        metrics |= term.metrics(
            {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
        )
    return metrics
