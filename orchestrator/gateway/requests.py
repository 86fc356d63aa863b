"""A request on its way to an answer, and the checks of what nodes sample for it.

It waits in the router's queue, or runs on a node under a lease (routing.py). What nodes that are gone sampled is kept:
the next node continues there, and `Answer.then` makes one answer of both parts. A part is checked as an answer is,
before anyone sees it.

A node may claim a swap of weights within an answer only to a version that it first reported while it held the request,
and not among tokens that it had streamed before. Otherwise a node with old weights could claim one in each answer: its
tokens behind the swap would not be compared with suspect weights (inference/audit.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from composer_prime.errors import WireError
from composer_prime.wire.node_messages import NO_TOKENS, Answer, Generate, Sampled, Sampling
from composer_prime.wire.types import FLOAT, INT, VersionSpan, floats, ints

if TYPE_CHECKING:
    from orchestrator.gateway.nodes import AttachedNode

_NO_EVIDENCE = -9999.0
"""vLLM's value for a missing logprob."""
_MAX_REPORTS = 64
"""Versions of a node that are remembered."""
_ROUNDING = 1e-3
"""A logprob may exceed 0 by this much through bfloat16 arithmetic."""


@dataclass(slots=True, eq=False)
class Running:
    """A node holds a request."""

    node: AttachedNode
    lease: int
    placed: float
    """When the node was given it, monotonic seconds."""
    load: int
    """Requests that the node held then, this one included."""
    cold: int
    """Prompt tokens that the node had to compute, as far as this gateway knows."""
    streamed: Answer = NO_TOKENS
    """What the node has sampled so far, after what is kept."""


@dataclass(slots=True)
class Attempts:
    """What was tried before."""

    failures: int = 0
    avoid: str | None = None
    """The node on which it failed last."""
    refused_by: set[str] = field(default_factory=set)
    """Nodes that cannot serve it as it stands."""
    last_error: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class GatewayRequest:
    """A request from its arrival at the gateway to its answer."""

    request_id: str
    session: str
    prompt_ids: bytes
    """int32 [T]."""
    sampling: Sampling
    since: float
    """When it arrived, monotonic seconds."""
    done: asyncio.Future[Answer]
    oldest_version: int = 0
    """Nodes with older weights may not answer it."""
    running: Running | None = None
    """None while it waits for a node, and once it is done."""
    kept: Answer = NO_TOKENS
    """What nodes that are gone sampled: its next node continues there."""
    tried: Attempts = field(default_factory=Attempts)

    @property
    def num_prompt(self) -> int:
        """Tokens that its next node begins with."""
        return len(self.prompt_ids) // INT.itemsize + len(self.kept)

    @property
    def num_left(self) -> int:
        """Tokens that its next node may sample at most."""
        return self.sampling.max_tokens - len(self.kept)

    @property
    def least_version(self) -> int:
        """Oldest policy version that may continue it: versions never fall within an answer."""
        return max(self.oldest_version, self.kept.newest_version)

    def may_run_on(self, node: AttachedNode) -> bool:
        """Tell whether `node` has not refused it, and has weights that may continue it."""
        return node.version >= self.least_version and node.node_id not in self.tried.refused_by

    def message(self, running: Running) -> Generate:
        """Return what the node of `running` is sent."""
        return Generate(
            request_id=self.request_id,
            lease=running.lease,
            prompt_ids=self.prompt_ids + self.kept.token_ids,
            sampling=msgspec.structs.replace(self.sampling, max_tokens=self.num_left, resumed=len(self.kept)),
            session=self.session,
        )


class ServedPolicy:
    """The policy that is served: its vocabulary, and its versions."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.oldest = 0
        """Nodes with older weights get no request: they are catching up."""
        self.newest = 0
        """The newest that is published. Nodes with newer weights get no request: their future was rewound."""
        self.published: set[int] = set()
        """The versions that there were, from the first of them on; the numbers jump in joint runs."""

    def publish(self, version: int) -> None:
        """Take in the newest version. A trainer that resumed may publish one, and later ones, once more."""
        self.newest = version
        self.oldest = min(self.oldest, version)
        self.published = {old for old in self.published if old < version} | {version}


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


def check_sampled(message: Sampled, request: GatewayRequest, running: Running, policy: ServedPolicy) -> Answer:
    """Return the answer in `message`, which begins with what its node streamed; or the part, which comes after it.

    `running` holds `request`. Raises WireError naming what is wrong with the message.
    """
    streamed, node, max_tokens = running.streamed, running.node, request.num_left
    swaps = node.reports.swaps_since(running.placed)
    token_ids, logprobs = _numbers(message)
    if message.is_part:
        _check_place(message, len(streamed), len(token_ids), max_tokens)
    else:
        _check_end(message.finish_reason, len(token_ids), max_tokens)
    _check_values(token_ids, logprobs, policy.vocab_size)
    _check_spans(message.version_spans, len(token_ids), range(request.least_version, policy.newest + 1), swaps)
    for span in message.version_spans:
        if span.version not in policy.published and span.version > min(policy.published, default=span.version):
            raise WireError(f"there never was a version {span.version}")
    if streamed and message.is_part:
        _check_seam(streamed.newest_version, message.version_spans[0].version, swaps)
    elif streamed:
        _check_beginning(message, streamed)
    return Answer(
        token_ids=message.token_ids,
        logprobs=message.logprobs,
        version_spans=message.version_spans,
        finish_reason=message.finish_reason,
        prompt_cached=message.prompt_cached,
        sampled_by=[(node.node_id, len(token_ids))],
    )


def _check_place(message: Sampled, num_streamed: int, count: int, max_tokens: int) -> None:
    if message.start != num_streamed:
        raise WireError(f"tokens from {message.start} came after {num_streamed}")
    if not 0 < count < max_tokens - num_streamed:
        raise WireError(f"{count} tokens came after {num_streamed} as a part, but max_tokens is {max_tokens}")


def _check_end(reason: str, count: int, max_tokens: int) -> None:
    if count > max_tokens:
        raise WireError(f"{count} tokens came, but max_tokens was {max_tokens}")
    if reason not in ("stop", "length"):
        raise WireError(f"finish_reason is {reason!r}, expected 'stop' or 'length'")
    if not count:
        raise WireError(f"no token came, with finish_reason {reason!r}: a stop has at least its token")
    if reason == "length" and count < max_tokens:
        raise WireError(f"finish_reason is 'length' after {count} tokens, but max_tokens was {max_tokens}")


def _check_seam(last: int, first: int, swaps: Container[int]) -> None:
    if first < last:
        raise WireError(f"version {first} came after version {last}")
    if first != last:
        _check_swap(first, swaps)


def _check_beginning(message: Sampled, streamed: Answer) -> None:
    count = len(streamed)
    if not message.token_ids.startswith(streamed.token_ids):
        raise WireError(f"the answer does not begin with the {count} tokens that its node had streamed")
    spans = [span for span in message.version_spans if span.start < count]
    if [VersionSpan(span.start, min(span.end, count), span.version) for span in spans] != streamed.version_spans:
        raise WireError(f"other versions sampled its first {count} tokens than its node said with them")


def _numbers(message: Sampled) -> tuple[np.ndarray, np.ndarray]:
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
