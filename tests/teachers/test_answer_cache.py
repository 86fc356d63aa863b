"""The file of answers: other processes that write it, and what is damaged."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from composer_prime.llm.cache import AnswerCache, CachedAnswer

ANSWER = CachedAnswer(
    message={"role": "assistant", "content": "y"},
    finish_reason="stop",
    input_tokens=1,
    output_tokens=1,
    cost_usd=0.5,
    seconds=0.1,
)


@contextmanager
def write_transaction(path: Path) -> Iterator[None]:
    """Hold the file's write lock, as another process does."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("COMMIT")


# An answer is read while this process waits to write another one, because another process writes.
def test_readers_do_not_wait_for_writers(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    cache = AnswerCache(path)
    cache.put("aa11", ANSWER)
    writer = threading.Thread(target=cache.put, args=("bb22", ANSWER))
    with write_transaction(path):
        writer.start()
        writer.join(0.05)
        assert cache.get("aa11") == ANSWER and cache.get("bb22") is None
        assert writer.is_alive()
    writer.join()
    assert cache.get("bb22") == ANSWER
    cache.close()


# Of two processes that make the file at once, the second waits for the first.
def test_a_file_that_another_process_makes(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    opened: list[AnswerCache] = []
    other = threading.Thread(target=lambda: opened.append(AnswerCache(path)))
    with write_transaction(path):
        other.start()
        other.join(0.1)
    other.join()
    assert opened and opened[0].get("aa11") is None


# A damaged file is an OSError that names it, not an error of SQLite.
def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    cache = AnswerCache(path)
    cache.put("aa11", ANSWER)
    cache.close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    cache = AnswerCache(path)
    with pytest.raises(OSError, match=r"cannot be read from .*answers\.sqlite \(.*move it elsewhere"):
        cache.get("aa11")
    cache.close()
