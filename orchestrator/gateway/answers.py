"""What nodes sample: complete answers, and parts of answers, checked before anyone sees them.

A node streams the tokens of a long answer while it samples. They wait here as a PartialAnswer. When the node is gone,
another one continues after them, and `complete` makes one answer of both parts. A part is checked as an answer is.

A node may claim a swap of weights within an answer only to a version that it first reported while it held the request,
and not among tokens that it had streamed before. Otherwise a node with old weights could claim one in each answer: its
tokens behind the swap would not be compared with suspect weights (inference/audit.py).
"""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from composer_prime.errors import WireError
from composer_prime.wire.node import Generated, Progress
from composer_prime.wire.types import FLOAT, INT, VersionSpan, floats, ints

_NO_EVIDENCE = -9999.0
"""vLLM's value for a missing logprob."""
_MAX_REPORTS = 64
"""Versions of a node that are remembered."""
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
    """The node that completed it."""
    prompt_cached: int
    sampled_by: tuple[tuple[str, int], ...] = ()
    """Nodes in order, each with the number of tokens that it sampled; several where one had to continue for another."""


@dataclass(slots=True, eq=False)
class PartialAnswer:
    """Checked tokens of an answer that is not complete."""

    token_ids: bytearray = field(default_factory=bytearray)
    """int32 [T_new so far]."""
    logprobs: bytearray = field(default_factory=bytearray)
    """float32 [T_new so far]."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """Cover [0, T_new so far)."""
    sampled_by: list[tuple[str, int]] = field(default_factory=list)
    """As in NodeAnswer."""

    def __len__(self) -> int:
        return len(self.token_ids) // INT.itemsize

    @property
    def newest_version(self) -> int:
        """Policy version of the last token; 0 without one."""
        return self.version_spans[-1].version if self.version_spans else 0

    def extend(self, other: PartialAnswer) -> None:
        """Add the tokens that come next."""
        start = len(self)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        for span in other.version_spans:
            last = self.version_spans[-1] if self.version_spans else None
            if last is not None and last.version == span.version:
                self.version_spans[-1] = VersionSpan(last.start, start + span.end, span.version)
            else:
                self.version_spans.append(VersionSpan(start + span.start, start + span.end, span.version))
        for node_id, count in other.sampled_by:
            if self.sampled_by and self.sampled_by[-1][0] == node_id:
                count += self.sampled_by.pop()[1]
            self.sampled_by.append((node_id, count))

    def copy(self) -> PartialAnswer:
        return PartialAnswer(
            bytearray(self.token_ids), bytearray(self.logprobs), list(self.version_spans), list(self.sampled_by)
        )


class VersionReports:
    """When the processes of one name first reported each of its last versions, monotonic seconds."""

    def __init__(self) -> None:
        self.newest = 0
        """The newest of them: with an older one it gets no request."""
        self._first: dict[int, float] = {}

    def note(self, version: int) -> None:
        """Take in a report. Versions only rise: going back to one, or to it once more, is no swap."""
        if version > self.newest:
            self.newest = version
            self._first[version] = time.monotonic()
            if len(self._first) > _MAX_REPORTS:
                del self._first[min(self._first)]

    def swaps_since(self, start: float) -> set[int]:
        return {version for version, time_s in self._first.items() if time_s >= start}

    def forget(self, version: int) -> None:
        """Version `version` is published: a trainer that resumed may publish it, and later ones, once more."""
        self.newest = min(self.newest, version - 1)
        self._first = {old: time_s for old, time_s in self._first.items() if old < version}


def complete(kept: PartialAnswer, answer: NodeAnswer) -> NodeAnswer:
    """Return the answer that begins with `kept` and continues with `answer`."""
    if not kept:
        return answer
    whole = kept.copy()
    rest = PartialAnswer(
        bytearray(answer.token_ids.tobytes()),
        bytearray(answer.logprobs.tobytes()),
        list(answer.version_spans),
        list(answer.sampled_by),
    )
    whole.extend(rest)
    return NodeAnswer(
        token_ids=ints(bytes(whole.token_ids)),
        logprobs=floats(bytes(whole.logprobs)),
        version_spans=tuple(whole.version_spans),
        finish_reason=answer.finish_reason,
        node_id=answer.node_id,
        prompt_cached=answer.prompt_cached,
        sampled_by=tuple(whole.sampled_by),
    )


def check_answer(
    message: Generated,
    *,
    max_tokens: int,
    vocab_size: int,
    versions: range,
    node_id: str,
    streamed: PartialAnswer | None = None,
    swaps: Container[int] = (),
) -> NodeAnswer:
    """Return the completion in `message`, which begins with what its node `streamed`.

    `versions`: policy versions that may have sampled it. `swaps`: those that its node swapped in meanwhile.

    Raises WireError naming what is wrong with it.
    """
    token_ids, logprobs = _numbers(message)
    if len(token_ids) > max_tokens:
        raise WireError(f"{len(token_ids)} tokens came, but max_tokens was {max_tokens}")
    if message.finish_reason not in ("stop", "length"):
        raise WireError(f"finish_reason is {message.finish_reason!r}, expected 'stop' or 'length'")
    if not len(token_ids):
        raise WireError(f"no token came, with finish_reason {message.finish_reason!r}: a stop has at least its token")
    if message.finish_reason == "length" and len(token_ids) < max_tokens:
        raise WireError(f"finish_reason is 'length' after {len(token_ids)} tokens, but max_tokens was {max_tokens}")
    _check_values(token_ids, logprobs, vocab_size)
    _check_spans(message.version_spans, len(token_ids), versions, swaps)
    if streamed and not message.token_ids.startswith(bytes(streamed.token_ids)):
        raise WireError(f"the answer does not begin with the {len(streamed)} tokens that its node had streamed")
    if streamed and _first_spans(message.version_spans, len(streamed)) != streamed.version_spans:
        raise WireError(f"other versions sampled its first {len(streamed)} tokens than its node said with them")
    return NodeAnswer(
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=tuple(message.version_spans),
        finish_reason=message.finish_reason,
        node_id=node_id,
        prompt_cached=message.prompt_cached,
        sampled_by=((node_id, len(token_ids)),),
    )


def check_progress(
    message: Progress,
    streamed: PartialAnswer,
    *,
    max_tokens: int,
    vocab_size: int,
    versions: range,
    node_id: str,
    swaps: Container[int] = (),
) -> PartialAnswer:
    """Return the tokens in `message`, which come after `streamed`. Raises WireError naming what is wrong with them."""
    token_ids, logprobs = _numbers(message)
    if message.start != len(streamed):
        raise WireError(f"tokens from {message.start} came after {len(streamed)}")
    if not 0 < len(token_ids) < max_tokens - len(streamed):
        raise WireError(f"{len(token_ids)} tokens came after {len(streamed)} as a part, but max_tokens is {max_tokens}")
    _check_values(token_ids, logprobs, vocab_size)
    _check_spans(message.version_spans, len(token_ids), versions, swaps)
    first = message.version_spans[0].version
    if first < streamed.newest_version:
        raise WireError(f"version {first} came after version {streamed.newest_version}")
    if streamed and first != streamed.newest_version:
        _check_swap(first, swaps)
    return PartialAnswer(
        bytearray(message.token_ids),
        bytearray(message.logprobs),
        list(message.version_spans),
        [(node_id, len(token_ids))],
    )


def _numbers(message: Generated | Progress) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and logprobs, equal in number."""
    if len(message.token_ids) % INT.itemsize or len(message.logprobs) % FLOAT.itemsize:
        raise WireError(f"{len(message.token_ids)} and {len(message.logprobs)} bytes are not 4-byte numbers")
    token_ids, logprobs = ints(message.token_ids), floats(message.logprobs)
    if len(token_ids) != len(logprobs):
        raise WireError(f"{len(token_ids)} token ids came with {len(logprobs)} logprobs")
    return token_ids, logprobs


