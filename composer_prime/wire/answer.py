"""What was sampled for a request: the one form of it, from the engine to the record and the auditor.

engine -> node --Sampled--> gateway (checks it, joins the parts of several nodes) -> client
                                +-> record -> samples, audits
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from composer_prime.wire.types import INT, VersionSpan, floats, ints, pack_floats, pack_ints

POLICY = "policy"
"""The model name under which requests ask for the policy that is trained."""
GATEWAY_TOKEN_VARIABLE = "COMPOSER_GATEWAY_TOKEN"
"""Environment variable that holds the gateway's bearer token."""
RUNNING = "running"
"""The finish reason of tokens after which more come."""


def context_overflow(num_prompt: int, max_context: int, num_new: int = 1) -> str:
    """Return how the error of a prompt begins that leaves no room for `num_new` more tokens.

    Clients recognize these words; renderers' own check uses them too.
    """
    return f"Prompt length ({num_prompt}) exceeds maximum context length ({max_context}) less {num_new} for the reply"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens: all of a request, or a part of them."""

    token_ids: bytes = b""
    """int32 [T], the stop token included when one ended the turn."""
    logprobs: bytes = b""
    """float32 [T], under the sampling distribution (after temperature, top-k, top-p)."""
    version_spans: list[VersionSpan] = []
    """In order, covering [0, T) without gap or overlap."""
    finish_reason: str = RUNNING
    """stop | length | cancelled; RUNNING while more tokens come."""
    prompt_cached: int = 0
    """Prompt tokens whose keys and values were cached."""
    sampled_by: list[tuple[str, int]] = []
    """Nodes in order, each with the number of tokens that it sampled. The gateway knows; nodes say nothing."""
    record_id: str = ""
    """The gateway's name for it; a worker's turn carries it, so that the turn and its record find each other."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version_spans: list[VersionSpan],
        finish_reason: str = RUNNING,
        prompt_cached: int = 0,
    ) -> Answer:
        """Return the answer with these tokens."""
        return Answer(
            token_ids=pack_ints(token_ids),
            logprobs=pack_floats(logprobs),
            version_spans=version_spans,
            finish_reason=finish_reason,
            prompt_cached=prompt_cached,
        )

    def __len__(self) -> int:
        return len(self.token_ids) // INT.itemsize

    @property
    def ids(self) -> np.ndarray:
        """int32 [T], a read-only view."""
        return ints(self.token_ids)

    @property
    def token_logprobs(self) -> np.ndarray:
        """float32 [T], a read-only view."""
        return floats(self.logprobs)

    @property
    def newest_version(self) -> int:
        """Policy version of the last token; 0 without one."""
        return self.version_spans[-1].version if self.version_spans else 0

    @property
    def node_id(self) -> str:
        """The node that sampled the last token."""
        return self.sampled_by[-1][0] if self.sampled_by else ""

    def then(self, more: Answer) -> Answer:
        """Return the answer that continues with the tokens of `more`, and ends as it does."""
        if not self.token_ids:
            return more
        start = len(self)
        later = (VersionSpan(start + span.start, start + span.end, span.version) for span in more.version_spans)
        sampled_by = list(self.sampled_by)
        for node_id, count in more.sampled_by:
            if sampled_by and sampled_by[-1][0] == node_id:
                count += sampled_by.pop()[1]
            sampled_by.append((node_id, count))
        return msgspec.structs.replace(
            more,
            token_ids=self.token_ids + more.token_ids,
            logprobs=self.logprobs + more.logprobs,
            version_spans=joined(self.version_spans, later),
            sampled_by=sampled_by,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the body of vLLM's /inference/v1/generate, with the version spans added."""
        ids, logprobs = self.ids.tolist(), self.token_logprobs.tolist()
        # Renderers' client checks the form of `token`.
        content = [{"token": f"token_id:{i}", "logprob": value} for i, value in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": self.finish_reason,
            "logprobs": {"content": content},
            "weight_versions": [
                {"version": str(span.version), "start": span.start, "end": span.end} for span in self.version_spans
            ],
        }
        return {"request_id": self.record_id, "choices": [choice], "version_spans": self.version_spans}


NO_TOKENS = Answer()


def joined(spans: Iterable[VersionSpan], later: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Return `spans` and the `later` ones, one for each run of equal versions. Empty spans are left out."""
    result = list(spans)
    for span in later:
        last = result[-1] if result else None
        if last is not None and (last.end, last.version) == (span.start, span.version):
            result[-1] = VersionSpan(last.start, span.end, span.version)
        elif span.end > span.start:
            result.append(span)
    return result
