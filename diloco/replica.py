"""What one rank holds of a joint run: the global model, its own work on top, and the delta that is on offer.

A checkpoint keeps all of it, so that a peer goes on as if it had not been away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from composer_prime.config.diloco import DilocoConfig
from composer_prime.errors import CheckpointError
from diloco.carry import OwnWork
from diloco.codec import ErrorFeedback
from diloco.fragments import Fragment, layout
from diloco.global_model import GlobalModel
from diloco.header import PROTOCOL
from diloco.layout import layout_hash
from diloco.pending import Pending
from diloco.ranks import Ranks
from diloco.state_file import packed, unpacked


class Replica:
    def __init__(self, fragments: Sequence[Fragment], config: DilocoConfig, ranks: Ranks) -> None:
        """The parameters as they are become outer step 0."""
        self.fragments = fragments
        self.globals = GlobalModel(fragments, config.outer, ranks)
        self.work = OwnWork(self.globals, config.mixing, ranks)
        self.feedback = ErrorFeedback([fragment.numel for fragment in fragments])
        self.pending: Pending | None = None
        """The delta on offer; None while there is none."""
        self.inner = 0
        """Inner steps since the last completion."""
        self.due = 0
        """After so many of them the outcome of `pending` is due."""
        self._part = {"rank": ranks.rank, "ranks": ranks.size, "layout": layout_hash(layout(fragments))}

    def restart_interval(self) -> None:
        """No delta is on offer, and the inner steps to the next count from now."""
        self.pending, self.inner = None, 0

    def take_over(self, tensors: Mapping[str, Tensor], outer_step: int, digests: list[str]) -> float:
        """Hold another peer's global model and nothing of one's own; tokens whose work is given up for it.

        `digests`: as GlobalModel.checked returned them.
        """
        self.globals.load(tensors, outer_step, digests)
        given_up = self.work.tokens_held()
        self.work.replace_all()
        for index in range(len(self.fragments)):
            self.feedback.reset(index)
        self.restart_interval()
        return given_up

    def saved(self) -> memoryview:
        """For a checkpoint: masters, momentum, error feedback, the delta on offer."""
        tensors = self.globals.tensors()
        tensors |= {f"residual.{index}": residual for index, residual in enumerate(self.feedback.residuals)}
        facts: dict[str, Any] = {
            "outer_step": self.globals.outer_step, "inner": self.inner, "due": self.due, "work": self.work.facts(),
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
        self.globals.load(tensors, facts["outer_step"])
        self.feedback.residuals = [tensors[f"residual.{index}"] for index in range(len(self.fragments))]
        self.inner, self.due = facts["inner"], facts["due"]
        self.work.restore(facts["work"])
        self.pending = Pending.restored(facts, tensors)
