"""What was sampled for a request: the one form of it from the engine to the gateway."""

from __future__ import annotations

import msgspec

from composer_prime.wire.types import VersionSpan


class Answer(msgspec.Struct, kw_only=True):
    """The tokens of a request, or a part of them."""

    token_ids: list[int] = []
    """[T_new], including the stop token that ended the turn."""
    logprobs: list[float] = []
    """[T_new], under the sampling distribution (after temperature, top-k, top-p)."""
    version_spans: list[VersionSpan] = []
    """In order, covering [0, T_new) without gap or overlap."""
    finish_reason: str = "running"
    """stop | length | cancelled; `running` in a part of an answer."""
    prompt_cached: int = 0
    """Prompt tokens whose keys and values were cached."""

    def extend(self, part: Answer) -> None:
        """Append `part`, which begins where this ends, and end as it does."""
        first = len(self.token_ids)
        self.token_ids = self.token_ids + part.token_ids
        self.logprobs = self.logprobs + part.logprobs
        spans = list(self.version_spans)
        for span in part.version_spans:
            start, end = first + span.start, first + span.end
            if spans and spans[-1].version == span.version and spans[-1].end == start:
                start = spans.pop().start
            spans.append(VersionSpan(start, end, span.version))
        self.version_spans, self.finish_reason = spans, part.finish_reason
