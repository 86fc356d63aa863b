"""Trackers besides metrics.jsonl: trackio, wandb, tensorboard. Fed by the launcher, never by a role.

    launcher --put--> queue --feeder thread--> tracker

A full queue drops lines; a tracker that raises is switched off. Each has its own thread: one that blocks stops nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_prime.config import Config
from composer_prime.console import install_command
from composer_prime.errors import ConfigError
from composer_prime.monitor.metrics_file import Line, numeric_field

Numbers = dict[str, float]
Tracker = tuple[Callable[[int, Numbers], object], Callable[[], object]]
"""How to log the figures of a step, and how to end."""
PROJECT = os.environ.get("WANDB_PROJECT", "composer-prime")
QUEUE_LINES = 10_000


def _trackio(config: Config, folder: Path) -> Tracker:
    run = _load("trackio").init(project=PROJECT, name=config.run.name, config=config.model_dump(mode="json"))
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _wandb(config: Config, folder: Path) -> Tracker:
    """Offline unless WANDB_MODE says otherwise; files go below the run directory."""
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
    """Event files go below the run directory's tensorboard/; needs no TensorFlow."""
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
    """Return the numeric fields of a line; other roles' than the trainer's get a prefix.

    Lines of a node have none: figures of many nodes would be one curve.
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
