"""The file of answers: other processes that write it, folders that cannot be written, and what is damaged."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from composer_prime.llm.cache import AnswerCache, CachedAnswer, rows_of_folder

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


@contextmanager
def without_root() -> Iterator[None]:
    """Root may write into every folder, so be nobody for a while."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read: the path to `tmp_path` is the owner's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


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


# A read-only cache changes nothing on disk: it works in a folder that cannot be written.
def test_a_read_only_folder(open_folder: Path) -> None:
    path = open_folder / "answers.sqlite"
    cache = AnswerCache(path)
    cache.put("aa11", ANSWER)
    cache.close()
    open_folder.chmod(0o555)
    with without_root(), closing(AnswerCache(path, read_only=True)) as cache:
        assert cache.get("aa11") == ANSWER and cache.get("bb22") is None
    assert os.listdir(open_folder) == ["answers.sqlite"]


# So does one whose folder holds the answers of an earlier release only, or does not exist.
def test_a_read_only_folder_of_an_earlier_release(open_folder: Path) -> None:
    (open_folder / "aa").mkdir()
    (open_folder / "aa" / "aa11.json").write_bytes(msgspec.json.encode(ANSWER))
    open_folder.chmod(0o555)
    with without_root():
        cache = AnswerCache(open_folder / "answers.sqlite", rows_of_folder(open_folder), read_only=True)
        assert cache.get("aa11") == ANSWER
        assert AnswerCache(open_folder / "none" / "answers.sqlite", read_only=True).get("aa11") is None
    assert os.listdir(open_folder) == ["aa"]


# A read-only cache reads what another process has just written.
def test_a_read_only_cache_beside_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    with closing(AnswerCache(path)) as writer:
        reader = AnswerCache(path, read_only=True)
        writer.put("aa11", ANSWER)
        assert reader.get("aa11") == ANSWER
        reader.close()


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


# One answer of an earlier release that cannot be read does not keep the others from being imported.
def test_an_unreadable_old_answer_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / "aa10.json").symlink_to(tmp_path / "gone")
    (tmp_path / "aa" / "aa11.json").write_bytes(msgspec.json.encode(ANSWER))
    (tmp_path / "aa" / "aa12.json").mkdir()
    cache = AnswerCache(tmp_path / "answers.sqlite", rows_of_folder(tmp_path))
    assert cache.get("aa10") is None and cache.get("aa11") == ANSWER
    cache.close()
