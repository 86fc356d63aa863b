"""Trackers besides metrics.jsonl: trackio, wandb, tensorboard. Fed by the launcher, never by a role.

    launcher --put--> queue --feeder thread--> tracker        a full queue drops lines; a tracker that raises is off

A tracker runs in a thread of its own, so one that blocks or fails stops neither training nor the launcher.
"""

from __future__ import annotations

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
    """trackio: a local-first tracker; everything stays on this machine's disk."""

    def __init__(self, config: Config, folder: Path) -> None:
        trackio = _load("trackio")
        self._run = trackio.init(project=config.monitor.project, name=config.run.name, config=_flat(config))

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker:
    """wandb, offline unless monitor.wandb_mode says online; files go below the run directory."""

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
        del config
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
        """Set once the tracker raised; it gets no further line."""
        self._make, self._warn = make, warn
        self._lines: queue.Queue[tuple[int, Numbers] | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: Numbers) -> None:
        """Hand a line over; never blocks (a tracker that lags behind by the whole queue loses lines)."""
        if not self.failed and numbers:
            try:
                self._lines.put_nowait((step, numbers))
            except queue.Full:
                return

    def close(self, timeout_s: float) -> None:
        """Let the tracker finish what it holds, at most `timeout_s` seconds."""
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
    """A feeder for each of monitor.trackers. What fails is reported once through `warn`."""
    return [
        Feeder(name, lambda name=name: _MAKERS[name](config, folder), warn)
        for name in dict.fromkeys(config.monitor.trackers)
    ]


def numbers_of(line: Mapping[str, Any]) -> Numbers:
    """The numeric fields of a metrics line. The trainer's keep their names; other roles' are put below the role."""
    role = str(line.get("role", ""))
    prefix = "" if role.startswith("trainer") else f"{role}/"
    return {
        prefix + name: float(value)
        for name, value in line.items()
        if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _load(module: str, extra: str | None = None) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module} cannot be imported ({error}): run `uv sync --extra {extra or module}`, or remove "
            f"{extra or module!r} from monitor.trackers"
        ) from None


def _flat(config: Config) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        else:
            flat[prefix] = value if isinstance(value, str | int | float | bool) or value is None else str(value)

    walk("", config.model_dump(mode="json"))
    return flat
