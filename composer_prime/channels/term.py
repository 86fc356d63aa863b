"""A loss term: one class in one file, with its settings, its rows, its loss and its metrics.

    settings    a TermConfig: weight, schedule and what else the term needs
    rows        which tokens of a micro-batch it reads, and its own figures of them            TermRows
    inputs      the statistics of these tokens, once the forward pass is done                  TermTokens
    loss        this micro-batch's share of the step's loss, and sums that add up
    metrics     a step's metrics, from the sums of all micro-batches and ranks

The trainer makes one forward pass for all terms. It asks each for its rows, merges them, and hands each the statistics
of its own tokens in the order that it gave. A term of your own is such a class, named in [[channels.own]].

`total_loss` alone applies the weights: alpha is channels.sdpo.weight, beta channels.replay_dpo.weight, each with its
schedule. The whole loss is the sum of the terms, each over its own tokens. SDPO divides as the policy loss does, the
others by global denominators of their own:

    L = L_policy + alpha(step) L_sdpo + beta(step) L_replay_dpo + weight(step) L_other ...

A term whose weight is 0 at a step adds nothing at all, so without other terms this is the policy loss to the last bit.
A term with a weight but without tokens in this micro-batch is a zero that is attached to the graph, so FSDP ranks stay
in step. A term's metric sums are there whenever it is on, whatever its weight at the step.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec.structs import replace
from pydantic import Field
from pydantic_config import BaseConfig

from composer_prime.errors import ConfigError
from composer_prime.import_path import place_of
from composer_prime.packing.pack import Row
from composer_prime.wire.types import StepTotals

if TYPE_CHECKING:
    from torch import Tensor

    from composer_prime.channels.policy import PolicyTerm

Sums = dict[str, "Tensor"]
"""Scalars that add up over micro-batches and ranks. The names depend on the configuration and the totals."""


class WeightSchedule(BaseConfig):
    """Factor on a loss term's weight at each step. The default is 1."""

    end_step: int | None = Field(default=None, ge=1)
    """Last step at the full weight; None never ends."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps after end_step over which the weight falls linearly to 0."""

    def factor(self, step: int) -> float:
        """Return the factor at `step` (from 1), in 0..1."""
        if self.end_step is None or step <= self.end_step:
            return 1.0
        return max(0.0, 1.0 - (step - self.end_step) / (self.decay_steps + 1))


class TermConfig(BaseConfig):
    """The settings that terms beside the policy loss have in common."""

    weight: float = Field(default=0.0, ge=0)
    """Factor of the term in the loss; 0 turns it off."""

    def weight_at(self, step: int) -> float:
        """Return the weight at `step` (from 1)."""
        return self.weight

    def term(self, policy: PolicyTerm) -> Term:
        """Return the loss term with these settings. `policy` is the run's policy term, for one that divides alike."""
        raise NotImplementedError


