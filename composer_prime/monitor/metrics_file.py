"""metrics.jsonl: every role appends its own lines, and readers follow the file while it grows.

Trackers besides metrics.jsonl: trackio, wandb, tensorboard. Fed by the launcher, never by a role.

    launcher --put--> queue --feeder thread--> tracker

A full queue drops lines; a tracker that raises is switched off. Each tracker has its own thread, so one that blocks or
fails stops neither training nor the launcher.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from composer_prime.console import install_command
from composer_prime.errors import ConfigError

if TYPE_CHECKING:
    from composer_prime.config import Config

Metric = float | int | str | bool | None
Line = dict[str, Any]


class MetricsFile:
    """Appends lines `{"step", "time", "role", ...}` to one file that all roles of a run share.

    Each line is one O_APPEND write, so lines of several processes never mix. A disk that refuses the write does not
    stop the run: the line is lost.
    """

    def __init__(self, path: Path, role: str) -> None:
        self.path = path
        self.role = role
        path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Append one line. Leaves out None (not measured); writes a number that is not finite as text."""
        line: Line = {"step": step, "time": round(time.time(), 3), "role": self.role}
        for name, value in metrics.items():
            if value is not None:
                line[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with contextlib.suppress(OSError), self.path.open("ab", buffering=0) as file:
            file.write(data)


class Tail:
    """Reads what was appended since the last call. A torn last line waits for its end; broken ones are skipped."""

    def __init__(
        self, path: Path, valid: Callable[[Line], bool] = lambda line: isinstance(line.get("step"), int)
    ) -> None:
        """`valid`: whether an object is a line of this file; by default one of metrics.jsonl."""
        self.path = path
        self._valid = valid
        self._offset = 0
        self._partial = b""

    def read(self) -> list[Line]:
        """Return new lines in file order; none while the file does not exist. Reads a shortened file from its start."""
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
    """Return every line of a finished or running file, without those that a resume made void.

    The launcher marks a resume with {"step": C, "event": "resume"}: earlier lines of later steps no longer count.
    """
    lines: list[Line] = []
    for line in Tail(path).read():
        if line.get("event") == "resume":
            lines = [earlier for earlier in lines if earlier["step"] <= line["step"]]
        lines.append(line)
    return lines


Numbers = dict[str, float]
Tracker = tuple[Callable[[int, Numbers], object], Callable[[], object]]
"""How to log the figures of a step, and how to end."""
PROJECT = os.environ.get("WANDB_PROJECT", "composer-prime")
QUEUE_LINES = 10_000


def _trackio(config: Config, folder: Path) -> Tracker:
    """Return trackio: a local-first tracker; all data stay on this machine's disk."""
    run = _load("trackio").init(project=PROJECT, name=config.run.name, config=config.model_dump(mode="json"))
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _wandb(config: Config, folder: Path) -> Tracker:
    """Return wandb, offline unless WANDB_MODE says otherwise; files go below the run directory."""
    wandb = _load("wandb")
    run = wandb.init(
        project=PROJECT,
        name=config.run.name,
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=config.model_dump(mode="json"),
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return lambda step, numbers: run.log({**numbers, "step": step}), run.finish


def _tensorboard(config: Config, folder: Path) -> Tracker:
    """Return a writer of event files below the run directory's tensorboard/; needs no TensorFlow."""
    writer = _load("tensorboard.summary", extra="tensorboard").Writer(str(folder / "tensorboard"))

    def log(step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


_MAKERS = {"trackio": _trackio, "wandb": _wandb, "tensorboard": _tensorboard}


class Feeder:
    """One tracker and the thread that makes and feeds it."""

    def __init__(self, name: str, make: Callable[[], Tracker], warn: Callable[[str], None]) -> None:
        self.name = name
        self.failed = False
        """Whether the tracker raised; it gets no further lines."""
        self._make = make
        self._warn = warn
        self._lines: queue.Queue[tuple[int, Numbers] | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: Numbers) -> None:
        """Queue a line without blocking. A tracker that lags behind by the whole queue loses lines."""
        if not self.failed and numbers:
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait((step, numbers))

    def close(self, timeout_s: float) -> None:
        """Give the tracker at most `timeout_s` seconds to log its queued lines."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            self._warn(f"tracker {self.name} lags {QUEUE_LINES} lines behind; its last lines are lost")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"tracker {self.name} did not finish within {timeout_s:g} s; its last lines may be lost")

    def _run(self) -> None:
        try:
            log, close = self._make()
            while (line := self._lines.get()) is not None:
                log(*line)
            close()
        except Exception as error:
            self.failed = True
            self._warn(f"tracker {self.name} is switched off; training continues: {type(error).__name__}: {error}")


def start_trackers(config: Config, folder: Path, warn: Callable[[str], None]) -> list[Feeder]:
    """Start a feeder for each of monitor.trackers. Reports failures once through `warn`."""
    return [
        Feeder(name, lambda name=name: _MAKERS[name](config, folder), warn)
        for name in dict.fromkeys(config.monitor.trackers)
    ]


def numbers_of(line: Line) -> Numbers:
    """Return the numeric fields of a metrics line. The trainer's keep their names; others get their role's prefix.

    Lines of a node have none: figures of many nodes under one name would be one curve.
    """
    if "node" in line:
        return {}
    role = str(line.get("role", ""))
    prefix = "" if role.startswith("trainer") else f"{role}/"
    return {
        prefix + name: value
        for name in line
        if name not in ("step", "time") and (value := numeric_field(line, name)) is not None
    }


def _load(module: str, extra: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module} cannot be imported ({error}): run {install_command(extra or module)}, or remove "
            f"{extra or module!r} from monitor.trackers"
        ) from None


def numeric_field(line: Line, name: str) -> float | None:
    """Return a numeric field; None when it is missing or not a number."""
    value = line.get(name)
    return float(value) if is_number(value) else None


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
