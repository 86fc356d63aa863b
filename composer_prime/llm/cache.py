"""Answers of models, kept in one SQLite file: what was paid for once is never asked again.

One row a question: its key, the answer (none where no call gave a usable one), and what all its calls cost.

Earlier releases kept the answers of teachers in a folder (`<2 digits>/<key>.json`) and those of hint endpoints in a
file of JSON lines. Either is imported once, when the SQLite file is made.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import UnwritableError
from composer_prime.traces.state import Message

VERSION = 1
"""Part of every question's key. Raise it when the meaning of a stored answer changes."""
IN_MEMORY = 4096
"""Answers that a cache without a file holds."""
_BUSY_S = 30.0
"""How long one process waits for another that writes the same file."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer BLOB, cost_usd REAL NOT NULL DEFAULT 0);
"""
_ADD = """
INSERT INTO answers (key, answer, cost_usd) VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET
    answer = coalesce(excluded.answer, answer), cost_usd = cost_usd + excluded.cost_usd
"""
Row = tuple[str, bytes | None, float]
"""(key, encoded answer, USD)."""


class CachedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as it is stored."""

    message: Message
    """Assistant message with `content` and `tool_calls`, without thinking."""
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
        """128 bits over all fields. The order of a dictionary's keys does not count."""
        return hashlib.blake2b(msgspec.json.encode(self, order="deterministic"), digest_size=16).hexdigest()


class AnswerCache:
    """Safe to use from several threads and processes at once."""

    def __init__(self, path: Path | None, old_rows: Iterable[Row] = (), *, in_memory: int = IN_MEMORY) -> None:
        """`path` None keeps the newest `in_memory` answers and nothing on disk. `old_rows`: the answers of an earlier
        release (`rows_of_folder`, `rows_of_lines`), imported when the file is new.

        Raises UnwritableError when the file cannot be opened or is not a cache.
        """
        self._path = path
        self._in_memory = in_memory
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._import(old_rows)
        except (sqlite3.Error, OSError) as error:
            raise UnwritableError(
                f"answers cannot be kept in {path} ({error}): make the folder writable, or move the file elsewhere"
            ) from None

    def get(self, key: str) -> CachedAnswer | None:
        """Return the answer; None where there is none, or it is damaged and has to be asked for again."""
        with self._lock:
            row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        try:
            return None if row is None or row[0] is None else msgspec.json.decode(row[0], type=CachedAnswer)
        except msgspec.DecodeError:
            return None

    def put(self, key: str, answer: CachedAnswer) -> None:
        """Keep an answer. Raises OSError."""
        self._add(key, msgspec.json.encode(answer), 0.0)

    def add_cost(self, key: str, usd: float) -> None:
        """Add what a call for this question cost, with or without an answer. Raises OSError."""
        self._add(key, None, usd)

    @property
    def spent_usd(self) -> float:
        """The sum of `add_cost`, over earlier runs too."""
        with self._lock:
            return self._database.execute("SELECT total(cost_usd) FROM answers").fetchone()[0]

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _add(self, key: str, content: bytes | None, usd: float) -> None:
        try:
            with self._lock:
                self._database.execute(_ADD, (key, content, usd))
                if self._path is None:
                    newest = "SELECT max(rowid) FROM answers"
                    self._database.execute(f"DELETE FROM answers WHERE rowid <= ({newest}) - ?", (self._in_memory,))
        except sqlite3.Error as error:
            raise OSError(f"an answer cannot be kept in {self._path} ({error})") from None

    def _import(self, old_rows: Iterable[Row]) -> None:
        """Make the table with what an earlier release kept, all or nothing. user_version 1 marks it as made."""
        if self._user_version() == 1:
            return
        self._database.execute("BEGIN IMMEDIATE")
        try:
            if self._user_version() == 0:  # else another process made it meanwhile
                self._database.execute(_SCHEMA)
                self._database.executemany(_ADD, old_rows)
                self._database.execute("PRAGMA user_version = 1")
            self._database.execute("COMMIT")
        except BaseException:
            self._database.execute("ROLLBACK")
            raise

    def _user_version(self) -> int:
        return self._database.execute("PRAGMA user_version").fetchone()[0]


def rows_of_folder(folder: Path) -> Iterator[Row]:
    """Yield the answers that an earlier release kept as files, one a question."""
    for path in folder.glob("??/*.json"):
        yield path.stem, path.read_bytes(), 0.0


class _OldLine(msgspec.Struct, frozen=True):
    key: str
    text: str | None
    cost_usd: float


def rows_of_lines(path: Path) -> Iterator[Row]:
    """Yield the calls that an earlier release kept as lines of {"key", "text", "cost_usd"}. A torn line is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                line = msgspec.json.decode(raw, type=_OldLine)
            except msgspec.DecodeError:
                continue
            yield line.key, None if line.text is None else _answer_of(line), line.cost_usd


def _answer_of(line: _OldLine) -> bytes:
    message: Message = {"role": "assistant", "content": line.text}
    return msgspec.json.encode(
        CachedAnswer(
            message=message, finish_reason="stop", input_tokens=0, output_tokens=0, cost_usd=line.cost_usd, seconds=0.0
        )
    )
