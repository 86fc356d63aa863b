"""When a completion ends: a stop token, the end-of-sequence token, a stop string."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from composer_prime.wire.node import Sampling

_SLACK_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """What ends one request before its length does."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    decode: Callable[[list[int]], str] | None
    """Token ids to text, special tokens included; needed for strings only."""
    window: int
    """Completion tokens that are decoded to look for a string that the newest one completes."""

    @classmethod
    def of(
        cls, sampling: Sampling, eos: frozenset[int], decode: Callable[[list[int]], str] | None
    ) -> StopRule:
        ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
        strings = tuple(one for one in sampling.stop if one)
        # A token is at least one byte, so a string of n bytes ends within the n tokens before its last; the slack
        # keeps what decoders do to the first token of a text (a dropped space) out of the match.
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
