"""Check what a node sent back before anyone trains on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from composer_prime.errors import WireError
from composer_prime.wire.node import Generated
from composer_prime.wire.types import FLOAT, INT, VersionSpan, floats, ints

NO_EVIDENCE = -9999.0
"""vLLM's value for a missing logprob."""
_ROUNDING = 1e-3
"""A logprob may exceed 0 by this much through bfloat16 arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """A checked completion."""

    token_ids: np.ndarray
    """int32 [T_new]."""
    logprobs: np.ndarray
    """float32 [T_new], finite, at most about 0."""
    version_spans: tuple[VersionSpan, ...]
    """Cover [0, T_new)."""
    finish_reason: str
    """stop | length."""
    node_id: str
    prompt_cached: int


def check_answer(
    message: Generated, *, max_tokens: int, vocab_size: int, newest_version: int, node_id: str
) -> NodeAnswer:
    """Return the completion in `message`. Raises WireError naming what is wrong with it."""
    if len(message.token_ids) % INT.itemsize or len(message.logprobs) % FLOAT.itemsize:
        raise WireError(f"{len(message.token_ids)} and {len(message.logprobs)} bytes are not 4-byte numbers")
    token_ids, logprobs = ints(message.token_ids), floats(message.logprobs)
    if len(token_ids) != len(logprobs):
        raise WireError(f"{len(token_ids)} token ids came with {len(logprobs)} logprobs")
    if len(token_ids) > max_tokens:
        raise WireError(f"{len(token_ids)} tokens came, but max_tokens was {max_tokens}")
    if message.finish_reason not in ("stop", "length"):
        raise WireError(f"finish_reason is {message.finish_reason!r}, expected 'stop' or 'length'")
    if len(token_ids):
        _check_values(token_ids, logprobs, vocab_size)
    _check_spans(message.version_spans, len(token_ids), newest_version)
    return NodeAnswer(
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=tuple(message.version_spans),
        finish_reason=message.finish_reason,
        node_id=node_id,
        prompt_cached=message.prompt_cached,
    )


def _check_values(token_ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> None:
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise WireError(f"token ids {low}..{high} leave the vocabulary 0..{vocab_size - 1}")
    least, most = float(logprobs.min()), float(logprobs.max())
    # A NaN makes both comparisons false.
    if not (least > NO_EVIDENCE and most <= _ROUNDING):
        raise WireError(f"logprobs lie in {least}..{most}, expected finite numbers in ({NO_EVIDENCE}, 0]")


def _check_spans(spans: list[VersionSpan], num_tokens: int, newest_version: int) -> None:
    end, version = 0, 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            raise WireError(f"version span [{span.start}, {span.end}) does not continue at position {end}")
        if not version <= span.version <= newest_version:
            raise WireError(f"version {span.version} is not between {version} and the newest, {newest_version}")
        end, version = span.end, span.version
    if end != num_tokens:
        raise WireError(f"version spans cover {end} of {num_tokens} tokens")
