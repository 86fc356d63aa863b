"""All runs below the given folders, with what has been read of each: the state behind the page."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_prime.errors import ConfigError
from composer_prime.monitor.metrics_file import Line, ended, numeric_field, read_history
from composer_prime.monitor.progress import TREND_STEPS, RunProgress, averaged
from composer_prime.monitor.rollouts import Scores
from composer_prime.view.catalog import (
    FoundRun,
    distinguishing,
    find_runs,
    flatten,
    max_steps,
    read_settings,
    run_state,
)
from composer_prime.view.rollout_index import RolloutIndex
from composer_prime.view.rollout_payload import (
    Query,
    evaluation_difference,
    one_rollout,
    read_evaluations,
    rollout_list,
    spell_tokens,
    with_tasks,
)
from composer_prime.view.run_payload import run_payload

_SEARCH_EVERY_S = 2.0
_SPARK_POINTS = 48


class Workspace:
    """Answers the page's questions, from any thread."""

    def __init__(self, folders: list[Path]) -> None:
        """Search the folders. Raises ConfigError."""
        self._folders = folders
        self._lock = threading.RLock()
        self._runs = find_runs(folders)
        self._searched_at = time.monotonic()
        self._figures: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}
        """By run id, with inode, size and time of its file."""
        self._indexes: dict[str, RolloutIndex] = {}

    def runs(self) -> dict[str, FoundRun]:
        """Return the runs by id, searched again now and then."""
        with self._lock:
            if time.monotonic() - self._searched_at > _SEARCH_EVERY_S:
                self._runs = find_runs(self._folders)
                self._searched_at = time.monotonic()
            return self._runs

    def run_list(self) -> dict[str, Any]:
        with self._lock:
            found = self.runs()
            settings = {run_id: read_settings(run.run_dir) for run_id, run in found.items()}
            differences = distinguishing({run_id: flatten(each) for run_id, each in settings.items()})
            rows = [self._list_row(run, settings[run_id], differences[run_id]) for run_id, run in found.items()]
        rows.sort(key=lambda row: (row["state"] != "running", -(row["updated"] or 0), row["id"]))
        return {"folders": [str(folder) for folder in self._folders], "runs": rows}

    def _list_row(self, run: FoundRun, settings: dict[str, Any], differs: dict[str, Any]) -> dict[str, Any]:
        """Return the row of a run; a changed metrics.jsonl is read again."""
        try:
            stat = run.run_dir.metrics.stat()
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except OSError:
            stamp = (0, 0, 0)
        known = self._figures.get(run.run_id)
        if known is None or known[0] != stamp:
            self._figures[run.run_id] = known = (stamp, list_figures(read_history(run.run_dir.metrics)))
        figures = known[1]
        return {
            "id": run.run_id,
            "joint": run.joint,
            "state": run_state(run.run_dir, figures["step"], settings, figures["ended"]),
            "max_steps": max_steps(settings),
            "differs": differs,
            **{name: figures[name] for name in ("step", "reward", "spark", "held_out", "updated")},
        }

    def run(self, query: Query) -> dict[str, Any]:
        """Return the page of one run. Raises ConfigError."""
        found = self.find(query)
        return run_payload(found, self._evaluations(found))

    def rollouts(self, query: Query) -> dict[str, Any]:
        return rollout_list(self._index(self.find(query)), query)

    def rollout(self, query: Query) -> dict[str, Any]:
        """Return one rollout with its siblings. Raises ConfigError."""
        found = self.find(query)
        page = one_rollout(self._index(found), query)
        if page is None:
            raise ConfigError(f"{found.run_id} has no rollout {query.get('id', '')!r} of this kind and step")
        spell_tokens(page["rollout"], str(flatten(read_settings(found.run_dir)).get("model.path")))
        return page

    def evaluation(self, query: Query) -> dict[str, Any]:
        """Return what training fixed and broke."""
        found = self.find(query)
        texts = [query.get(name, "") for name in ("before", "after")]
        before, after = (int(text) if text.isdecimal() else None for text in texts)
        difference = evaluation_difference(self._evaluations(found), before, after)
        return with_tasks(difference, self._index(found))

    def _evaluations(self, found: FoundRun) -> dict[int, Scores]:
        return read_evaluations(self._index(found))

    def find(self, query: Query) -> FoundRun:
        """Return the found run that the query names. Raises ConfigError."""
        run_id = query.get("run", "")
        found = self.runs().get(run_id)
        if found is None:
            raise ConfigError(f"there is no run {run_id!r} below {', '.join(map(str, self._folders))}")
        return found

    def _index(self, found: FoundRun) -> RolloutIndex:
        with self._lock:
            if found.run_id not in self._indexes:
                self._indexes[found.run_id] = RolloutIndex(found.run_dir)
            return self._indexes[found.run_id]


def list_figures(lines: list[Line]) -> dict[str, Any]:
    progress = RunProgress()
    progress.update(lines)
    rewards = progress.rewards()
    held_out = [point for step in sorted(progress.evals) if (point := _held_out(step, progress.evals[step]))]
    return {
        "step": progress.last_step or 0,
        "reward": fmean(rewards[-TREND_STEPS:]) if rewards else None,
        "spark": [round(mean, 4) for mean in averaged(rewards, _SPARK_POINTS)],
        "held_out": [held_out[0], held_out[-1]] if len(held_out) > 1 else held_out,
        "updated": numeric_field(lines[-1], "time") if lines else None,
        "ended": ended(lines),
    }


def _held_out(step: int, figures: dict[str, float]) -> dict[str, Any] | None:
    """Return the mean over sources of one evaluation, and an only source's interval."""
    names = [name for name in figures if name.endswith("/reward_mean")]
    if not names:
        return None
    bounds = {way: figures.get(f"{names[0]}_{way}") if len(names) == 1 else None for way in ("low", "high")}
    return {"step": step, "mean": fmean(figures[name] for name in names), **bounds}
