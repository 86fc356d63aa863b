"""Figures of every rollout of a run, and where each stands in its file. Kept in memory; a rollout's text is not.

rollouts/{step,eval}_*.jsonl, failed.jsonl   read again when size, time or inode changed
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.monitor.rollouts import failure_text, question_and_reply
from composer_prime.run.run_dir import RunDir

_FILE = re.compile(r"(step|eval)_(\d{1,12})\.jsonl|failed\.jsonl")
_FAILED = "failed.jsonl"
Entry = dict[str, Any]
"""One rollout's figures, with `file`, `offset` and `length` of its line."""
Stamp = tuple[int, int, int]


class RolloutIndex:
    """The index of one run, for any thread."""

    def __init__(self, run_dir: RunDir) -> None:
        self._folder = run_dir.root / "rollouts"
        self._lock = threading.Lock()
        self._files: dict[str, tuple[Stamp, list[Entry]]] = {}

    def entries(self, kind: str, step: int | None = None) -> list[Entry]:
        """Return the entries of `kind`, perhaps of one step, the newest first."""
        with self._lock:
            self._refresh()
            prefix = _FAILED if kind == "failed" else f"{kind}_"
            found = [each for name, (_, file) in self._files.items() if name.startswith(prefix) for each in file]
        if step is not None:
            found = [entry for entry in found if entry["step"] == step]
        return sorted(found, key=lambda entry: -(entry["step"] or 0))

    def read(self, entry: Entry) -> dict[str, Any] | None:
        """Return the whole rollout of an entry, unless its file has changed."""
        try:
            with (self._folder / entry["file"]).open("rb") as file:
                file.seek(entry["offset"])
                rollout = _decode(file.read(entry["length"]))
        except OSError:
            return None
        return rollout if str(rollout.get("rollout_id")) == str(entry["rollout_id"]) else None

    def _refresh(self) -> None:
        known, self._files = self._files, {}
        try:
            found = [each for each in os.scandir(self._folder) if _FILE.fullmatch(each.name)]
        except OSError:
            return
        for each in found:
            if not each.is_file(follow_symlinks=False):
                continue
            stat = each.stat(follow_symlinks=False)
            stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            old = known.get(each.name)
            if old is None or old[0] != stamp:
                old = (stamp, _read(self._folder / each.name))
            self._files[each.name] = old


def _read(path: Path) -> list[Entry]:
    entries, offset = [], 0
    try:
        with path.open("rb") as file:
            for raw in file:
                line = _decode(raw) if raw.endswith(b"\n") else {}
                if isinstance(line.get("turns"), list):
                    place = {"file": path.name, "offset": offset, "length": len(raw)}
                    entries.append({**place, **_figures(path, line)})
                offset += len(raw)
    except OSError:
        return []
    return entries


def _decode(raw: bytes) -> dict[str, Any]:
    """Return the object of a line, or {}."""
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _figures(path: Path, line: dict[str, Any]) -> Entry:
    """Return what the page lists; odd values become None."""
    turns = [turn for turn in line["turns"] if isinstance(turn, dict)]
    cost, node = line.get("cost"), line.get("node", line.get("nodes"))
    versions = line.get("policy_versions") or [None]
    kind, _, step = path.stem.partition("_")
    first, last = (versions[0], versions[-1]) if isinstance(versions, list) else (None, None)
    question, reply = question_and_reply(line)
    return {
        "kind": kind,
        "step": int(step) if step else _number(line.get("step")),
        "rollout_id": _text(line.get("rollout_id")),
        "grp": _number(line.get("group")),
        "source": _text(line.get("source")),
        "task_id": _text(line.get("task_id")),
        "question": _text(question),
        "expected": _text(line.get("expected")),
        "reply": _text(reply),
        "status": _text(line.get("status")),
        "reward": _number(line.get("reward")),
        "advantage": _number(line.get("advantage")),
        "turns": sum(turn.get("role") == "assistant" for turn in turns),
        "tokens": _number(cost.get("sampled_tokens")) if isinstance(cost, dict) else None,
        "tool_errors": sum(turn.get("role") == "tool" and bool(turn.get("error")) for turn in turns),
        "hints": sum(bool(turn.get("hint")) for turn in turns),
        "error": _text(failure_text(line)),
        "verdict": _verdict(line.get("verdict")),
        "node": ", ".join(map(str, node)) if isinstance(node, list) else _text(node),
        "version_min": _number(first),
        "version_max": _number(last),
        "truncated": bool(line.get("truncated")),
    }


def _verdict(verdict: Any) -> str | None:
    """Return what the hack monitor says: hack, suspicious or clean, if it looked."""
    if not isinstance(verdict, dict):
        return _text(verdict)
    if verdict.get("hack"):
        return "hack"
    findings = verdict.get("findings")
    found = [each for each in findings if isinstance(each, dict)] if isinstance(findings, list) else []
    return "suspicious" if any(each.get("severity") == "suspicious" for each in found) else "clean"


def _number(value: Any) -> float | int | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < 2**62 else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:500]
