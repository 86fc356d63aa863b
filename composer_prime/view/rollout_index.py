"""Where each rollout of a run stands in its files, in one SQLite file a run below the user's cache.

    rollouts/{step,eval}_*.jsonl   replaced whole by the run: read again when size, time or inode changed
    rollouts/failed.jsonl          grows: only what was appended is read

An entry holds a rollout's figures and its place (file, offset, length), never its text. Newest files come first, so a
page can be shown before a long run is read to its end. Whoever shows a rollout reads that one line.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.run.run_dir import RunDir
from composer_prime.sqlite import BUSY_S, switch_to_wal

_FORMAT = 1
"""Version of the tables. A cached index of another version is made again."""
_UNUSED_DAYS = 60.0
_HOLD_S = 5.0
"""A long read commits after this time, so that the page of another process can write as well."""
_FILE = re.compile(r"(step|eval)_(\d{1,12})\.jsonl|failed\.jsonl")
_COLUMNS = (
    "file", "offset", "length", "kind", "step", "rollout_id", "grp", "source", "task_id", "status", "reward",
    "advantage", "turns", "tokens", "tool_errors", "hints", "error", "verdict", "node", "version_min", "version_max",
    "truncated",
)  # fmt: skip
_SCHEMA = f"""
CREATE TABLE files (name TEXT PRIMARY KEY, number INTEGER, size INTEGER, mtime_ns INTEGER, inode INTEGER, done INTEGER);
CREATE TABLE rollouts ({", ".join(_COLUMNS)});
CREATE INDEX by_step ON rollouts (kind, step, grp, rollout_id);
CREATE INDEX by_file ON rollouts (file);
"""


class _Failure(msgspec.Struct):
    kind: Any = None
    message: Any = None
    where: Any = None


class _Message(msgspec.Struct):
    role: Any = None
    error: Any = None
    hint: Any = None


class _Cost(msgspec.Struct):
    sampled_tokens: Any = None


class _Entry(msgspec.Struct):
    """The fields of a rollout's line that the index holds; the others are skipped without being decoded."""

    step: Any = None
    status: Any = None
    source: Any = None
    task_id: Any = None
    group: Any = None
    rollout_id: Any = None
    reward: Any = None
    advantage: Any = None
    policy_versions: Any = None
    truncated: Any = None
    error: _Failure | str | None = None
    turns: list[_Message] = []
    cost: _Cost | None = None
    node: Any = None
    nodes: Any = None
    verdict: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexState:
    """How far the index has come."""

    files: int
    files_left: int


