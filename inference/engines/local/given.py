"""Forward passes over tokens that are given: their log-probabilities, and whether they are the draws of a seed.

score          one sequence
score_answers  many behind one context, which a pass reads once
check_draws    many answers with contexts of their own, as many to a pass as have room
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from composer_prime.wire.node import Sampling
from inference.engines.local.attention import Segment, StepPlan
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
    end: int
    sampling: Sampling
    tolerance: float
    """See draw_misses."""
    in_int8: bool
    """Whether the linear layers are rounded to int8 for it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivenTokens:
    """Computes logits with `forward`, of at most `tokens` tokens a pass where they belong to several sequences."""

    forward: Forward
    cache: KvCache
    device: torch.device
    vocab: int
    tokens: int

    def scores(self, context: list[int], answers: list[list[int]], start: int) -> list[list[float]]:
        """Return the log-probabilities of each answer's tokens from number `start` on."""
        scores = [list[float]() for _ in answers]
        for pieces, logits in self._logits(context, answers, [start] * len(answers)):
            drawn = [token for index, first, last in pieces for token in answers[index][first:last]]
            chosen = torch.tensor(drawn, device=self.device)[:, None]
            logp = iter(logits.float().log_softmax(-1).gather(-1, chosen)[:, 0].tolist())
            for index, first, last in pieces:
                scores[index] += islice(logp, last - first)
        return scores

    def misses(self, checks: Sequence[DrawCheck]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return misses and logprobs, each [end - start], of each check. All are of one tolerance."""
        found = [list[tuple[np.ndarray, np.ndarray]]() for _ in checks]
        sequences = [check.token_ids[: check.end].tolist() for check in checks]
        for pieces, logits in self._logits([], sequences, [check.start for check in checks]):
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

    def _logits(
        self, context: list[int], answers: list[list[int]], starts: list[int]
    ) -> Iterator[tuple[list[tuple[int, int, int]], torch.Tensor]]:
        """Yield pieces (answer, first token, last token + 1) and the logits [R, V] that their tokens are drawn from.

        A pass reads the context once, for as many answers as have room. A long answer takes several. An answer's tokens
        before its number in `starts` have no logits.
        """
        at_once = max(16, _SCORED_BYTES // (4 * self.vocab))
        known = len(context)
        for pieces in _passes([len(answer) for answer in answers], starts, at_once, self.tokens):
            segments = [Segment(0, known, 0, 0)] if known else []
            positions, tokens, wanted = list(range(known)), list(context), list[int]()
            for index, first, last in pieces:
                row = len(tokens)
                segments.append(Segment(row, last, 0, known))
                positions += range(known, known + last)
                tokens += answers[index][:last]
                wanted += [known - 1, *range(row, row + last - 1)][first:]
            plan = StepPlan(cache=self.cache, segments=segments, places=None)
            ids = torch.tensor([tokens], device=self.device)
            rows = torch.tensor(wanted, device=self.device)
            yield pieces, self.forward(ids, torch.tensor([positions]), plan, rows)


def _repeated(asked: list[tuple[Sampling, int]], value: Callable[[Sampling], float], dtype: type) -> np.ndarray:
    return np.repeat(np.array([value(one) for one, _ in asked], dtype), [count for _, count in asked])


def _passes(lengths: list[int], starts: list[int], at_once: int, tokens: int) -> list[list[tuple[int, int, int]]]:
    """Divide answers of `lengths` tokens into passes of pieces (answer, first token, last + 1).

    Each answer is left out before its start. The pieces of a pass have at most `at_once` tokens together. They are at
    most `tokens` with the tokens before them, or it is one piece. Only an answer with more than `at_once` tokens behind
    its start is divided.
    """
    passes, left, room = [], 0, 0
    for index, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        for first in range(start, length, at_once):
            last = min(first + at_once, length)
            if last - first > left or last > room:
                passes.append([])
                left, room = at_once, tokens
            passes[-1].append((index, first, last))
            left, room = left - (last - first), room - last
    return passes


@contextmanager
def in_int8(model: PreTrainedModel) -> Iterator[None]:
    """Compute as a node does that keeps its linear layers in int8, one scale a row.

    One layer's rounded weights exist at a time. The output embeddings stay as they are, as loaders of int8 leave them.
    """
    layers = [module for module in model.modules()
              if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()]  # fmt: skip
    for layer in layers:
        vars(layer)["forward"] = partial(_forward_in_int8, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _forward_in_int8(layer: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.float()
    scale = weight.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / 127
    rounded = (weight / scale).round_().mul_(scale)
    return F.linear(values, rounded.to(layer.weight.dtype), layer.bias)
