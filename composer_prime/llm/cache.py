"""Answers of models, kept in one SQLite file: what was paid for once is never asked again."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import UnwritableError

Message = dict[str, Any]
"""A message in the form of OpenAI's chat completions."""
VERSION = 1
"""Part of every question's key. Raise it when the meaning of a stored answer changes."""
_BUSY_S = 30.0
"""How long one process waits for another that writes."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer BLOB, cost_usd REAL NOT NULL DEFAULT 0);
"""
_PUT = "INSERT INTO answers (key, answer) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET answer = excluded.answer"


class CachedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    message: Message
    """Assistant message with `content` and `tool_calls`, without thinking."""
    finish_reason: str
    input_tokens: int
    output_tokens: int
    cost_usd: float
    seconds: float
    """Of the attempt that succeeded."""
    model: str | None = None
    """The model that answered, as the reply names it."""


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
        """128 bits over all fields; a dictionary's order does not count."""
        return hashlib.blake2b(msgspec.json.encode(self, order="deterministic"), digest_size=16).hexdigest()


class AnswerCache:
    """Safe to use from several threads and processes, where a call may wait for a writer."""

    def __init__(self, path: Path) -> None:
        """Raises UnwritableError when the file is not a cache that can be written."""
        self._path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._database.execute(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise UnwritableError(
                f"answers cannot be kept in {path} ({error}): make the folder writable, or move the file elsewhere"
            ) from None

    def get(self, key: str) -> CachedAnswer | None:
        """Return the answer, if it is there and whole. Raises OSError for a damaged file."""
        rows = self._execute("SELECT answer FROM answers WHERE key = ?", (key,))
        if not rows or rows[0][0] is None:
            return None
        try:
            return msgspec.json.decode(rows[0][0], type=CachedAnswer)
        except msgspec.DecodeError:
            return None

    def put(self, key: str, answer: CachedAnswer) -> None:
        """Keep an answer. Raises OSError."""
        self._execute(_PUT, (key, msgspec.json.encode(answer)))

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise OSError(
                f"{self._path} cannot be read or written as a cache of answers ({error}): restore the file from "
                "a copy, or move it elsewhere and pay again"
            ) from None
