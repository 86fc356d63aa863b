"""The JSON about rollouts: a filtered list, one with its siblings, its tokens, and what training fixed or broke."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import Scores
from composer_prime.stats.intervals import PASSED, difference_interval, mean_interval
from composer_prime.view.rollout_index import Entry, RolloutIndex

_FACETS = {"steps": "step", "sources": "source", "statuses": "status", "verdicts": "verdict", "nodes": "node"}
_FAULTS: dict[str, Callable[[Entry], bool]] = {
    "failed": lambda row: row["error"] is not None,
    "tool": lambda row: row["tool_errors"] > 0,
    "any": lambda row: row["error"] is not None or row["tool_errors"] > 0,
    "none": lambda row: row["error"] is None and not row["tool_errors"],
    "hinted": lambda row: row["hints"] > 0,
    "truncated": lambda row: row["truncated"],
}
_SEARCHED = {"task": ("task_id",), "node": ("node",), "q": ("task_id", "rollout_id", "error", "question")}
"""By filter: columns with its text."""
_MAX_ROWS = 500
_MAX_SIBLINGS = 16
_HIDDEN = ("file", "offset", "length")
Query = Mapping[str, str]


def rollout_list(index: RolloutIndex, query: Query) -> dict[str, Any]:
    """Return the entries that pass the query's filters. Raises ConfigError."""
    kind = query.get("kind", "step")
    everything = index.entries(kind)
    rows = _sorted([row for row in everything if passes(row, query)], query.get("sort", ""))
    offset = max(0, _integer(query, "offset") or 0)
    limit = max(1, min(_integer(query, "limit") or 100, _MAX_ROWS))
    return {
        "rows": [public(row) for row in rows[offset : offset + limit]],
        "total": len(rows),
        "facets": {name: _values(everything, column) for name, column in _FACETS.items()},
    }


def _values(rows: list[Entry], column: str) -> list[Any]:
    return sorted({row[column] for row in rows if row[column] is not None})


def _sorted(rows: list[Entry], order: str) -> list[Entry]:
    """Return rows, given by step, in an order of the page; those without its figure come last."""
    rows.sort(key=lambda row: (row["grp"] or 0, row["task_id"] or "", row["rollout_id"] or ""))
    rows.sort(key=lambda row: row["step"] or 0, reverse=order != "step")
    column = {"reward": "reward", "-reward": "reward", "tokens": "tokens", "errors": "tool_errors"}.get(order)
    if column is None:
        return rows
    sign = 1 if order == "reward" else -1
    return sorted(rows, key=lambda row: (row[column] is None, sign * (row[column] or 0)))


def passes(row: Entry, query: Query) -> bool:
    """Return whether a row passes every filter."""
    wanted = {"step": _integer(query, "step"), "grp": _integer(query, "group")}
    wanted |= {name: query.get(name) or None for name in ("source", "status", "verdict")}
    if any(value is not None and row[name] != value for name, value in wanted.items()):
        return False
    least, most = _figure(query, "min"), _figure(query, "max")
    if not (least is most is None or _is_between(row["reward"], least, most)):
        return False
    if not all(_holds(row, columns, query.get(name, "")) for name, columns in _SEARCHED.items()):
        return False
    fault = _FAULTS.get(query.get("error", ""))
    return fault is None or fault(row)


def _is_between(value: float | None, least: float | None, most: float | None) -> bool:
    return value is not None and (least is None or value >= least) and (most is None or value <= most)


def _holds(row: Entry, columns: tuple[str, ...], text: str) -> bool:
    return any(text.lower() in (row[column] or "").lower() for column in columns)