class ScheduledTermConfig(TermConfig):
    """The settings of a term whose weight may end before the run."""

    schedule: WeightSchedule = WeightSchedule()
    """The weight over the run."""

    def weight_at(self, step: int) -> float:
        """Return the weight at `step` (from 1)."""
        return self.weight * self.schedule.factor(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRows:
    """What a term reads of one micro-batch."""

    positions: np.ndarray
    """int64 [K]: the tokens whose statistics it needs, as positions in the row; none is the first of its document."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Its own figures, which the trainer moves to the device as float32 or int64."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Its own counts, which stay on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtTokens:
    """Statistics of a term's K tokens beside those of a teacher."""

    divergence: Tensor
    """float [K], with gradient."""
    teacher_entropy: Tensor
    """float [K], detached."""
    teacher_logprobs: Tensor
    """float [K], detached: of the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermTokens:
    """A term's rows after the forward pass; K may be 0."""

    logprobs: Tensor
    """float [K], with gradient, nats, at each document's sampling temperature."""
    entropy: Tensor
    """float [K], with gradient, nats."""
    arrays: Mapping[str, Tensor]
    """Those of TermRows, on the device."""
    counts: Mapping[str, int]
    """Those of TermRows."""
    reference: Tensor | None = None
    """Log-probabilities under other weights: of the policy's tokens [K], or sums of scored documents [S]; or None."""
    taught: TaughtTokens | None = None
    """None for a term without a teacher, and for a row without its documents."""


class Term(ABC):
    """A loss term with its settings."""

    name: str
    """Its table in [channels], and its name in StepTotals."""
    prefix = ""
    """What its metrics begin with; empty for its name."""
    is_taught: ClassVar[bool] = False
    """Whether its tokens are compared with a teacher's; of one term at most."""
    is_scored: ClassVar[bool] = False
    """Whether the frozen base scores its units, each document's tokens as a sum; of one term at most."""

    def __init__(self, config: TermConfig) -> None:
        """A term of the user's takes its own settings as further keyword arguments."""
        self._config: Any = config

    def weight_at(self, step: int) -> float:
        """Return the factor of the term's loss at `step` (from 1)."""
        return self._config.weight_at(step)

    @abstractmethod
    def rows(self, row: Row) -> TermRows:
        """Return what the term reads of `row`."""

    def count(self, row: Row) -> int:
        """Return what this row adds to `totals.own[self.name]`, the term's own denominator over the whole step."""
        return 0

    def inputs(self, tokens: TermTokens) -> Any:
        """Return what `loss` takes: the tokens in the term's own words."""
        return tokens

    @abstractmethod
    def loss(self, inputs: Any, totals: StepTotals) -> tuple[Tensor, Sums]:
        """Return this micro-batch's share of the step's loss (scalar, before its weight) and its metric sums.

        Without tokens it is a zero that is attached to the graph: every rank runs its backward pass.
        """

    @abstractmethod
    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return a step's metrics from sums over all its micro-batches and ranks."""


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
        given = term.loss(inputs[term.name], totals)
        is_own = not type(term).__module__.startswith("composer_prime.")
        loss, term_sums = checked_loss(given, term.loss, is_own and total is not None and total.requires_grad)
        if is_own and step == 1:
            _warn_of_a_mean(term, inputs[term.name], totals, loss)
        losses[f"loss/{term.name}"] = loss.detach()
        sums |= {f"{term.prefix or term.name}/{name}": value for name, value in term_sums.items()}
        weight = term.weight_at(step)
        if total is None:
            total = loss if weight == 1 else weight * loss
        elif weight != 0:
            total = total + weight * loss
    assert total is not None
    return LossParts(total=total, sums=losses | sums | {"loss/total": total.detach()})


def _warn_of_a_mean(term: Term, inputs: Any, totals: StepTotals, loss: Tensor) -> None:
    """Say that a term gives the same loss whatever the whole step holds."""
    other = replace(totals, samples=9**9, tokens=9**9, micro_batches=9**9, own=dict.fromkeys(totals.own, 9**9))
    if loss.item() and term.loss(inputs, other)[0].item() == loss.item():
        text = "%s: the loss ignores `totals`: return a sum over max(totals.own[self.name], 1), no mean, no plain sum"
        logging.getLogger(__name__).warning(text, place_of(term.loss))


def checked_loss(given: Any, function: Any, needs_grad: bool) -> tuple[Tensor, Sums]:
    """Return the loss and the sums that a function of the user's gave. Raises ConfigError, which names it."""
    pair: tuple[Any, Any] = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    loss, sums = pair
    if isinstance(sums, Mapping) and getattr(loss, "shape", None) == () and (loss.requires_grad or not needs_grad):
        return loss, dict(sums)
    text = " ".join(f"{given!r}".split())
    raise ConfigError(f"{place_of(function)}: return a scalar with a gradient, and a dict of sums, not {text:.80}")


def channel_metrics(terms: Sequence[Term], sums: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics from sums that were added over all its micro-batches and ranks."""
    metrics = {name: value for name, value in sums.items() if name.startswith("loss/")}
    for term in terms:
        prefix = f"{term.prefix or term.name}/"
        metrics |= term.metrics(
            {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
        )
    return metrics