class RolloutIndex:
    """The index of one run. Any thread may use it."""

    def __init__(self, run_dir: RunDir, cache: Path | None = None) -> None:
        """Open or make the index below `cache`; below a temporary folder where the cache cannot be written."""
        self._folder = run_dir.root / "rollouts"
        self._lock = threading.Lock()
        name = hashlib.blake2b(str(run_dir.root.resolve()).encode(), digest_size=12).hexdigest()
        self.path = _writable(cache or user_cache()) / f"{name}.sqlite"
        self._reader: threading.Thread | None = None
        self._asking = 0
        """Threads that wait for the lock to answer a request. The background reader lets them go first."""
        self._distinct: dict[tuple[str, str], list[Any]] = {}
        with self._connection() as database:
            switch_to_wal(database)
            database.execute("BEGIN IMMEDIATE")  # Another page may make it at the same time.
            if database.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    database.execute(f"DROP TABLE {table}")
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {_FORMAT}")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=BUSY_S)) as database:
            database.execute("PRAGMA synchronous = OFF")  # A lost index is made again.
            with database:
                yield database

    def update(self, budget_s: float = 0.4) -> IndexState:
        """Read changed files, newest first, for about `budget_s`. A thread continues with the rest."""
        with self._answering():
            state = self._take_files(time.monotonic() + budget_s)
        if state.files_left and (self._reader is None or not self._reader.is_alive()):
            self._reader = threading.Thread(target=self.read_all, name="rollout-index", daemon=True)
            self._reader.start()
        return state

    @contextmanager
    def _answering(self) -> Iterator[None]:
        self._asking += 1
        try:
            with self._lock:
                yield
        finally:
            self._asking -= 1

    def ensure(self, kind: str, step: int | None) -> None:
        """Take in the file of one step now, so that a link to it works before the rest has been read."""
        name = "failed.jsonl" if kind == "failed" else f"{kind}_{step or 0:06d}.jsonl"
        with self._answering(), self._connection() as database:
            files = {each: stat for each, stat in self._files().items() if each == name}
            for stale in self._locked_stale(database, files):
                self._take_file(database, stale, files[stale])

    def ensure_evaluations(self) -> None:
        """Take in every evaluation now: a verdict on some of them would be wrong."""
        with self._answering(), self._connection() as database:
            files = {name: stat for name, stat in self._files().items() if name.startswith("eval_")}
            for name in self._locked_stale(database, files):
                self._take_file(database, name, files[name])

    def read_all(self) -> None:
        """Read every changed file before returning. Requests that come meanwhile are answered between two files."""
        left = 1
        while left:
            with self._lock:
                left = self._take_files(time.monotonic() + _HOLD_S, yields=True).files_left
            time.sleep(0.002)

    def _files(self) -> dict[str, os.stat_result]:
        """Return the rollout files, newest first: the batch that people look for was written last."""
        found = {}
        try:
            for entry in os.scandir(self._folder):
                if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False)
        except OSError:
            return {}
        return dict(sorted(found.items(), key=lambda item: item[1].st_mtime_ns, reverse=True))

    @staticmethod
    def _stale(database: sqlite3.Connection, files: dict[str, os.stat_result]) -> list[str]:
        rows = database.execute("SELECT name, size, mtime_ns, inode FROM files")
        known = {name: stamp for name, *stamp in rows}
        return [name for name, stat in files.items() if known.get(name) != _stamp(stat)]

    def _locked_stale(self, database: sqlite3.Connection, files: dict[str, os.stat_result]) -> list[str]:
        """Return the stale names. Where there are any, this process alone may write until the connection closes."""
        if not self._stale(database, files):
            return []
        database.execute("BEGIN IMMEDIATE")
        return self._stale(database, files)  # Another process may have taken them in meanwhile.

    def _take_files(self, until: float, *, yields: bool = False) -> IndexState:
        """Read changed files until the time is up, at least one; with `yields` until another thread asks."""
        files = self._files()
        with self._connection() as database:
            stale = self._locked_stale(database, files)
            gone = [(name,) for (name,) in database.execute("SELECT name FROM files") if name not in files]
            database.executemany("DELETE FROM rollouts WHERE file IN (SELECT number FROM files WHERE name = ?)", gone)
            database.executemany("DELETE FROM files WHERE name = ?", gone)
            left = len(stale)
            for name in stale:
                self._take_file(database, name, files[name])
                left -= 1
                if time.monotonic() > until or (yields and self._asking):
                    break
        if gone or stale:  # The new entries are committed.
            self._distinct.clear()
        return IndexState(files=len(files), files_left=left)

    def _take_file(self, database: sqlite3.Connection, name: str, stat: os.stat_result) -> None:
        known = database.execute("SELECT number, size, inode, done FROM files WHERE name = ?", (name,)).fetchone()
        number, start = (known[0], known[3]) if known else (_next_number(database), 0)
        if known and (name != "failed.jsonl" or known[2] != stat.st_ino or known[1] > stat.st_size):
            database.execute("DELETE FROM rollouts WHERE file = ?", (number,))
            start = 0
        kind = "failed" if name == "failed.jsonl" else name.partition("_")[0]
        done = start
        rows = []
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(start)
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break
                    if row := _row(number, done, kind, raw):
                        rows.append(row)
                    done += len(raw)
        except OSError:
            return
        marks = ", ".join("?" * len(_COLUMNS))
        database.executemany(f"INSERT INTO rollouts VALUES ({marks})", rows)
        database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", (name, number, *_stamp(stat), done))

    def select(
        self, where: str, values: Iterable[Any] = (), *, order: str = "", limit: int = -1, offset: int = 0
    ) -> list[dict[str, Any]]:
        """Return entries as tables. `where` and `order` are SQL of this package, `values` may be anybody's."""
        ordering = f"ORDER BY {order}" if order else ""
        query = f"SELECT {', '.join(_COLUMNS)} FROM rollouts WHERE {where} {ordering} LIMIT ? OFFSET ?"
        with self._connection() as database:
            rows = database.execute(query, (*values, limit, offset)).fetchall()
        return [dict(zip(_COLUMNS, row, strict=True)) for row in rows]

    def count(self, where: str, values: Iterable[Any] = ()) -> int:
        with self._connection() as database:
            return database.execute(f"SELECT count(*) FROM rollouts WHERE {where}", tuple(values)).fetchone()[0]

    def distinct(self, column: str, kind: str) -> list[Any]:
        """Return the values that `column` has among the rollouts of `kind`, ascending."""
        if column not in _COLUMNS:
            raise ValueError(f"{column!r} is not a column of the index")
        if (known := self._distinct.get((column, kind))) is not None:
            return known
        query = f"SELECT DISTINCT {column} FROM rollouts WHERE kind = ? AND {column} IS NOT NULL ORDER BY 1"
        with self._connection() as database:
            values = [value for (value,) in database.execute(query, (kind,))]
        self._distinct[column, kind] = values
        return values

    def read(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        """Return the whole rollout of an entry; None when its file has changed since."""
        with self._connection() as database:
            row = database.execute("SELECT name FROM files WHERE number = ?", (entry["file"],)).fetchone()
        if row is None:
            return None
        try:
            with (self._folder / row[0]).open("rb") as file:
                file.seek(entry["offset"])
                rollout = msgspec.json.decode(file.read(entry["length"]))
        except (OSError, msgspec.DecodeError, RecursionError):
            return None
        is_same = isinstance(rollout, dict) and str(rollout.get("rollout_id")) == str(entry["rollout_id"])
        return rollout if is_same else None


def user_cache() -> Path:
    """Return the folder of all indexes."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "composer-prime" / "view"


def remove_unused(cache: Path) -> None:
    """Delete indexes that were not opened for _UNUSED_DAYS."""
    for path in cache.glob("*.sqlite*"):
        try:
            if time.time() - path.stat().st_mtime > _UNUSED_DAYS * 86_400:
                path.unlink()
        except OSError:
            continue


def _writable(cache: Path) -> Path:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError:
        return Path(tempfile.mkdtemp(prefix="composer-view-"))


def _stamp(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _next_number(database: sqlite3.Connection) -> int:
    return database.execute("SELECT coalesce(max(number), 0) + 1 FROM files").fetchone()[0]


_decode_entry = msgspec.json.Decoder(_Entry).decode


def _row(file: int, offset: int, kind: str, raw: bytes) -> tuple[Any, ...] | None:
    """Return the entry of a line; None if it is not a rollout."""
    try:
        line = _decode_entry(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    versions = line.policy_versions if isinstance(line.policy_versions, list) and line.policy_versions else [None]
    error = line.error
    if isinstance(error, _Failure):
        error = f"{error.message or error.kind or 'failed'}{f' ({error.where})' if error.where else ''}"
    node = line.node if line.node is not None else line.nodes
    return (
        file, offset, len(raw), kind, _number(line.step), _text(line.rollout_id), _number(line.group),
        _text(line.source), _text(line.task_id), _text(line.status), _number(line.reward), _number(line.advantage),
        sum(message.role == "assistant" for message in line.turns),
        _number(line.cost.sampled_tokens) if line.cost else None,
        sum(message.role == "tool" and bool(message.error) for message in line.turns),
        sum(bool(message.hint) for message in line.turns),
        error[:300] if error else None, _verdict(line),
        ", ".join(map(str, node)) if isinstance(node, list) else _text(node),
        _number(versions[0]), _number(versions[-1]), int(bool(line.truncated)),
    )  # fmt: skip


def _verdict(line: _Entry) -> str | None:
    """Return what the monitor for reward hacks says: hack, suspicious or clean; None where none looked."""
    if not isinstance(line.verdict, dict):
        return _text(line.verdict)
    if line.verdict.get("hack"):
        return "hack"
    findings = line.verdict.get("findings")
    weights = (
        [each.get("severity") for each in findings if isinstance(each, dict)] if isinstance(findings, list) else []
    )
    return "suspicious" if "suspicious" in weights else "clean"


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**62 else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:500]
