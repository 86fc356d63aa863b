"""Answers on disk, by everything that they depend on: what was paid for once is never asked again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.run.run_dir import write_atomic
from composer_prime.traces.state import Message

VERSION = 1
"""Part of every key: raised when the meaning of a stored answer changes."""


class CachedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a teacher said, as it is stored."""

    message: Message
    """Assistant message with `content` and `tool_calls`; thinking is taken out."""
    finish_reason: str
    input_tokens: int
    output_tokens: int
    cost_usd: float
    seconds: float
    """Of the attempt that succeeded."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an answer depends on."""

    endpoint: str
    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    temperature: float | None
    """None: the model's own."""
    max_tokens: int
    version: int = VERSION

    @property
    def key(self) -> str:
        """128 bits over all of it; dictionaries count by content, not by order."""
        return hashlib.blake2b(msgspec.json.encode(self, order="deterministic"), digest_size=16).hexdigest()


class AnswerCache:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> CachedAnswer | None:
        """None also where the stored answer is damaged: it is asked for again."""
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=CachedAnswer)
        except (OSError, msgspec.DecodeError):
            return None

    def put(self, key: str, answer: CachedAnswer) -> None:
        """Raises OSError."""
        write_atomic(self._path(key), msgspec.json.encode(answer))

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
