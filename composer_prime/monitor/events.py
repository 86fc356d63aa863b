"""outputs/<run>/events.jsonl: what a user must know about a run besides its figures.

    logger.warning("node %s is gone", name)                    any warning or error of our loggers
    logger.info("checkpoint 20 is saved", extra=event("checkpoint"))   important, but not a warning
        --EventHandler--> one line for each event at once; repetitions are counted: 10, 100, 200, ...
        --read_events--> the launcher, `composer report`, the page

A line: {"time", "role", "pid", "level", "kind", "text", "count", "id", "where", "cause"}; the last two may be null.
`where` is file:line of the code that raised, else of ours that noticed. Lines of one event have the same `id`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.run.run_dir import RunDir

OURS = ("composer_prime", "orchestrator", "trainer", "inference", "diloco")
VARIABLE = "COMPOSER_EVENTS"
"""Environment variable with the run directory, for a role's own processes."""
_TEXT_CHARS = 1000
_ID_CHARS = 120
_MAX_IDS = 300
"""Warnings and errors that a process tells apart; further ones of a kind count as one."""
_NUMBER = re.compile(r"\d+")


def event(
    kind: str,
    *,
    where: str | None = None,
    cause: str | None = None,
    same_as: str | None = None,
    text: str | None = None,
    count: int | None = None,
) -> dict[str, Any]:
    """Return the `extra` of a logging call that is an event at any level.

    `kind`: failure, node, checkpoint, evaluation, budget, groups, demonstrations, hack, process, alert. `same_as`:
    equal for repetitions; by default texts decide that differ in numbers only. `text`: for people. `count`: where the
    caller counts repetitions itself.
    """
    return {
        "event_kind": kind,
        "event_where": where,
        "event_cause": cause,
        "event_id": same_as,
        "event_text": text,
        "event_count": count,
    }


class EventFile:
    """Appends events, each with one write. A disk that refuses it does not stop the run."""

    def __init__(self, run_dir: RunDir, role: str) -> None:
        self._path = run_dir.root / "events.jsonl"
        self._role = role
        self._counts: dict[str, int] = {}
        self._warnings = 0

    def write(
        self,
        kind: str,
        text: str,
        *,
        level: str = "info",
        same_as: str | None = None,
        where: str | None = None,
        cause: str | None = None,
        count: int | None = None,
    ) -> None:
        """Write the event; of its repetitions only the tenth and each hundredth."""
        name = same_as or (text if level == "info" else _NUMBER.sub("#", text))[:_ID_CHARS]
        if name not in self._counts and level != "info":
            name = kind if self._warnings >= _MAX_IDS else name
            self._warnings += name not in self._counts
        count = self._counts[name] = count or self._counts.get(name, 0) + 1
        if count not in (1, 10) and count % 100:
            return
        line = {
            "time": round(time.time(), 3),
            "role": self._role,
            "pid": os.getpid(),
            "level": level,
            "kind": kind,
            "text": text[:_TEXT_CHARS],
            "count": count,
            "id": f"{self._role}/{kind}/{name}",
            "where": where,
            "cause": cause,
        }
        with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


class EventHandler(logging.Handler):
    """Writes our loggers' warnings, errors and calls with `extra=event(...)`."""

    def __init__(self, file: EventFile, level: int) -> None:
        super().__init__(level)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        kind = getattr(record, "event_kind", None)
        is_ours = record.name.partition(".")[0] in OURS
        if kind is None and not (is_ours and record.levelno >= logging.WARNING):
            return
        level = "error" if record.levelno >= logging.ERROR else "warning"
        level = level if record.levelno >= logging.WARNING else "info"
        error = record.exc_info[1] if record.exc_info else None
        called_at = f"{_shown_path(Path(record.pathname))}:{record.lineno}"
        try:
            self._file.write(
                kind or level,
                getattr(record, "event_text", None) or record.getMessage(),
                level=level,
                same_as=getattr(record, "event_id", None),
                where=getattr(record, "event_where", None) or _raised_at(error) or called_at,
                cause=getattr(record, "event_cause", None) or (error and f"{type(error).__name__}: {error}"),
                count=getattr(record, "event_count", None),
            )
        except Exception:
            self.handleError(record)


def record_events(run_dir: RunDir, role: str, *, level: int = logging.INFO) -> None:
    """Write what users must know of this process's log to the run's events. `level`: the least that counts."""
    os.environ[VARIABLE] = str(run_dir.root)
    logging.getLogger().addHandler(EventHandler(EventFile(run_dir, role), level))


def join_events(role: str) -> None:
    """Do so in a process that such a role started."""
    if root := os.environ.get(VARIABLE):
        record_events(RunDir(Path(root)), role)


def _raised_at(error: BaseException | None) -> str | None:
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return f"{_shown_path(Path(frames[-1].filename))}:{frames[-1].lineno}" if frames else None


def _shown_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    time: float = 0.0
    """Unix seconds of its last line."""
    role: str
    pid: int
    """Wrote the last line."""
    level: str
    """info, warning or error."""
    kind: str
    text: str
    count: int
    """At least: 1, 10, or hundreds."""
    id: str
    where: str | None = None
    cause: str | None = None

    @property
    def line(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        place = f" ({self.where})" if self.where and self.level != "info" and self.where not in self.text else ""
        text = self.text.replace("\n", "\n    ")
        return f"{self.role}: {text}{times}{place}"


def parse_event(line: dict[str, Any]) -> RunEvent | None:
    """Return the event of an object of the file, if it is one."""
    try:
        return msgspec.convert(line, RunEvent)
    except msgspec.ValidationError:
        return None


def read_events(path: Path) -> list[RunEvent]:
    """Return every event once, by its last line, in the order of time. Counts of several processes are added."""
    raw_lines = path.read_bytes().splitlines() if path.is_file() else []
    by_id: dict[str, RunEvent] = {}
    counted: dict[str, dict[int, int]] = {}
    """By event and process, since its last start."""
    earlier: Counter[str] = Counter()
    """By event, of earlier processes with the id of a later one, as in containers."""
    decode = msgspec.json.Decoder(RunEvent).decode
    for raw in raw_lines:
        try:
            each = decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        counts = counted.setdefault(each.id, {})
        if each.count <= (last := counts.get(each.pid, 0)):
            earlier[each.id] += last
        counts[each.pid] = each.count
        by_id[each.id] = msgspec.structs.replace(each, count=earlier[each.id] + sum(counts.values()))
    return sorted(by_id.values(), key=lambda each: each.time)
