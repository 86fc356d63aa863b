"""The output folder of a run: finished tasks, and a line for each candidate that was looked at.

    tasks/
      tasks.jsonl       proven tasks; in the candidates' order once the run is over
      trees/NAME/       pristine trees
      making.jsonl      settings of each source, then one verdict a candidate
      report.json       figures and reasons

A task is written before its verdict. A killed run leaves at most one task without a verdict, and a torn last line. Both
are dropped when the run continues, and that candidate is done again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import ConfigError
from orchestrator.coding.task import TASKS_FILE, TREES_FOLDER, CodeTask

MAKING_FILE = "making.jsonl"
REPORT_FILE = "report.json"


class CandidateVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one candidate. `reason` is empty for a task."""

    source: str
    order: int
    id: str
    kind: str
    shape: str
    reason: str = ""
    detail: str = ""


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a source."""

    begun: str
    settings: dict[str, Any]


class MakingJournal:
    """Writes verdicts and tasks of one output folder, and knows those of earlier runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.trees = folder / TREES_FOLDER
        self._making = folder / MAKING_FILE
        self._tasks_path = folder / TASKS_FILE
        self._refuse_foreign_folder()
        self.trees.mkdir(parents=True, exist_ok=True)
        self._lock = self._making.open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another run writes to {folder} now; wait for it, or give another -o") from error
        self._settings: dict[str, dict[str, Any]] = {}
        self.verdicts: dict[str, CandidateVerdict] = {}
        self._read()

    def begin(self, source: str, settings: dict[str, Any]) -> None:
        """Note a source's settings. Raises ConfigError where the folder has that source with other settings."""
        settings = msgspec.json.decode(msgspec.json.encode(settings))
        known = self._settings.setdefault(source, settings)
        changed = {name: (known.get(name), settings[name]) for name in settings if known.get(name) != settings[name]}
        if changed:
            raise ConfigError(
                f"{self.folder} has tasks of {source} made with other settings (there, here): {changed}; give another "
                "-o, or remove the folder to make them again"
            )
        self._append(self._making, msgspec.json.encode(_Header(begun=source, settings=settings)))

    def add(self, verdict: CandidateVerdict, task: CodeTask | None) -> None:
        """Write one verdict, with the task where it is proven."""
        if task is not None:
            self._append(self._tasks_path, msgspec.json.encode(task))
        self._append(self._making, msgspec.json.encode(verdict))
        self.verdicts[verdict.id] = verdict

    def close(self) -> None:
        """Let another run have the folder."""
        self._lock.close()

    def finish(self, limit: int | None) -> int:
        """Bring the tasks into the candidates' order and cut each source to `limit`. Return how many there are."""
        order = {
            verdict.id: (verdict.source, verdict.order, verdict.id)
            for verdict in self.verdicts.values()
            if not verdict.reason
        }
        counts: dict[str, int] = {}
        lines = {msgspec.json.decode(line, type=_TaskId).id: line for line in _lines(self._tasks_path)}
        kept = []
        for name in sorted(lines.keys() & order.keys(), key=order.__getitem__):
            source = order[name][0]
            counts[source] = counts.get(source, 0) + 1
            if limit is None or counts[source] <= limit:
                kept.append(lines[name])
        self._replace(self._tasks_path, kept)
        return len(kept)

    def write_report(self, report: dict[str, Any]) -> None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2)
        self._replace(self.folder / REPORT_FILE, text.splitlines())

    def _refuse_foreign_folder(self) -> None:
        if self.folder.is_file():
            raise ConfigError(f"{self.folder} is a file; -o takes a folder")
        if self.folder.is_dir() and any(self.folder.iterdir()) and not self._making.is_file():
            raise ConfigError(
                f"{self.folder} has files that `composer tasks make` did not write; give -o an empty or new folder"
            )

    def _read(self) -> None:
        finished = {msgspec.json.decode(line, type=_TaskId).id: line for line in _lines(self._tasks_path)}
        for line in _lines(self._making):
            try:
                header = msgspec.json.decode(line, type=_Header)
                self._settings[header.begun] = header.settings
            except msgspec.ValidationError:
                verdict = msgspec.json.decode(line, type=CandidateVerdict)
                if verdict.reason or verdict.id in finished:
                    self.verdicts[verdict.id] = verdict
        if finished:
            kept = (line for name, line in finished.items() if name in self.verdicts)
            self._replace(self._tasks_path, kept)

    def _append(self, path: Path, line: bytes) -> None:
        with path.open("ab") as file:
            file.write(line + b"\n")

    def _replace(self, path: Path, lines: Iterable[bytes]) -> None:
        new = path.with_suffix(".new")
        new.write_bytes(b"".join(line + b"\n" for line in lines))
        os.replace(new, path)


class _TaskId(msgspec.Struct):
    id: str


def _lines(path: Path) -> list[bytes]:
    """Return the whole lines of a file. A torn last one is cut off, in the file as well."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.splitlines()
