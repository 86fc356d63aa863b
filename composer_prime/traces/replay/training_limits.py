"""Which states a training step can hold. Teachers are paid for no other: their pairs would be refused at training."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer_prime.config import Config
from composer_prime.model_source import resolve_model
from composer_prime.traces.state import Message, TraceState

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

NO_MODEL = "none"
"""The model.path of a replay without a run."""
_KNOWN_TEXTS = 100_000
"""Texts whose length is remembered: the states of a trace repeat their context."""


@dataclass(slots=True, kw_only=True)
class TrainingLimits:
    """The limits of the run whose model learns from the pairs. Used by one thread at a time."""

    tokenizer: Tokenizer
    max_context: int
    row_tokens: int
    """Both sides of a pair share one row (trainer.micro_batch_tokens)."""
    _lengths: dict[bytes, int] = field(default_factory=dict)

    def excess(self, state: TraceState) -> str | None:
        """Return why no pair of this state can be trained; None where one may.

        Every pair holds the context and, on one side, the student's action. Only their texts are counted: what the
        chat template adds would make them longer still.
        """
        context = sum(self._tokens(message) for message in state.messages)
        side = context + self._tokens(state.student_action)
        if side > self.max_context:
            return (
                f"its context and action have more tokens than model.max_context = {self.max_context}, so no step "
                "could train on its pairs: raise model.max_context, or ingest shorter sessions"
            )
        if context + side > self.row_tokens:
            return (
                f"both sides of its pairs have more tokens than trainer.micro_batch_tokens = {self.row_tokens}, so no "
                "step could train on them: raise trainer.micro_batch_tokens, or ingest shorter sessions"
            )
        return None

    def _tokens(self, message: Message) -> int:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        texts = [message.get("content") or "", *(text for call in calls for text in (call["name"], call["arguments"]))]
        return sum(self._length(text) for text in texts if text)

    def _length(self, text: str) -> int:
        key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
        length = self._lengths.get(key)
        if length is None:
            if len(self._lengths) >= _KNOWN_TEXTS:
                self._lengths.clear()
            length = self._lengths[key] = len(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return length


def training_limits(config: Config) -> TrainingLimits | None:
    """Return the limits of a run; None without one, and, with a warning, where its tokenizer is not at hand."""
    from tokenizers import Tokenizer

    if config.model.path == NO_MODEL:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(resolve_model(config.model.path) / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        logger.warning(
            "states are not compared with model.max_context: model.path = %s has no readable tokenizer.json (%s)",
            config.model.path,
            error,
        )
        return None
    tokenizer.no_truncation()
    return TrainingLimits(
        tokenizer=tokenizer, max_context=config.model.max_context, row_tokens=config.trainer.micro_batch_tokens
    )
