"""What one rank holds of a joint run: the global model, its own work on top, and the delta that is on offer.

A checkpoint keeps all of it, so that a peer goes on as if it had not been away.

A delta that is on offer, and how a checkpoint keeps it.

What becomes of a peer's own work when a round ends. Read `LocalProgress.install` first.

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError
from diloco.codec import ErrorFeedback
from diloco.codec.base import shared
from diloco.fragments import Fragment, parameter_layout
from diloco.global_model import GlobalModel
from diloco.ranks import Ranks
from diloco.state_file import packed, unpacked
from diloco.transport.header import PROTOCOL, Header
from diloco.transport.messages import layout_hash


class DeltaStatus(enum.Enum):
    """Of this peer's work in one fragment, as a round ends."""

    COUNTED = enum.auto()
    MISSED = enum.auto()
    REPLACED = enum.auto()
    EARLIER = enum.auto()


class LocalWork(msgspec.Struct, frozen=True, kw_only=True):
    """What inner steps were trained on, over all ranks of a peer. Fractions where mixing keeps a part."""

    steps: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    peers: float = 1.0
    """Always 1: with weighting = "peers" every delta counts the same."""

    def plus(self, other: LocalWork, times: float = 1.0) -> LocalWork:
        """self + times other."""
        return LocalWork(
            steps=self.steps + times * other.steps,
            tokens=self.tokens + times * other.tokens,
            samples=self.samples + times * other.samples,
        )

    def minus(self, other: LocalWork) -> LocalWork:
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
class OfferedDelta:
    """What a delta that is under way covers; once its outcome is late, also how things stood when that was due."""

    work: LocalWork
    due: LocalWork | None = None
    due_n: Tensor | None = field(default=None, repr=False)
    """Local values, float32 [numel]."""


class LocalProgress:
    """The work that the difference between local and global values holds, by fragment."""

    def __init__(self, model: GlobalModel, mixing: float, ranks: Ranks) -> None:
        self._model, self._mixing, self._ranks = model, mixing, ranks
        sizes = [fragment.numel for fragment in model.fragments]
        self._shares = [size / max(1, sum(sizes)) for size in sizes]
        self.held = [LocalWork() for _ in sizes]
        self.totals = Totals()

    def count(self, work: LocalWork) -> None:
        """One more piece of work, in every fragment."""
        self.held = [held.plus(work) for held in self.held]

    def late(self, fragment: int, offer: OfferedDelta) -> None:
        """The outcome of `offer` is due and not here: what is trained from now on is carried on whole."""
        if offer.due is None:
            offer.due, offer.due_n = self.held[fragment], self._model.fragments[fragment].read()

    def install(self, fragment: int, fate: DeltaStatus, offer: OfferedDelta | None, before_n: Tensor | None) -> None:
        """Give the parameters their values after a round whose outcome the global model already holds. A collective.

        `offer`: where COUNTED, and where EARLIER shuts out a delta of this process; `before_n`: the fragment's global
        values before the round, where MISSED.
        """
        values_n = self._model.masters[fragment]
        if fate is DeltaStatus.COUNTED and offer is not None:
            values_n = self._model.mixed(fragment, self._mixing, offer.due_n)
        elif fate is DeltaStatus.MISSED and before_n is not None:
            values_n = self._model.rebased(fragment, before_n)
        if not self._ranks.all(bool(torch.isfinite(values_n).all())):
            values_n, fate = self._model.masters[fragment], DeltaStatus.REPLACED
        self._model.fragments[fragment].write(values_n)
        self._settle(fragment, fate, offer)

    def replace_all(self) -> None:
        """Take the global values everywhere."""
        self._model.install_all()
        for fragment in range(len(self.held)):
            self._settle(fragment, DeltaStatus.REPLACED, None)

    def tokens_held(self) -> float:
        """Tokens whose work is not in the global model, a token by the share of the parameters that it concerns."""
        return sum(held.tokens * share for held, share in zip(self.held, self._shares, strict=True))

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"held": msgspec.to_builtins(self.held), "totals": msgspec.to_builtins(self.totals)}

    def restore(self, facts: dict[str, Any]) -> None:
        self.held = msgspec.convert(facts["held"], list[LocalWork])
        self.totals = msgspec.convert(facts["totals"], Totals)

    def _settle(self, fragment: int, fate: DeltaStatus, offer: OfferedDelta | None) -> None:
        held, share, totals = self.held[fragment], self._shares[fragment], self.totals
        kept = LocalWork()
        if fate is DeltaStatus.MISSED:
            totals.missed += held.steps > 0
            totals.carried += held.tokens * share
            kept = held
        elif fate is DeltaStatus.COUNTED and offer is not None:
            due = offer.due or held
            mixed, since = due.minus(offer.work), held.minus(due)
            totals.carried += since.tokens * share
            totals.overwritten += (1 - self._mixing) * mixed.tokens * share
            kept = since.plus(mixed, self._mixing)
        elif fate is DeltaStatus.REPLACED or (fate is DeltaStatus.EARLIER and offer is not None):
            totals.overwritten += held.tokens * share
        self.held[fragment] = kept


