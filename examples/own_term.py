"""A loss term of your own, in one file and one import path:

    trainer @ configs/a1.toml @ own_term.toml                              with, in own_term.toml:

    [run]
    import_from = ["examples"]
    [[channels.own]]
    name = "own_term:EntropyFloor"
    weight = 0.01
    [channels.own.settings]
    floor_nats = 0.5

`EntropyFloor` keeps the policy from becoming too sure of itself. For each trained token t that was sampled in a good
rollout, with H_t the entropy of the policy there:

    L = 1/G sum_t max(0, floor - H_t)                        over the G trained tokens with an advantage above 0

G counts the tokens of the whole step: `count` gives a row's share, and the trainer adds the shares of all rows and
ranks up before the first backward pass. So the loss does not depend on how the step was cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer_prime.channels.term import Sums, Term, TermConfig, TermRows, TermTokens
from composer_prime.packing.pack import Row
from composer_prime.wire.types import StepTotals


class EntropyFloor(Term):
    """Penalizes entropy below a floor."""

    name = "entropy_floor"

    def __init__(self, config: TermConfig, floor_nats: float = 0.5) -> None:
        super().__init__(config)
        self._floor_nats = floor_nats

    def rows(self, row: Row) -> TermRows:
        trained = row.trained
        return TermRows(positions=trained[row.advantages[trained] > 0])

    def count(self, row: Row) -> int:
        return len(self.rows(row).positions)

    def loss(self, inputs: TermTokens, totals: StepTotals) -> tuple[Tensor, Sums]:
        missing = (self._floor_nats - inputs.entropy).clamp(min=0)
        sums = {"tokens": torch.ones_like(missing.detach()).sum(), "missing": missing.detach().sum()}
        return missing.sum() / max(totals.own[self.name], 1), sums

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        count = sums["tokens"]
        return {"entropy_floor/missing_nats": sums["missing"] / count} if count else {}
