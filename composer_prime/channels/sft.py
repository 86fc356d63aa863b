"""SFT: cross entropy on the assistant tokens of recorded conversations (demonstrations).

    L = -1/E sum_t log pi(a_t | everything before it)

E counts the demonstrated tokens of the whole step, over all ranks and micro-batches. This is TRL's SFTTrainer with
assistant_only_loss, whose mean is over the tokens of a step too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer_prime.channels.term import Sums, Term, TermConfig, TermRows, TermTokens
from composer_prime.channels.tokens import torch
from composer_prime.packing.pack import Row, joined, span_positions
from composer_prime.wire.types import StepTotals

if TYPE_CHECKING:
    from torch import Tensor

    from composer_prime.channels.policy import PolicyTerm

NAME = "sft"


class SftConfig(TermConfig):
    """SFT: cross-entropy on the assistant tokens of recorded conversations."""

    def term(self, policy: PolicyTerm) -> SftTerm:
        return SftTerm(self)


class SftTerm(Term):
    """Reads the demonstrations of a row: units of one document, whose mask says what is imitated."""

    name = NAME

    def rows(self, row: Row) -> TermRows:
        return TermRows(positions=joined(map(span_positions, row.units(NAME))))

    def inputs(self, tokens: TermTokens) -> Tensor:
        return tokens.logprobs

    def loss(self, inputs: Tensor, totals: StepTotals) -> tuple[Tensor, Sums]:
        return sft_loss(inputs, totals.unit_tokens.get(NAME, 0))

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        count = sums["tokens"]
        return {"sft/tokens": count} | ({"sft/nll": sums["nll"] / count} if count else {})


def sft_loss(logprobs_E: Tensor, count: int) -> tuple[Tensor, Sums]:
    """Return this micro-batch's share of the loss (scalar, before its weight) and its metric sums.

    `logprobs_E`: float [E], with gradient, at temperature 1; E may be 0. `count`: demonstrated tokens of the step.
    Without tokens the loss is a zero that is attached to the graph.
    """
    nll = -logprobs_E.sum()
    tokens = torch.full_like(nll.detach(), float(logprobs_E.numel()))
    return nll / max(count, 1), {"tokens": tokens, "nll": nll.detach()}
