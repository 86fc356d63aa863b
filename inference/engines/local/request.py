"""One request inside the engine, when it ends, and the commands from the event loop to the compute thread."""

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
    """Ends at this many tokens, prompt and completion together."""
    seed: int
    """64 bits."""
    future: asyncio.Future
    """Resolved on the event loop with an EngineCompletion or an error."""
    stop: StopRule | None = None
    cached: int = 0
    """Prompt tokens whose keys and values were cached."""
    logprobs: list[float] = field(default_factory=list)
    """[T_new so far]."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(first completion token, version) of each span."""

    def mark(self, version: int) -> None:
        """Note that the next token will be sampled by `version`."""
        start = len(self.logprobs)
        if self.marks and self.marks[-1][0] == start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def spans(self) -> list[VersionSpan]:
        """Return spans that cover the tokens so far."""
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
    """Ends one request before its length limit: a stop token, the end-of-sequence token or a stop string."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    decode: Callable[[list[int]], str] | None
    """Token ids to text, special tokens included; used for stop strings only."""
    window: int
    """Completion tokens to decode when looking for a string that the newest one completes."""

    @classmethod
    def of(cls, sampling: Sampling, eos: frozenset[int], decode: Callable[[list[int]], str] | None) -> StopRule:
        ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
        strings = tuple(one for one in sampling.stop if one)
        # A token is at least one byte, so a string of n bytes spans at most n tokens. The slack keeps out of the match
        # what decoders do to the first token of a text (they drop a space).
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