def one_rollout(index: RolloutIndex, query: Query) -> dict[str, Any] | None:
    """Return a rollout with its siblings, if it exists."""
    kind, name = query.get("kind", "step"), query.get("id", "")
    rows = index.entries(kind, _integer(query, "step"))
    entry = next((row for row in rows if row["rollout_id"] == name), None)
    if entry is None or (rollout := index.read(entry)) is None:
        return None
    keys = ("step", "grp") if entry["grp"] is not None else ("step", "grp", "source", "task_id")
    siblings = [row for row in rows if all(row[key] == entry[key] for key in keys)]
    siblings = sorted(siblings, key=lambda row: row["rollout_id"] or "")[:_MAX_SIBLINGS]
    wholes = [(row, rollout if row is entry else index.read(row)) for row in siblings]
    return {
        "entry": public(entry),
        "rollout": rollout,
        "siblings": [{"entry": public(row), "rollout": whole} for row, whole in wholes if whole],
    }


def spell_tokens(rollout: dict[str, Any], model: str) -> None:
    """Replace the ids of sampled tokens by their text, where `model` is present."""
    turns = [turn for turn in rollout.get("turns") or [] if isinstance(turn, dict)]
    found = [turn["tokens"] for turn in turns if turn.get("tokens")]
    if not found:
        return
    from tokenizers import Tokenizer

    from composer_prime.model_source import present_model

    file = (present_model(model) or Path(model)) / "tokenizer.json"
    if not file.is_file():
        return
    tokenizer = Tokenizer.from_file(str(file))
    for tokens in found:
        with suppress(TypeError, ValueError, OverflowError):  # another program's line stays
            tokens[:] = [[tokenizer.decode([each], skip_special_tokens=False), logprob] for each, logprob in tokens]


def read_evaluations(index: RolloutIndex) -> dict[int, Scores]:
    """Return rewards by task of every evaluation, by step."""
    found: dict[int, Scores] = {}
    for row in reversed([row for row in index.entries("eval") if row["reward"] is not None]):
        task = f"{row['source']}/{row['task_id']}"
        found.setdefault(row["step"], {}).setdefault(task, []).append(row["reward"])
    return found


def evaluation_difference(evaluations: dict[int, Scores], before: int | None, after: int | None) -> dict[str, Any]:
    """Return which held-out tasks training fixed and broke between two evaluations, by default first and last.

    A task is solved when its mean reward is at least PASSED. Raises ConfigError.
    """
    steps = sorted(step for step, scores in evaluations.items() if scores)
    result: dict[str, Any] = {"steps": steps, "threshold": PASSED}
    before, after = _chosen(before, steps, 0), _chosen(after, steps, -1)
    if before is None or after is None:
        return result
    first, second = evaluations[before], evaluations[after]
    shared = [task for task in first if task in second]
    tasks = [{"task": task, "before": fmean(first[task]), "after": fmean(second[task])} for task in sorted(shared)]
    solved = [(row["before"] >= PASSED, row["after"] >= PASSED) for row in tasks]
    groups = {"fixed": (False, True), "broken": (True, False), "solved": (True, True), "unsolved": (False, False)}
    result |= {"before": before, "after": after, "first": mean_interval(first), "second": mean_interval(second)}
    for name, flags in groups.items():
        chosen = [row for row, flag in zip(tasks, solved, strict=True) if flag == flags]
        result[f"{name}_count"] = len(chosen)
        result[name] = sorted(chosen, key=lambda row: row["before"] - row["after"])[:300]
    if shared:
        result["change"] = difference_interval(first, second)
    return result


def with_tasks(difference: dict[str, Any], index: RolloutIndex) -> dict[str, Any]:
    """Add question, expected answer and last reply to fixed and broken tasks."""
    played = {f"{row['source']}/{row['task_id']}": row for row in index.entries("eval", difference.get("after"))}
    for row in [*difference.get("fixed", []), *difference.get("broken", [])]:
        row |= {name: played[row["task"]][name] for name in ("question", "expected", "reply")}
    return difference


def _chosen(step: int | None, steps: list[int], position: int) -> int | None:
    if step is None:
        return steps[position] if steps else None
    if step not in steps:
        present = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"there is no evaluation of step {step}; there are {present}")
    return step


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