def fate_of(own: str, offered: Header | None, headers: Sequence[Header], rejected: Collection[str]) -> DeltaStatus:
    """What a closed round, with these `headers` of which the peers `rejected` do not count, means for peer `own`."""
    mine = next((header for header in headers if header.peer == own), None)
    if mine is None:
        return DeltaStatus.MISSED
    if mine != offered:
        return DeltaStatus.EARLIER
    return DeltaStatus.REPLACED if own in rejected else DeltaStatus.COUNTED


@dataclass(slots=True)
class Pending:
    header: Header
    body: memoryview
    residual_n: Tensor
    offer: OfferedDelta

    def facts(self) -> dict[str, Any]:
        work = [self.offer.work, self.offer.due]
        return {"pending": msgspec.to_builtins(self.header), "offer": msgspec.to_builtins(work)}

    def tensors(self) -> dict[str, Tensor]:
        """By name; not copies."""
        due = {} if self.offer.due_n is None else {"pending.due": self.offer.due_n}
        return {"pending.body": shared(self.body), "pending.residual": self.residual_n, **due}

    @classmethod
    def restored(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Pending | None:
        """The reverse of the two above; None where no delta was on offer."""
        if "pending" not in facts:
            return None
        work, due = msgspec.convert(facts["offer"], tuple[LocalWork, LocalWork | None])
        return cls(
            header=msgspec.convert(facts["pending"], Header),
            body=memoryview(tensors["pending.body"].numpy()).cast("B"),
            residual_n=tensors["pending.residual"],
            offer=OfferedDelta(work, due, tensors.get("pending.due")),
        )


class Replica:
    def __init__(self, fragments: Sequence[Fragment], config: DilocoConfig, ranks: Ranks) -> None:
        """The parameters as they are become outer step 0."""
        self.fragments = fragments
        self.global_model = GlobalModel(fragments, config.outer, ranks)
        self.work = LocalProgress(self.global_model, config.mixing, ranks)
        self.feedback = ErrorFeedback([fragment.numel for fragment in fragments])
        self.pending: Pending | None = None
        """The delta on offer; None while there is none."""
        self.inner = 0
        """Inner steps since the last completion."""
        self.due = 0
        """After so many of them the outcome of `pending` is due."""
        self._part = {"rank": ranks.rank, "ranks": ranks.size, "layout": layout_hash(parameter_layout(fragments))}

    def restart_interval(self) -> None:
        """No delta is on offer, and the inner steps to the next count from now."""
        self.pending, self.inner = None, 0

    def take_over(self, tensors: Mapping[str, Tensor], outer_step: int, digests: list[str]) -> float:
        """Hold another peer's global model and nothing of one's own; tokens whose work is given up for it.

        `digests`: as GlobalModel.checked returned them.
        """
        self.global_model.load(tensors, outer_step, digests)
        given_up = self.work.tokens_held()
        self.work.replace_all()
        for index in range(len(self.fragments)):
            self.feedback.reset(index)
        self.restart_interval()
        return given_up

    def saved(self) -> memoryview:
        """For a checkpoint: masters, momentum, error feedback, the delta on offer."""
        tensors = self.global_model.tensors()
        tensors |= {f"residual.{index}": residual for index, residual in enumerate(self.feedback.residuals)}
        facts: dict[str, Any] = {
            "outer_step": self.global_model.outer_step, "inner": self.inner, "due": self.due, "work": self.work.facts(),
            **self._part,
        }  # fmt: skip
        if self.pending is not None:
            facts |= self.pending.facts()
            tensors |= self.pending.tensors()
        return packed(tensors, facts)

    def load(self, raw: bytes | memoryview) -> None:
        """Go on from what `saved` returned. The parameters are restored by who saved them.

        Raises CheckpointError when it is of another layout or rank, or of a release whose delta on offer no rendezvous
        of this one takes.
        """
        tensors, facts = unpacked(raw)
        theirs = {name: facts[name] for name in self._part}
        if theirs != self._part:
            raise CheckpointError(
                f"the outer state is of {theirs}, this is {self._part}: resume with the same trainer.ranks"
            )
        if "work" not in facts or facts.get("pending", {}).get("protocol", PROTOCOL) != PROTOCOL:
            raise CheckpointError("the outer state was written by an older release: end that run with the one it began")
        self.global_model.load(tensors, facts["outer_step"])
        self.feedback.residuals = [tensors[f"residual.{index}"] for index in range(len(self.fragments))]
        self.inner, self.due = facts["inner"], facts["due"]
        self.work.restore(facts["work"])
        self.pending = Pending.restored(facts, tensors)
