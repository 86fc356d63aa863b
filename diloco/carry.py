"""What becomes of a peer's own work when a round ends. Read `OwnWork.install` first.

    inner steps     prepare ........ due (delay steps on) ........ now, when the outcome is here
                        | mixed, as in arXiv 2501.18512 | carried on whole

    COUNTED     local <- alpha due + (1 - alpha) global + (now - due)
    MISSED      local <- global + (now - global before)      the next delta holds all that was not delivered
    REPLACED    local <- global                              the delta was rejected, or local values are not finite
    EARLIER     local <- global                              a process before this one delivered in this peer's name

In time, now is due and COUNTED is the paper's equation, bit for bit. Work is counted beside the values: a delta weighs
what was trained on in the inner steps that it holds, whatever the number of fragments, the delay and the steps between.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from diloco.global_model import GlobalModel
from diloco.header import Header
from diloco.ranks import Ranks


class Fate(enum.Enum):
    """Of this peer's work in one fragment, as a round ends."""

    COUNTED = enum.auto()
    MISSED = enum.auto()
    REPLACED = enum.auto()
    EARLIER = enum.auto()


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What inner steps were trained on, over all ranks of a peer. Fractions where mixing keeps a part."""

    steps: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    peers: float = 1.0
    """Always 1: with weighting = "peers" every delta counts the same."""

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """self + times other."""
        return Work(
            steps=self.steps + times * other.steps,
            tokens=self.tokens + times * other.tokens,
            samples=self.samples + times * other.samples,
        )

    def minus(self, other: Work) -> Work:
        return self.plus(other, -1.0)


class Totals(msgspec.Struct, kw_only=True):
    """Since this peer began. A token counts by the share of the parameters that it concerns."""

    missed: int = 0
    """Rounds that ended without work that this peer had."""
    carried: float = 0.0
    """Tokens whose work an outcome left out and the next delta holds."""
    overwritten: float = 0.0
    """Tokens whose work was given up for the global values."""


@dataclass(slots=True)
class Offer:
    """What a delta that is under way covers; once its outcome is late, also how things stood when that was due."""

    work: Work
    due: Work | None = None
    due_n: Tensor | None = field(default=None, repr=False)
    """Local values, float32 [numel]."""


class OwnWork:
    """The work that the difference between local and global values holds, by fragment."""

    def __init__(self, model: GlobalModel, mixing: float, ranks: Ranks) -> None:
        self._model, self._mixing, self._ranks = model, mixing, ranks
        sizes = [fragment.numel for fragment in model.fragments]
        self._shares = [size / max(1, sum(sizes)) for size in sizes]
        self.held = [Work() for _ in sizes]
        self.totals = Totals()

    def count(self, work: Work) -> None:
        """One more piece of work, in every fragment."""
        self.held = [held.plus(work) for held in self.held]

    def late(self, fragment: int, offer: Offer) -> None:
        """The outcome of `offer` is due and not here: what is trained from now on is carried on whole."""
        if offer.due is None:
            offer.due, offer.due_n = self.held[fragment], self._model.fragments[fragment].read()

    def install(self, fragment: int, fate: Fate, offer: Offer | None, before_n: Tensor | None) -> None:
        """Give the parameters their values after a round whose outcome the global model already holds. A collective.

        `offer`: where COUNTED, and where EARLIER shuts out a delta of this process; `before_n`: the fragment's global
        values before the round, where MISSED.
        """
        values_n = self._model.masters[fragment]
        if fate is Fate.COUNTED and offer is not None:
            values_n = self._model.mixed(fragment, self._mixing, offer.due_n)
        elif fate is Fate.MISSED and before_n is not None:
            values_n = self._model.rebased(fragment, before_n)
        if not self._ranks.all(bool(torch.isfinite(values_n).all())):
            values_n, fate = self._model.masters[fragment], Fate.REPLACED
        self._model.fragments[fragment].write(values_n)
        self._settle(fragment, fate, offer)

    def replace_all(self) -> None:
        """Take the global values everywhere."""
        self._model.install_all()
        for fragment in range(len(self.held)):
            self._settle(fragment, Fate.REPLACED, None)

    def tokens_held(self) -> float:
        """Tokens whose work is not in the global model, a token by the share of the parameters that it concerns."""
        return sum(held.tokens * share for held, share in zip(self.held, self._shares, strict=True))

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"held": msgspec.to_builtins(self.held), "totals": msgspec.to_builtins(self.totals)}

    def restore(self, facts: dict[str, Any]) -> None:
        self.held = msgspec.convert(facts["held"], list[Work])
        self.totals = msgspec.convert(facts["totals"], Totals)

    def _settle(self, fragment: int, fate: Fate, offer: Offer | None) -> None:
        held, share, totals = self.held[fragment], self._shares[fragment], self.totals
        kept = Work()
        if fate is Fate.MISSED:
            totals.missed += held.steps > 0
            totals.carried += held.tokens * share
            kept = held
        elif fate is Fate.COUNTED and offer is not None:
            due = offer.due or held
            mixed, since = due.minus(offer.work), held.minus(due)
            totals.carried += since.tokens * share
            totals.overwritten += (1 - self._mixing) * mixed.tokens * share
            kept = since.plus(mixed, self._mixing)
        elif fate is Fate.REPLACED or (fate is Fate.EARLIER and offer is not None):
            totals.overwritten += held.tokens * share
        self.held[fragment] = kept


def fate_of(own: str, offered: Header | None, headers: Sequence[Header], rejected: Collection[str]) -> Fate:
    """What a closed round, with these `headers` of which the peers `rejected` do not count, means for peer `own`."""
    mine = next((header for header in headers if header.peer == own), None)
    if mine is None:
        return Fate.MISSED
    if mine != offered:
        return Fate.EARLIER
    return Fate.REPLACED if own in rejected else Fate.COUNTED
