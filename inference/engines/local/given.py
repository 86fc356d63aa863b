"""Forward passes over tokens that are given: are they the draws of a seed, and how likely are they?

A pass takes as many sequences as have room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from composer_prime.wire.node_messages import Sampling
from inference.engines.local.cached_attention import Segment, StepPlan
from inference.engines.local.kv_cache import KvCache
from inference.engines.sampling import SamplingRows, draw_misses

_SCORED_BYTES = 1 << 30
"""Most bytes of float32 logits of one pass."""

Forward = Callable[[torch.Tensor, torch.Tensor, StepPlan, torch.Tensor], torch.Tensor]
"""Input ids [1, N], positions [1, N], plan, rows [R] -> logits [R, V]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawCheck:
    """Are tokens [start, end) of a sequence what `sampling` draws there?"""

    token_ids: np.ndarray
    """int32 [T]."""
    start: int
    """At least 1."""
    end: int
    sampling: Sampling
    tolerance: float
    """See draw_misses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivenTokens:
    """Computes logits with `forward`, of at most `tokens` tokens a pass where they belong to several sequences."""

    forward: Forward
    cache: KvCache
    device: torch.device
    vocab: int
    tokens: int

    def misses(self, checks: Sequence[DrawCheck]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return misses and logprobs, each [end - start], of each check. All are of one tolerance."""
        found = [[(np.zeros(0), np.zeros(0, np.float32))] for _ in checks]
        for pieces, logits in self._logits(checks):
            asked = [(checks[index].sampling, last - first) for index, first, last in pieces]
            rows = SamplingRows(
                temperature=_repeated(asked, lambda one: one.temperature, np.float32),
                top_k=_repeated(asked, lambda one: one.top_k, np.int64),
                top_p=_repeated(asked, lambda one: one.top_p, np.float32),
                seed=_repeated(asked, lambda one: (one.seed or 0) & (2**64 - 1), np.uint64),
                position=np.concatenate([np.arange(*piece[1:], dtype=np.uint64) for piece in pieces]),
            )
            drawn = np.concatenate([checks[index].token_ids[first:last] for index, first, last in pieces])
            missed, scored = draw_misses(logits, rows, drawn, checks[0].tolerance)
            ends = np.cumsum([count for _, count in asked])[:-1]
            for (index, _, _), *parts in zip(pieces, np.split(missed, ends), np.split(scored, ends), strict=True):
                found[index].append((parts[0], parts[1]))
        return [(np.concatenate([one for one, _ in parts]), np.concatenate([one for _, one in parts]))
                for parts in found]  # fmt: skip

    def _logits(self, checks: Sequence[DrawCheck]) -> Iterator[tuple[list[tuple[int, int, int]], torch.Tensor]]:
        """Yield pieces (check, first token, last token + 1) and the logits [R, V] that their tokens are drawn from."""
        at_once = max(16, _SCORED_BYTES // (4 * self.vocab))
        for pieces in _passes(checks, at_once, self.tokens):
            segments, positions, wanted, row = [], [], [], 0
            for _, first, last in pieces:
                segments.append(Segment(row, last, 0, 0))
                positions.append(np.arange(last))
                wanted.append(np.arange(row + first - 1, row + last - 1))
                row += last
            ids = np.concatenate([checks[index].token_ids[:last] for index, _, last in pieces])
            plan = StepPlan(cache=self.cache, segments=segments, places=None)
            yield (
                pieces,
                self.forward(
                    self._tensor(ids)[None],
                    self._tensor(np.concatenate(positions))[None],
                    plan,
                    self._tensor(np.concatenate(wanted)),
                ),
            )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)


def _repeated(asked: list[tuple[Sampling, int]], value: Callable[[Sampling], float], dtype: type) -> np.ndarray:
    return np.repeat(np.array([value(one) for one, _ in asked], dtype), [count for _, count in asked])


def _passes(checks: Sequence[DrawCheck], at_once: int, tokens: int) -> list[list[tuple[int, int, int]]]:
    """Divide checks into passes of pieces (check, first token, last + 1).

    The pieces of a pass have at most `at_once` tokens together. They are at most `tokens` with the tokens before them,
    or it is one piece. Only a check of more than `at_once` tokens is divided.
    """
    passes, left, room = [], 0, 0
    for index, check in enumerate(checks):
        for first in range(check.start, check.end, at_once):
            last = min(first + at_once, check.end)
            if last - first > left or last > room:
                passes.append([])
                left, room = at_once, tokens
            passes[-1].append((index, first, last))
            left, room = left - (last - first), room - last
    return passes