def _check_values(token_ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> None:
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise WireError(f"token ids {low}..{high} leave the vocabulary 0..{vocab_size - 1}")
    least, most = float(logprobs.min()), float(logprobs.max())
    # A NaN makes both comparisons false.
    if not (least > _NO_EVIDENCE and most <= _ROUNDING):
        raise WireError(f"logprobs lie in {least}..{most}, expected finite numbers in ({_NO_EVIDENCE}, 0]")


def _check_spans(spans: list[VersionSpan], num_tokens: int, versions: range, swaps: Container[int]) -> None:
    end, oldest = 0, versions.start
    for span in spans:
        if span.start != end or span.end <= span.start:
            raise WireError(f"version span [{span.start}, {span.end}) does not continue at position {end}")
        if not oldest <= span.version < versions.stop:
            raise WireError(f"version {span.version} is not between {oldest} and the newest, {versions.stop - 1}")
        if span.start:
            _check_swap(span.version, swaps)
        end, oldest = span.end, span.version + 1
    if end != num_tokens:
        raise WireError(f"version spans cover {end} of {num_tokens} tokens")


def _check_swap(version: int, swaps: Container[int]) -> None:
    if version not in swaps:
        raise WireError(f"a swap to version {version} came, but the node reported none while it held the request")


def _first_spans(spans: list[VersionSpan], count: int) -> list[VersionSpan]:
    """Return the spans of the first `count` tokens."""
    return [VersionSpan(span.start, min(span.end, count), span.version) for span in spans if span.start < count]
