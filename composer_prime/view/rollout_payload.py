"""The JSON about rollouts: a filtered list, one with its siblings, and what training fixed or broke."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import Scores
from composer_prime.stats.intervals import difference_interval, mean_interval
from composer_prime.view.rollout_index import RolloutIndex

KINDS = ("step", "eval", "failed")
_ORDERS = {
    "": "step DESC, grp, task_id, rollout_id",
    "reward": "reward, step DESC",
    "-reward": "reward DESC, step DESC",
    "tokens": "tokens DESC",
    "errors": "tool_errors DESC, step DESC",
    "step": "step, grp, task_id, rollout_id",
}
_MAX_ROWS = 500
_MAX_SIBLINGS = 16
_HIDDEN = ("file", "offset", "length")
Query = Mapping[str, str]


def rollout_list(index: RolloutIndex, query: Query) -> dict[str, Any]:
    """Return the entries that pass the query's filters. Raises ConfigError for a value that is not a number."""
    kind, where, values = _filters(query)
    if (step := _integer(query, "step")) is not None:
        index.ensure(kind, step)
    state = index.update()
    limit = max(1, min(_integer(query, "limit") or 100, _MAX_ROWS))
    order = _ORDERS.get(query.get("sort", ""), _ORDERS[""])
    rows = index.select(where, values, order=order, limit=limit, offset=_integer(query, "offset") or 0)
    return {
        "rows": [public(row) for row in rows],
        "total": index.count(where, values),
        "files": state.files,
        "files_left": state.files_left,
        "facets": {
            name: index.distinct(column, kind)
            for name, column in {
                "steps": "step",
                "sources": "source",
                "statuses": "status",
                "verdicts": "verdict",
                "nodes": "node",
            }.items()
        },
    }


def _filters(query: Query) -> tuple[str, str, list[Any]]:
    """Return kind, SQL and values of a query."""
    kind = query.get("kind", "step")
    clauses, values = ["kind = ?"], [kind]

    def add(clause: str, value: Any) -> None:
        if value not in (None, ""):
            clauses.append(clause)
            values.append(value)

    add("step = ?", _integer(query, "step"))
    add("grp = ?", _integer(query, "group"))
    add("reward >= ?", _figure(query, "min"))
    add("reward <= ?", _figure(query, "max"))
    for name, column in {"source": "source", "status": "status", "verdict": "verdict"}.items():
        add(f"{column} = ?", query.get(name))
    for name, column in {"task": "task_id", "node": "node"}.items():
        if text := query.get(name):
            add(f"{column} LIKE ? ESCAPE '\\'", f"%{_escaped(text)}%")
    if text := query.get("q"):
        clauses.append("(task_id LIKE ? ESCAPE '\\' OR rollout_id LIKE ? ESCAPE '\\' OR error LIKE ? ESCAPE '\\')")
        values += [f"%{_escaped(text)}%"] * 3
    faults = {
        "failed": "error IS NOT NULL",
        "tool": "tool_errors > 0",
        "any": "(error IS NOT NULL OR tool_errors > 0)",
        "none": "error IS NULL AND tool_errors = 0",
        "hinted": "hints > 0",
        "truncated": "truncated = 1",
    }
    if fault := faults.get(query.get("error", "")):
        clauses.append(fault)
    return kind, " AND ".join(clauses), values


def one_rollout(index: RolloutIndex, query: Query) -> dict[str, Any] | None:
    """Return a rollout with all its siblings, whole, and the entries before and after; None if it does not exist."""
    values: list[Any] = [query.get("kind", "step"), query.get("id", "")]
    where = "kind = ? AND rollout_id = ?"
    if (step := _integer(query, "step")) is None:
        index.read_all()
    else:
        index.ensure(values[0], step)
        where, values = f"{where} AND step = ?", [*values, step]
    entries = index.select(where, values, order="step DESC", limit=1)
    if not entries or (rollout := index.read(entries[0])) is None:
        return None
    entry = entries[0]
    siblings = siblings_of(index, entry)
    wholes = [rollout if row["rollout_id"] == entry["rollout_id"] else index.read(row) for row in siblings]
    return {
        "entry": public(entry),
        "rollout": rollout,
        "siblings": [
            {"entry": public(row), "rollout": whole} for row, whole in zip(siblings, wholes, strict=True) if whole
        ],
    }


def siblings_of(index: RolloutIndex, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the same group and step; of an evaluation those of the same task. Holds `entry` itself."""
    if entry["grp"] is not None:
        where, values = "kind = ? AND step = ? AND grp = ?", (entry["kind"], entry["step"], entry["grp"])
    else:
        where = "kind = ? AND step = ? AND grp IS NULL AND source = ? AND task_id = ?"
        values = (entry["kind"], entry["step"], entry["source"], entry["task_id"])
    return index.select(where, values, order="rollout_id", limit=_MAX_SIBLINGS)


def read_evaluations(index: RolloutIndex) -> dict[int, Scores]:
    """Return rewards by task of every evaluation, by step. Failed rollouts have none."""
    found: dict[int, Scores] = {}
    for row in index.select("kind = 'eval' AND reward IS NOT NULL", order="step"):
        found.setdefault(row["step"], {}).setdefault(f"{row['source']}/{row['task_id']}", []).append(row["reward"])
    return found


def evaluation_difference(
    evaluations: dict[int, Scores], before: int | None, after: int | None, threshold: float = 1.0
) -> dict[str, Any]:
    """Return which held-out tasks training fixed and broke between two evaluations, the first and last by default.

    A task is solved when its mean reward is at least `threshold`. Raises ConfigError for a step without evaluation.
    """
    steps = sorted(step for step, scores in evaluations.items() if scores)
    result: dict[str, Any] = {"steps": steps, "threshold": threshold}
    before, after = _chosen(before, steps, 0), _chosen(after, steps, -1)
    if before is None or after is None:
        return result
    first, second = evaluations[before], evaluations[after]
    shared = [task for task in first if task in second]
    tasks = [{"task": task, "before": fmean(first[task]), "after": fmean(second[task])} for task in sorted(shared)]
    solved = [(row["before"] >= threshold, row["after"] >= threshold) for row in tasks]
    groups = {"fixed": (False, True), "broken": (True, False), "solved": (True, True), "unsolved": (False, False)}
    result |= {"before": before, "after": after, "first": _interval(first), "second": _interval(second)}
    for name, flags in groups.items():
        chosen = [row for row, flag in zip(tasks, solved, strict=True) if flag == flags]
        result[f"{name}_count"] = len(chosen)
        result[name] = sorted(chosen, key=lambda row: row["before"] - row["after"])[:300]
    if shared:
        change = difference_interval(first, second)
        result["change"] = {"mean": change.mean, "low": change.low, "high": change.high, "tasks": change.count}
    return result


def _chosen(step: int | None, steps: list[int], position: int) -> int | None:
    if step is None:
        return steps[position] if steps else None
    if step not in steps:
        raise ConfigError(f"there is no evaluation of step {step}; there are {', '.join(map(str, steps)) or 'none'}")
    return step


def _interval(scores: Scores) -> dict[str, Any]:
    mean = mean_interval(scores)
    return {"mean": mean.mean, "low": mean.low, "high": mean.high, "tasks": mean.count}


def public(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry without its place in the files."""
    return {name: value for name, value in entry.items() if name not in _HIDDEN}


def _integer(query: Query, name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not text.removeprefix("-").isdecimal() or len(text) > 15:
        raise ConfigError(f"{name}={text!r} is not a whole number")
    return int(text)


def _figure(query: Query, name: str) -> float | None:
    text = query.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number") from None


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
