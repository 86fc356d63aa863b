"""A delta that is on offer, and how a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from diloco.carry import Offer, Work
from diloco.codec.base import shared
from diloco.header import Header


@dataclass(slots=True)
class Pending:
    header: Header
    body: memoryview
    residual_n: Tensor
    offer: Offer

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
        work, due = msgspec.convert(facts["offer"], tuple[Work, Work | None])
        return cls(
            header=msgspec.convert(facts["pending"], Header),
            body=memoryview(tensors["pending.body"].numpy()).cast("B"),
            residual_n=tensors["pending.residual"],
            offer=Offer(work, due, tensors.get("pending.due")),
        )
