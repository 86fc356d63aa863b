"""Figures of every rollout of a run, and where each stands in its file. Kept in memory; a rollout's text is not.

    rollouts/{step,eval}_*.jsonl, failed.jsonl   read again when size, time or inode changed

Whoever shows a rollout reads that one line.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.run.run_dir import RunDir

_FILE = re.compile(r"(step|eval)_(\d{1,12})\.jsonl|failed\.jsonl")
_FAILED = "failed.jsonl"
Entry = dict[str, Any]
"""One rollout's figures, with `file`, `offset` and `length` of its line."""


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


class _Line(msgspec.Struct):
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
class _File:
    """What was read of a file."""

    stamp: tuple[int, int, int]
    """Size, time and inode."""
    entries: list[Entry]


class RolloutIndex:
    """The index of one run. Any thread may use it."""

    def __init__(self, run_dir: RunDir) -> None:
        self._folder = run_dir.root / "rollouts"
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}

    def entries(self, kind: str, step: int | None = None) -> list[Entry]:
        """Return the entries of `kind`, of one step where given, the newest step first."""
        with self._lock:
            self._refresh()
            prefix = _FAILED if kind == "failed" else f"{kind}_"
            found = [entry for name, file in self._files.items() if name.startswith(prefix) for entry in file.entries]
        if step is not None:
            found = [entry for entry in found if entry["step"] == step]
        return sorted(found, key=lambda entry: -(entry["step"] or 0))

    def read(self, entry: Entry) -> dict[str, Any] | None:
        """Return the whole rollout of an entry; None when its file has changed since."""
        try:
            with (self._folder / entry["file"]).open("rb") as file:
                file.seek(entry["offset"])
                rollout = msgspec.json.decode(file.read(entry["length"]))
        except (OSError, msgspec.DecodeError, RecursionError):
            return None
        is_same = isinstance(rollout, dict) and str(rollout.get("rollout_id")) == str(entry["rollout_id"])
        return rollout if is_same else None

    def _refresh(self) -> None:
        stats = {}
        try:
            for found in os.scandir(self._folder):
                if _FILE.fullmatch(found.name) and found.is_file(follow_symlinks=False):
                    stats[found.name] = found.stat(follow_symlinks=False)
        except OSError:
            stats = {}
        self._files = {name: file for name, file in self._files.items() if name in stats}
        for name, stat in stats.items():
            stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            known = self._files.get(name)
            if known is None or known.stamp != stamp:
                self._files[name] = _File(stamp=stamp, entries=_read(self._folder / name))


def _read(path: Path) -> list[Entry]:
    """Return the entries of a file's whole lines."""
    kind = "failed" if path.name == _FAILED else path.name.partition("_")[0]
    entries, offset = [], 0
    try:
        with path.open("rb") as file:
            for raw in file:
                if raw.endswith(b"\n") and (entry := _entry(path.name, offset, kind, raw)) is not None:
                    entries.append(entry)
                offset += len(raw)
    except OSError:
        return []
    return entries


_decode_line = msgspec.json.Decoder(_Line).decode


def _entry(file: str, offset: int, kind: str, raw: bytes) -> Entry | None:
    """Return the entry of a line; None if it is not a rollout."""
    try:
        line = _decode_line(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    versions = line.policy_versions if isinstance(line.policy_versions, list) and line.policy_versions else [None]
    error = line.error
    if isinstance(error, _Failure):
        error = f"{error.message or error.kind or 'failed'}{f' ({error.where})' if error.where else ''}"
    node = line.node if line.node is not None else line.nodes
    return {
        "file": file,
        "offset": offset,
        "length": len(raw),
        "kind": kind,
        "step": _number(line.step),
        "rollout_id": _text(line.rollout_id),
        "grp": _number(line.group),
        "source": _text(line.source),
        "task_id": _text(line.task_id),
        "status": _text(line.status),
        "reward": _number(line.reward),
        "advantage": _number(line.advantage),
        "turns": sum(message.role == "assistant" for message in line.turns),
        "tokens": _number(line.cost.sampled_tokens) if line.cost else None,
        "tool_errors": sum(message.role == "tool" and bool(message.error) for message in line.turns),
        "hints": sum(bool(message.hint) for message in line.turns),
        "error": error[:300] if error else None,
        "verdict": _verdict(line),
        "node": ", ".join(map(str, node)) if isinstance(node, list) else _text(node),
        "version_min": _number(versions[0]),
        "version_max": _number(versions[-1]),
        "truncated": bool(line.truncated),
    }


def _verdict(line: _Line) -> str | None:
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
