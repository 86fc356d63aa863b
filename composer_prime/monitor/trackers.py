"""Trackers besides metrics.jsonl: trackio, wandb, tensorboard. Fed by the launcher, never by a role.

    launcher --put--> queue --feeder thread--> tracker

A full queue drops lines; a tracker that raises is switched off. Each tracker has its own thread, so one that blocks or
fails stops neither training nor the launcher.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from composer_prime.config import Config
from composer_prime.errors import ConfigError

Numbers = dict[str, float]
QUEUE_LINES = 10_000


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


class TrackioTracker:
    """trackio: a local-first tracker; all data stay on this machine's disk."""

    def __init__(self, config: Config, folder: Path) -> None:
        trackio = _load("trackio")
        self._run = trackio.init(
            project=config.monitor.project, name=config.run.name, config=_flat(config.model_dump(mode="json"))
        )

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker:
    """wandb, offline unless monitor.wandb_mode is online; files go below the run directory."""

    def __init__(self, config: Config, folder: Path) -> None:
        wandb = _load("wandb")
        self._run = wandb.init(
            project=config.monitor.project,
            name=config.run.name,
            dir=str(folder),
            mode=config.monitor.wandb_mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class TensorboardTracker:
    """Event files below the run directory's tensorboard/; needs no TensorFlow."""

    def __init__(self, config: Config, folder: Path) -> None:
        summary = _load("tensorboard.summary", extra="tensorboard")
        self._writer = summary.Writer(str(folder / "tensorboard"))

    def log(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


_MAKERS: dict[str, Callable[[Config, Path], Tracker]] = {
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
    "tensorboard": TensorboardTracker,
}


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
            tracker = self._make()
            while (line := self._lines.get()) is not None:
                tracker.log(*line)
            tracker.close()
        except Exception as error:
            self.failed = True
            self._warn(f"tracker {self.name} is switched off, training goes on: {type(error).__name__}: {error}")


def start_trackers(config: Config, folder: Path, warn: Callable[[str], None]) -> list[Feeder]:
    """Start a feeder for each of monitor.trackers. Reports failures once through `warn`."""
    return [
        Feeder(name, lambda name=name: _MAKERS[name](config, folder), warn)
        for name in dict.fromkeys(config.monitor.trackers)
    ]


def numbers_of(line: Mapping[str, Any]) -> Numbers:
    """Return the numeric fields of a metrics line. The trainer's keep their names; others get their role's prefix."""
    role = str(line.get("role", ""))
    prefix = "" if role.startswith("trainer") else f"{role}/"
    return {
        prefix + name: float(value)
        for name, value in line.items()
        if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _load(module: str, extra: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module} cannot be imported ({error}): run `uv sync --extra {extra or module}`, or remove "
            f"{extra or module!r} from monitor.trackers"
        ) from None


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; lists become text."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str | int | float | bool) or value is None else str(value)
    return flat
