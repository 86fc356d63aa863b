"""One request inside the engine, and the messages between the event loop and the compute thread.

When a completion ends: a stop token, the end-of-sequence token, a stop string.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
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
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class CancelRequest:
    request_id: str


@dataclass(frozen=True, slots=True)
class Swap:
    version: int
    tensors: Mapping[str, torch.Tensor]
    future: asyncio.Future


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    token_ids: list[int]
    future: asyncio.Future


@dataclass(frozen=True, slots=True)
class Drained:
    """Resolve `future` once nothing runs or waits."""

    future: asyncio.Future


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Add | CancelRequest | Swap | ScoreRequest | Drained | Close


_SLACK_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """What ends one request before its length does."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    decode: Callable[[list[int]], str] | None
    """Token ids to text, special tokens included; needed for strings only."""
    window: int
    """Completion tokens that are decoded to look for a string that the newest one completes."""

    @classmethod
    def of(cls, sampling: Sampling, eos: frozenset[int], decode: Callable[[list[int]], str] | None) -> StopRule:
        ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
        strings = tuple(one for one in sampling.stop if one)
        # A token is at least one byte, so a string of n bytes ends within the n tokens before its last; the slack
        # keeps what decoders do to the first token of a text (a dropped space) out of the match.
        window = max((len(one.encode()) for one in strings), default=0) + _SLACK_TOKENS
        return cls(token_ids=ids, strings=strings, decode=decode, window=window)

    def ends(self, completion: np.ndarray) -> bool:
        """Whether the newest token of `completion` (int32 [T_new]) ends it."""
        if int(completion[-1]) in self.token_ids:
            return True
        if not self.strings or self.decode is None:
            return False
        text = self.decode(completion[-self.window :].tolist())
        return any(one in text for one in self.strings)
