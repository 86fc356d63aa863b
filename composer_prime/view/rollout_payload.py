"""The JSON about rollouts: a filtered list, one with its siblings, its tokens, and what training fixed or broke.

Also the pairs, a page of them at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import Scores
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import difference_interval, mean_interval
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
_MAX_ROWS = 500
_MAX_SIBLINGS = 16
_HIDDEN = ("file", "offset", "length")
_PAIRS_PER_PAGE = 25
_EMBEDDED_PAIRS = Path(__file__).parent.parent / "assets" / "tiny" / "pairs.jsonl"
_MAX_PAIR_BYTES = 4_000_000
Query = Mapping[str, str]


def rollout_list(index: RolloutIndex, query: Query) -> dict[str, Any]:
    """Return the entries that pass the query's filters. Raises ConfigError for a value that is not a number."""
    kind = query.get("kind", "step")
    everything = index.entries(kind)
    rows = _sorted([row for row in everything if _passes(row, query)], query.get("sort", ""))
    offset = max(0, _integer(query, "offset") or 0)
    limit = max(1, min(_integer(query, "limit") or 100, _MAX_ROWS))
    return {
        "rows": [public(row) for row in rows[offset : offset + limit]],
        "total": len(rows),
        "facets": {
            name: sorted({row[column] for row in everything if row[column] is not None})
            for name, column in _FACETS.items()
        },
    }


def _sorted(rows: list[Entry], order: str) -> list[Entry]:
    """Return rows that came by step, newest first, in an order of the page. Rows without the figure come last."""
    rows.sort(key=lambda row: (row["grp"] or 0, row["task_id"] or "", row["rollout_id"] or ""))
    rows.sort(key=lambda row: row["step"] or 0, reverse=order != "step")
    column = {"reward": "reward", "-reward": "reward", "tokens": "tokens", "errors": "tool_errors"}.get(order)
    if column is None:
        return rows
    sign = 1 if order == "reward" else -1
    return sorted(rows, key=lambda row: (row[column] is None, sign * (row[column] or 0)))


def _passes(row: Entry, query: Query) -> bool:
    """Return whether a row passes every filter. Text that is searched for is text, without patterns."""
    for name, column in {"step": "step", "group": "grp"}.items():
        if (number := _integer(query, name)) is not None and row[column] != number:
            return False
    least, most = _figure(query, "min"), _figure(query, "max")
    if (least is not None or most is not None) and row["reward"] is None:
        return False
    if (least is not None and row["reward"] < least) or (most is not None and row["reward"] > most):
        return False
    if any(query.get(name) and row[name] != query[name] for name in ("source", "status", "verdict")):
        return False
    if not (_holds(row, ("task_id",), query.get("task")) and _holds(row, ("node",), query.get("node"))):
        return False
    fault = _FAULTS.get(query.get("error", ""))
    return _holds(row, ("task_id", "rollout_id", "error"), query.get("q")) and (fault is None or fault(row))


def _holds(row: Entry, columns: tuple[str, ...], text: str | None) -> bool:
    return not text or any(text.lower() in (row[column] or "").lower() for column in columns)


def one_rollout(index: RolloutIndex, query: Query) -> dict[str, Any] | None:
    """Return a rollout with all its siblings, whole; None if it does not exist."""
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


def read_evaluations(index: RolloutIndex) -> dict[int, Scores]:
    """Return rewards by task of every evaluation, by step. Failed rollouts have none."""
    found: dict[int, Scores] = {}
    for row in reversed([row for row in index.entries("eval") if row["reward"] is not None]):
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


# -- tokens with their figures, where the run recorded them (monitor.tokens) --------------------------------------


def rollout_tokens(run_dir: RunDir, entry: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recorded samples of a rollout: token texts with log-probabilities and advantages; empty without."""
    if entry["kind"] != "step" or not isinstance(entry["step"], int):
        return []
    step = entry["step"]
    samples = _lines(run_dir.rollout_tokens(step), "rollout_id", str(entry["rollout_id"]))
    trained = sorted(run_dir.rollouts(step).parent.glob(run_dir.trained_tokens(step, "*").name))
    model = settings.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    for sample in samples:
        sample["texts"] = _texts(str(path), sample.pop("token_ids"))
        for figures in (found for file in trained for found in _lines(file, "sample_id", str(sample["sample_id"]))):
            sample |= _of_tokens(figures, sample["mask"])
    return samples


def _of_tokens(figures: dict[str, Any], mask: list[int]) -> dict[str, list[float]]:
    """Return the trainer's figures by token, 0 for tokens without one; no divergence without a hinted turn."""
    mismatch = iter(figures["mismatch"])
    found = {"mismatch": [next(mismatch, 0.0) if trained else 0.0 for trained in mask]}
    if figures["divergence"]:
        found["divergence"] = [0.0] * len(mask)
    for start, values in figures["divergence"]:
        found["divergence"][start : start + len(values)] = values
    return found


def _lines(path: Path, key: str, name: str) -> list[dict[str, Any]]:
    """Return the lines that begin with this key and name; the others are not decoded."""
    start = b'{"' + key.encode() + b'":' + msgspec.json.encode(name) + b","
    try:
        with path.open("rb") as file:
            return [msgspec.json.decode(raw) for raw in file if raw.startswith(start)]
    except (OSError, msgspec.DecodeError):
        return []


def _texts(model: str, ids: list[int]) -> list[str]:
    """Return each token's text; `#id` where the model's tokenizer cannot be read."""
    tokenizer = _tokenizer(model)
    return [f"#{token}" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False) for token in ids]


@lru_cache(maxsize=8)
def _tokenizer(model: str) -> Any:
    from tokenizers import Tokenizer

    from composer_prime.model_source import present_model

    folder = present_model(model)
    if folder is None:
        return None
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # tokenizers raises no other class for a file that it cannot read
        return None


# -- the preference pairs of a run ------------------------------------------------------------------------------


def pair_list(run_dir: RunDir, settings: dict[str, Any], offset: int) -> dict[str, Any]:
    """Return a page of pairs from the `offset`-th on, and how many there are. A file that is not there has none."""
    path = _pairs_file(run_dir, settings)
    pairs: list[dict[str, Any]] = []
    total = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                if not raw.strip():
                    continue
                if offset <= total < offset + _PAIRS_PER_PAGE and len(raw) <= _MAX_PAIR_BYTES and (pair := _pair(raw)):
                    pairs.append(pair)
                total += 1
    except OSError:
        return {"pairs": [], "total": 0, "offset": 0, "file": None}
    return {"pairs": pairs, "total": total, "offset": offset, "file": path.name, "page": _PAIRS_PER_PAGE}


def _pairs_file(run_dir: RunDir, settings: dict[str, Any]) -> Path:
    """Return the run's own pairs.jsonl, or the one that ships with the tiny model where the run trained on that."""
    own = run_dir.root / "pairs.jsonl"
    if own.is_file():
        return own
    table = settings.get("orchestrator")
    preferences = table.get("preferences") if isinstance(table, dict) else None
    named = preferences.get("pairs") if isinstance(preferences, dict) else None
    return _EMBEDDED_PAIRS if named == "tiny" else own


def _pair(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    state = line.get("state")
    messages = state.get("messages") if isinstance(state, dict) else []
    return {
        "trace": line.get("trace"),
        "messages": messages[-4:] if isinstance(messages, list) else [],
        "earlier": max(0, len(messages) - 4) if isinstance(messages, list) else 0,
        **{name: line.get(name) for name in ("chosen", "rejected", "epsilon", "teachers", "cost_usd", "density")},
    }
