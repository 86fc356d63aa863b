"""Find the run directories below some folders, and say how each of them stands."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import RunDir

_MAX_DEPTH = 4
"""Levels that are searched: outputs/evals/NAME and outputs/JOINT/PEER are at two."""
_OF_ONE_RUN = ("run.name", "run.output_dir", "run.resume", "run.overwrite", "run.import_from", "monitor.")
"""Settings that say nothing about what a run does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run directory and its name on the page."""

    run_id: str
    """Path below the folder that was given: `a2`, `two-clusters/a`."""
    run_dir: RunDir
    joint: str | None
    """The folder that it shares with the other clusters of a joint run."""


def find_runs(folders: list[Path]) -> dict[str, FoundRun]:
    """Return every run directory at or below `folders`, by id. Raises ConfigError."""
    runs: dict[str, FoundRun] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}: name the folder that holds the runs, such as outputs")
        top = folder.resolve().name
        for root in _run_directories(folder, 0):
            run_id = next(each for each in _names(folder, root) if each not in runs)
            is_cluster = bool(read_settings(RunDir(root)).get("diloco"))
            joint = run_id.rpartition("/")[0] or top if is_cluster else None
            runs[run_id] = FoundRun(run_id=run_id, run_dir=RunDir(root), joint=joint)
    return runs


def _names(folder: Path, root: Path) -> Iterator[str]:
    """Yield names for a run, the shortest first."""
    top = folder.resolve().name
    name = top if root == folder else root.relative_to(folder).as_posix()
    yield from (name, f"{top}/{name}")
    yield from (f"{top}/{name}-{number}" for number in count(2))


def _run_directories(folder: Path, depth: int) -> Iterator[Path]:
    try:
        marks = [(folder / name).is_file() for name in ("config.json", "run_id", "metrics.jsonl")]
        if marks[0] and any(marks[1:]):
            yield folder
            return
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if depth < _MAX_DEPTH else []
    except OSError as error:
        if depth == 0:
            raise ConfigError(f"the folder {folder} cannot be read: {error.strerror}; name one that can") from None
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=depth == 0) and not entry.name.startswith("."):
            yield from _run_directories(Path(entry.path), depth + 1)


def read_settings(run_dir: RunDir) -> dict[str, Any]:
    """Return config.json, or {}."""
    try:
        settings = json.loads(run_dir.config.read_bytes())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def max_steps(settings: dict[str, Any]) -> int:
    """Return run.max_steps, or 0."""
    table = settings.get("run")
    steps = table.get("max_steps") if isinstance(table, dict) else None
    return steps if isinstance(steps, int) else 0


def run_state(run_dir: RunDir, step: int, settings: dict[str, Any], ended: str | None) -> str:
    """Return running, finished, evaluated, failed, interrupted, stopped or new.

    `step`: the last optimizer step. `ended`: the launcher's note, if any.
    """
    if _launcher_lives(run_dir):
        return "running"
    if ended in ("failed", "interrupted"):
        return ended
    steps = max_steps(settings)
    if steps and (step >= steps or ended == "finished"):  # a joint run may end by its outer steps
        return "finished"
    if steps == 0 and any(run_dir.root.glob("rollouts/eval_*.jsonl")):
        return "evaluated"
    return "stopped" if run_dir.metrics.is_file() else "new"


def _launcher_lives(run_dir: RunDir) -> bool:
    """Return whether the process that holds the run's lock lives, without touching it."""
    lock = run_dir.root / ".launcher.lock"
    try:
        holder = psutil.Process(int(lock.read_text()))
        return holder.create_time() <= lock.stat().st_mtime + 1.0
    except (OSError, ValueError, OverflowError, psutil.Error):
        return False


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return settings by dotted name. Lists of tables are numbered."""
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        items = ((str(index), part) for index, part in enumerate(value))
    else:
        return {name: value}
    flat: dict[str, Any] = {}
    for key, part in items:
        flat.update(flatten(part, f"{name}.{key}" if name else str(key)))
    return flat


def distinguishing(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each run the settings in which it differs from most. `settings`: flat, by run id."""
    names = {name for flat in settings.values() for name in flat if not name.startswith(_OF_ONE_RUN)}
    differs: dict[str, dict[str, Any]] = {run_id: {} for run_id in settings}
    for name in sorted(names):
        texts = {run_id: json.dumps(flat.get(name), default=str) for run_id, flat in settings.items()}
        usual = Counter(texts.values()).most_common(1)[0][0]
        for run_id, text in texts.items():
            if text != usual:
                differs[run_id][name] = settings[run_id].get(name)
    return differs
