"""The JSON about rollouts: a filtered list, one with its siblings, its tokens, and what training fixed or broke.

Also the pairs, a page of them at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import Scores
from composer_prime.run.run_dir import RunDir
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
_PAIRS_PER_PAGE = 25
_EMBEDDED_PAIRS = Path(__file__).parent.parent / "assets" / "tiny" / "pairs.jsonl"
_MAX_PAIR_BYTES = 4_000_000
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
