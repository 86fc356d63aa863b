"""One request inside the engine, and the messages between the event loop and the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan

if TYPE_CHECKING:
    import torch

    from inference.engines.local.stopping import StopRule


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A sequence being continued. Its token ids live in its slot's row of the slot table."""

    request_id: str
    session: str
    prompt: np.ndarray
    """int32 [T]."""
    sampling: Sampling
    limit: int
    """Tokens of prompt and completion at which it ends."""
    seed: int
    """64 bits."""
    future: asyncio.Future
    """Resolved on the event loop with a Completion or an error."""
    stop: StopRule | None = None
    cached: int = 0
    """Prompt tokens whose keys and values were there already."""
    logprobs: list[float] = field(default_factory=list)
    """[T_new so far]."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(first completion token, version) of each span."""

    def mark(self, version: int) -> None:
        """The next sampled token comes from `version`."""
        start = len(self.logprobs)
        if self.marks and self.marks[-1][0] == start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def spans(self) -> list[VersionSpan]:
        """Spans that cover the tokens so far."""
        starts = [start for start, _ in self.marks] + [len(self.logprobs)]
        spans = (VersionSpan(start, starts[k + 1], version) for k, (start, version) in enumerate(self.marks))
        return [span for span in spans if span.end > span.start]


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Swap:
    version: int
    tensors: Mapping[str, torch.Tensor]
    future: asyncio.Future


@dataclass(frozen=True, slots=True)
class Score:
    token_ids: list[int]
    future: asyncio.Future


@dataclass(frozen=True, slots=True)
class Drained:
    """Resolve `future` once nothing runs or waits."""

    future: asyncio.Future


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Add | Cancel | Swap | Score | Drained | Close
