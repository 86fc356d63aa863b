"""metrics.jsonl: every role appends its own lines, and readers follow the file while it grows."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

Metric = float | int | str | bool | None
Line = dict[str, Any]


class MetricsFile:
    """Appends lines `{"step", "time", "role", ...}` to one file that all roles of a run share.

    Each line is one write, so lines never mix. A disk that refuses it does not stop the run.
    """

    def __init__(self, path: Path, role: str) -> None:
        self.path = path
        self.role = role
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Append one line, without None; a number that is not finite becomes text."""
        line: Line = {"step": step, "time": round(time.time(), 3), "role": self.role}
        for name, value in metrics.items():
            if value is not None:
                line[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with contextlib.suppress(OSError), self.path.open("ab", buffering=0) as file:
            file.write(data)


class Tail:
    """Reads what was appended since. A torn last line waits for its end; broken ones are skipped."""

    def __init__(
        self, path: Path, valid: Callable[[Line], bool] = lambda line: isinstance(line.get("step"), int)
    ) -> None:
        """`valid`: whether an object is a line of this file."""
        self.path = path
        self._valid = valid
        self._offset = 0
        self._partial = b""

    def read(self) -> list[Line]:
        """Return new lines in file order. Reads a shortened file from its start."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset, self._partial = 0, b""
                file.seek(self._offset)
                data = file.read()
                self._offset = file.tell()
        except FileNotFoundError:
            return []
        *complete, self._partial = (self._partial + data).split(b"\n")
        return [line for raw in complete if (line := _decode(raw)) is not None and self._valid(line)]


def _decode(raw: bytes) -> Line | None:
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def read_history(path: Path) -> list[Line]:
    """Return every line of a file, without later steps' that a resume (`"event": "resume"`) made void."""
    lines: list[Line] = []
    for line in Tail(path).read():
        if line.get("event") == "resume":
            lines = [earlier for earlier in lines if earlier["step"] <= line["step"]]
        lines.append(line)
    return lines


def ended(lines: list[Line]) -> str | None:
    """Return how the run ended, by the launcher's note since the last resume."""
    notes = [line for line in lines if line.get("event") in ("ended", "resume")]
    return str(notes[-1].get("state")) if notes and notes[-1]["event"] == "ended" else None


def numeric_field(line: Line, name: str) -> float | None:
    """Return a numeric field, if it is one."""
    value = line.get(name)
    return float(value) if is_number(value) else None


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
