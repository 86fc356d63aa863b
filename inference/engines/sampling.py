"""The published rule of drawing: temperature, top-k, top-p, a draw by inverse CDF, log-probability, stop conditions.

The uniform number of a draw is a hash of (request seed, position): the same in any batch and on any node. An auditor
that holds the model checks draws with `draw_misses`. docs/reference/generate-contract.md states the rule, with test
vectors. What a request may ask for is checked here too, alike for all engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from composer_prime.errors import BadRequestError
from composer_prime.wire.node_messages import Sampling, context_overflow

_NUCLEUS_PROBE = 512
_SLACK_TOKENS = 8
_CHECK_BYTES = 256 << 20
"""Of float work at a time when draws are checked, 16 bytes a logit."""
_EDGE_NATS = 10.0

Rule = tuple[float, int, float, int]
"""Temperature, top-k, top-p and seed of a request."""


def check_prompt(token_ids: list[int], *, vocab: int, max_context: int, new_tokens: int = 1) -> None:
    if not token_ids:
        raise BadRequestError("the prompt is empty: send at least one token")
    if len(token_ids) + new_tokens > max_context:
        raise BadRequestError(
            f"{context_overflow(len(token_ids), max_context, new_tokens)}: shorten the prompt or raise "
            "model.max_context"
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab:
        raise BadRequestError(
            f"token ids span {low}..{high}, the model's vocabulary is 0..{vocab - 1}: "
            "check that the tokenizer belongs to model.path"
        )


def check_sampling(sampling: Sampling) -> None:
    if sampling.max_tokens < 1:
        raise BadRequestError(f"max_tokens is {sampling.max_tokens}: ask for at least one")
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        raise BadRequestError(f"temperature is {sampling.temperature}: it must be finite and at least 0 (greedy)")
    if not 0 < sampling.top_p <= 1:
        raise BadRequestError(f"top_p is {sampling.top_p}: it must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise BadRequestError(f"top_k is {sampling.top_k}: use 0 to switch it off")


def rule_of(sampling: Sampling, seed: int) -> Rule:
    return sampling.temperature, sampling.top_k, sampling.top_p, seed & (2**64 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Settings of the R rows that sample in a step."""

    temperature: np.ndarray
    """float32 [R]; 0 is greedy."""
    top_k: np.ndarray
    """int64 [R]; 0 is off."""
    top_p: np.ndarray
    """float32 [R]; 1 is off."""
    seed: np.ndarray
    """uint64 [R]."""
    position: np.ndarray
    """uint64 [R]: index in its sequence of the token to be drawn."""

    @classmethod
    def of(cls, rules: Iterable[Rule], positions: np.ndarray) -> SamplingRows:
        temperature, top_k, top_p, seed = zip(*rules, strict=True)
        return cls(
            temperature=np.array(temperature, np.float32),
            top_k=np.array(top_k, np.int64),
            top_p=np.array(top_p, np.float32),
            seed=np.array(seed, np.uint64),
            position=positions.astype(np.uint64),
        )

    def chosen(self, index: slice | np.ndarray) -> SamplingRows:
        return SamplingRows(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def narrowed(self, vocab: int) -> np.ndarray:
        """bool [R]: where top-k or top-p removes tokens."""
        return (((self.top_k > 0) & (self.top_k < vocab)) | (self.top_p < 1.0)) & (self.temperature != 0.0)


def uniforms(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return float64 [R] in [0, 1), multiples of 2^-32: two rounds of splitmix64's finalizer over seed and position."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seed + np.uint64(0x9E3779B97F4A7C15)) ^ (position * np.uint64(0xD1342543DE82EF95)))
    return (mixed >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def warp(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the logits [R, V] of the distributions that are sampled from: temperature, then top-k, then top-p.

    Greedy rows (temperature 0) keep theirs.
    """
    logits = _tempered(logits, rows)
    narrowed = rows.narrowed(logits.shape[1])
    if narrowed.any():
        logits = _narrowed(logits, rows, np.flatnonzero(narrowed))
    return logits


def _tempered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    logits = logits.float()
    greedy = rows.temperature == 0.0
    if not (rows.temperature == 1.0).all():
        divisor = np.where(greedy, np.float32(1.0), rows.temperature).astype(np.float32)
        logits = logits - logits.amax(-1, keepdim=True)  # At most 0: no temperature makes it infinite.
        logits /= torch.from_numpy(divisor).to(logits.device)[:, None]
    return logits


def _weights_and_cdf(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit [R, 1], and float64 running sums [R, V] of exp(logit - largest)."""
    top = logits.amax(-1, keepdim=True)
    return top, (logits - top).exp_().cumsum(-1, dtype=torch.float64)


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row. logits [R, V] -> (tokens int64 [R], logprobs float32 [R]).

    Greedy rows report the log-probability at temperature 1, rows with non-finite logits a non-finite one.
    """
    logits = warp(logits, rows)
    top, cdf = _weights_and_cdf(logits)
    tokens = _draw(cdf, rows)
    greedy = rows.temperature == 0.0
    if greedy.any():
        where = torch.from_numpy(greedy).to(logits.device)[:, None]
        tokens = torch.where(where, logits.argmax(-1, keepdim=True), tokens)
    logprobs = (logits.gather(-1, tokens) - top).double() - cdf[:, -1:].log()
    both = torch.cat([tokens.double(), logprobs], dim=1).cpu().numpy()
    return both[:, 0].astype(np.int64), both[:, 1].astype(np.float32)


def _draw(cdf: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    uniform = torch.from_numpy(uniforms(rows.seed, rows.position)).to(cdf.device)[:, None]
    return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).clamp_(max=cdf.shape[1] - 1)


def draw_misses(
    logits: torch.Tensor, rows: SamplingRows, tokens: np.ndarray, tolerance: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Say how far the uniform number of each draw lies outside of the CDF interval of its token.

    logits [R, V], tokens int64 [R] -> (misses float64 [R], logprobs float32 [R]). A miss is a probability. For a greedy
    row it is what the likeliest token has more. A token that top-k or top-p removes has log-probability -inf.

    `tolerance`: tokens this near to the edge of top-k or top-p are kept or removed in the draw's favor.
    """
    count = max(16, _CHECK_BYTES // (16 * logits.shape[1]))
    parts = []
    for first in range(0, len(tokens), count):
        part = slice(first, first + count)
        chosen = rows.chosen(part)
        misses, logprobs = _misses(logits[part], chosen, tokens[part])
        narrowed = np.flatnonzero(chosen.narrowed(logits.shape[1]) & (misses > 0.0))
        if tolerance > 0.0 and len(narrowed):
            index = torch.from_numpy(narrowed).to(logits.device)
            at_edge = _edge_misses(logits[part][index], chosen.chosen(narrowed), tokens[part][narrowed], tolerance)
            misses[narrowed] = np.minimum(misses[narrowed], at_edge)
        parts.append((misses, logprobs))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _misses(logits: torch.Tensor, rows: SamplingRows, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logits = warp(logits, rows)
    ids = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None]
    top, cdf = _weights_and_cdf(logits)
    total = cdf[:, -1:]
    uniform = torch.from_numpy(uniforms(rows.seed, rows.position)).to(logits.device)[:, None] * total
    below = torch.where(ids > 0, cdf.gather(-1, (ids - 1).clamp_(min=0)), 0.0)
    misses = torch.maximum(below - uniform, uniform - cdf.gather(-1, ids)).clamp_(min=0.0)
    logits_R = logits.gather(-1, ids)
    greedy = rows.temperature == 0.0
    if greedy.any():
        where = torch.from_numpy(greedy).to(logits.device)[:, None]
        misses = torch.where(where, 1.0 - (logits_R - top).double().exp(), misses)
    logprobs = (logits_R - top).double() - total.log()
    both = torch.cat([misses / total, logprobs], dim=1).cpu().numpy()
    return both[:, 0], both[:, 1].astype(np.float32)


def _edge_misses(logits: torch.Tensor, rows: SamplingRows, tokens: np.ndarray, tolerance: float) -> np.ndarray:
    """Return the misses [R] of narrowed rows, each token at the edge taken in the draw's favor."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None]
    logits, nats, every = _tempered(logits, rows), _EDGE_NATS * tolerance, np.arange(len(tokens))
    low, high = (replace(rows, top_p=np.where(rows.top_p < 1.0, np.clip(rows.top_p + shift, 1e-6, 1.0), 1.0)
                         .astype(np.float32)) for shift in (-tolerance, tolerance))  # fmt: skip
    surely, maybe = (_narrowed(logits, one, every).isfinite() for one in (low, high))
    removed = logits.masked_fill(surely, float("-inf")).amax(-1, keepdim=True)
    surely &= logits > removed + nats
    maybe |= logits >= logits.masked_fill(~maybe, float("inf")).amin(-1, keepdim=True) - nats
    weights = (logits - logits.amax(-1, keepdim=True)).exp().double()
    is_below = torch.arange(logits.shape[1], device=logits.device) < ids
    token_weight = (weights * maybe).gather(-1, ids)[:, 0]
    sure, edge = weights * surely, weights * (maybe & ~surely)
    sure.scatter_(-1, ids, 0.0)
    edge.scatter_(-1, ids, 0.0)
    sure_below, edge_below = (sure * is_below).sum(-1), (edge * is_below).sum(-1)
    uniform = torch.from_numpy(uniforms(rows.seed, rows.position)).to(logits.device)
    least = (sure_below / (sure.sum(-1) + edge.sum(-1) - edge_below + token_weight).clamp_(min=1e-300)) - uniform
    below = sure_below + edge_below + token_weight
    most = uniform - below / (sure.sum(-1) + edge_below + token_weight).clamp_(min=1e-300)
    misses = torch.maximum(least, most).clamp_(min=0.0)
    return torch.where(token_weight > 0.0, misses, 1.0).cpu().numpy()


def _narrowed(logits: torch.Tensor, rows: SamplingRows, chosen: np.ndarray) -> torch.Tensor:
    """`logits`, -inf outside top-k and then top-p in the `chosen` rows; ties stay, as in vLLM."""
    index = torch.from_numpy(chosen).to(logits.device)
    part = logits[index]
    top_k = np.where(rows.top_k[chosen] > 0, rows.top_k[chosen], logits.shape[1])
    top_k = np.minimum(top_k, logits.shape[1])
    if (top_k < logits.shape[1]).any():
        part = _top_k(part, top_k)
    if (rows.top_p[chosen] < 1.0).any():
        part = _top_p(part, rows.top_p[chosen])
    return logits.index_copy(0, index, part)


def _top_k(logits: torch.Tensor, top_k: np.ndarray) -> torch.Tensor:
    """Keep each row's `top_k` [R] largest logits."""
    largest = logits.topk(int(top_k.max()), dim=-1).values
    floor = largest.gather(-1, torch.from_numpy(top_k - 1).to(logits.device)[:, None])
    return logits.masked_fill(logits < floor, float("-inf"))


def _top_p(logits: torch.Tensor, top_p: np.ndarray) -> torch.Tensor:
    """Keep each row's smallest set of likeliest tokens that reaches `top_p` [R], and ties.

    Sort the likeliest few hundred first, then whole rows that fall short.
    """
    lse = logits.logsumexp(-1, keepdim=True)
    floor = torch.full_like(lse, float("-inf"))
    limit = torch.from_numpy(top_p).to(logits.device)
    index = torch.from_numpy(np.flatnonzero(top_p < 1.0)).to(logits.device)
    for width in (min(_NUCLEUS_PROBE, logits.shape[1]), logits.shape[1]):
        ordered = logits[index].topk(width, dim=-1).values
        probs = (ordered - lse[index]).exp()
        reached = probs.cumsum(-1)
        kept = reached - probs < limit[index, None]
        kept[:, 0] = True
        floor[index] = ordered.masked_fill(~kept, float("inf")).amin(-1, keepdim=True)
        index = index[reached[:, -1] < limit[index]]
        if not len(index):
            break
    return logits.masked_fill(logits < floor, float("-inf"))


def stop_rule(
    sampling: Sampling, eos: frozenset[int], decode: Callable[[list[int]], str] | None
) -> Callable[[np.ndarray], bool]:
    """Return what tells whether the newest token of a completion (int32 [T_new]) ends it before its length limit.

    Without `decode` stop strings are ignored.
    """
    token_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
    strings = [one for one in sampling.stop if one]
    # A token is at least one byte. The slack: decoders drop the space before the first token of a text.
    window = max((len(one.encode()) for one in strings), default=0) + _SLACK_TOKENS

    def ends(completion: np.ndarray) -> bool:
        if int(completion[-1]) in token_ids or not strings or decode is None:
            return int(completion[-1]) in token_ids
        text = decode(completion[-window:].tolist())
        return any(one in text for one in strings)

    return ends
