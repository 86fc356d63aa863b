"""Forward passes over tokens that are given: are they the draws of a seed, and how likely are they?"""

from __future__ import annotations

from collections.abc import Callable
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


def check_misses(check: DrawCheck, forward: Forward, cache: KvCache, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return misses and logprobs, each [end - start]."""
    at_once = max(16, _SCORED_BYTES // (4 * vocab))
    misses, logprobs = [np.zeros(0)], [np.zeros(0, np.float32)]
    for first in range(check.start, check.end, at_once):
        last = min(first + at_once, check.end)
        plan = StepPlan(cache=cache, segments=[Segment(0, last, 0, 0)], places=None)
        ids = torch.from_numpy(check.token_ids[:last].astype(np.int64))
        logits = forward(ids[None], torch.arange(last)[None], plan, torch.arange(first - 1, last - 1))
        found = draw_misses(logits, _rows(check.sampling, first, last), check.token_ids[first:last], check.tolerance)
        misses.append(found[0])
        logprobs.append(found[1])
    return np.concatenate(misses), np.concatenate(logprobs)


def _rows(sampling: Sampling, first: int, last: int) -> SamplingRows:
    count = last - first
    return SamplingRows(
        temperature=np.full(count, sampling.temperature, np.float32),
        top_k=np.full(count, sampling.top_k, np.int64),
        top_p=np.full(count, sampling.top_p, np.float32),
        seed=np.full(count, (sampling.seed or 0) & (2**64 - 1), np.uint64),
        position=np.arange(first, last, dtype=np.uint64),
    )
