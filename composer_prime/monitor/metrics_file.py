"""metrics.jsonl: every role appends its own lines; a reader follows the file while it grows.

Follows metrics.jsonl while roles append to it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Metric = float | int | str | bool | None


class MetricsFile:
    """Appends lines `{"step", "time", "role", ...}` to one file that all roles of a run share.

    Each line is one O_APPEND write, so lines of several processes never mix. A disk that refuses the write does not
    stop the run: the line is lost and counted in `lost`.
    """

    def __init__(self, path: Path, role: str) -> None:
        self.path = path
        self.role = role
        self.lost = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Append one line. None means not measured and is left out; a number that is not finite is written as text."""
        line = {"step": step, "time": round(time.time(), 3), "role": self.role}
        line |= {name: _plain(value) for name, value in metrics.items() if value is not None}
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError:
            self.lost += 1


def _plain(value: Metric) -> Metric:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


Line = dict[str, Any]


class Tail:
    """Reads what was appended since the last call. A torn last line waits for its end; a broken one is counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = 0
        """Lines that were not JSON objects."""
        self._offset = 0
        self._partial = b""

    def read(self) -> list[Line]:
        """New lines, in file order; empty while the file does not exist. A file cut back is read from its start."""
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
        *whole, self._partial = (self._partial + data).split(b"\n")
        return [line for raw in whole if raw.strip() and (line := self._decode(raw)) is not None]

    def _decode(self, raw: bytes) -> Line | None:
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            self.broken += 1
            return None
        return line


def read_history(path: Path) -> list[Line]:
    """Every line of a finished or running file, without those that a resume made void.

    The launcher marks a resume with {"step": C, "event": "resume"}: trainer lines of later steps before it were taken
    back.
    """
    lines: list[Line] = []
    for line in Tail(path).read():
        if line.get("event") == "resume":
            lines = [old for old in lines if old["step"] <= line["step"]]
        lines.append(line)
    return lines
