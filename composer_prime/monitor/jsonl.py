"""metrics.jsonl: every role appends its own lines; a reader follows the file while it grows."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

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
