"""Read rollouts/*.jsonl: what happened in each rollout, and the scores of evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import RunDir

Rollout = dict[str, Any]
Scores = dict[str, list[float]]
"""Rewards by `source/task id`."""


def rollout_files(run_dir: RunDir, kind: str) -> dict[int, Path]:
    """Return the files of `kind` ("step" or "eval") by ascending step."""
    paths = run_dir.root.glob(f"rollouts/{kind}_*.jsonl")
    files = {int(step): path for path in paths if (step := path.stem.removeprefix(f"{kind}_")).isdigit()}
    return dict(sorted(files.items()))


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Yield every whole rollout of a file."""
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            try:
                rollout = json.loads(raw)
            except ValueError:
                continue
            if isinstance(rollout, dict):
                yield rollout


def failure_text(rollout: Rollout) -> str | None:
    """Return why the rollout has no reward, if so."""
    failure = rollout.get("failure") or rollout.get("error")
    if isinstance(failure, dict):
        where = failure.get("where")
        return str(failure.get("message") or failure.get("kind") or failure) + (f" ({where})" if where else "")
    return str(failure) if failure else None


def rollout_text(rollout: Rollout) -> str:
    """Return a rollout in one line: task, reward, question, calls and reply, each cut short."""
    reward = rollout.get("reward")
    result = f"reward {reward:g}" if isinstance(reward, int | float) else f"failed: {failure_text(rollout)}"
    turns = rollout.get("turns") or []
    calls = [f"{call.get('name')}({call.get('arguments')})" for turn in turns for call in turn.get("tool_calls") or []]
    asked, reply = question_and_reply(rollout)
    parts = [asked, *calls[:_CALLS_SHOWN], *(["..."] if len(calls) > _CALLS_SHOWN else []), reply]
    return f"{rollout.get('task_id')}, {result}: {' -> '.join(_cut(part) for part in parts if part)}"


def question_and_reply(rollout: Rollout) -> tuple[str, str]:
    """Return the user's first message and the policy's last text, or ""."""
    turns = rollout.get("turns") or []
    asked = next((str(turn.get("text")) for turn in turns if turn.get("role") == "user"), "")
    replies = [str(turn.get("text")) for turn in turns if turn.get("role") == "assistant" and turn.get("text")]
    return asked, replies[-1] if replies else ""


def task_text(entry: Mapping[str, Any]) -> str:
    """Return `question -> reply (expected ANSWER)` of an entry of RolloutIndex."""
    expected = f" (expected {_cut(entry['expected'])})" if entry["expected"] else ""
    return " -> ".join(_cut(entry[name]) for name in ("question", "reply") if entry[name]) + expected


_CALLS_SHOWN, _PART_CHARS = 3, 80


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _PART_CHARS else line[: _PART_CHARS - 3] + "..."


def scores(path: Path) -> Scores:
    """Return rewards by task, without failed rollouts and probes."""
    by_task: Scores = {}
    for rollout in read_rollouts(path):
        reward = rollout.get("reward")
        if isinstance(reward, int | float):
            by_task.setdefault(f"{rollout.get('source')}/{rollout.get('task_id')}", []).append(float(reward))
    return by_task


def eval_scores(run_dir: RunDir) -> dict[int, Scores]:
    """Return each evaluation's scores by step, on the sources that are trained on."""
    evaluations = {step: scores(path) for step, path in rollout_files(run_dir, "eval").items()}
    return without_sources(evaluations, only_evaluated(run_dir))


def only_evaluated(run_dir: RunDir) -> list[str]:
    """Return the sources of weight 0."""
    try:
        sources = json.loads(run_dir.config.read_bytes())["orchestrator"]["source"]
        return [source["name"] for source in sources if source.get("weight") == 0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def without_sources(evaluations: Mapping[int, Scores], names: list[str]) -> dict[int, Scores]:
    prefixes = tuple(f"{name}/" for name in names)
    return {
        step: {task: rewards for task, rewards in by_task.items() if not task.startswith(prefixes)}
        for step, by_task in evaluations.items()
    }


def open_run(folder: str) -> RunDir:
    """Return the run directory `folder`. Raises ConfigError."""
    run_dir = RunDir(Path(folder))
    if not (run_dir.root / "config.json").is_file():
        inside = sorted(run_dir.root.glob("*/config.json"))  # A joint run's folder holds one for each peer.
        nearby = [path.parent for path in inside or sorted(Path("outputs").glob("*/config.json"))][:6]
        hint = f"; there is {', '.join(map(str, nearby))}" if nearby else ""
        raise ConfigError(f"{folder} is not a run directory (it has no config.json){hint}")
    return run_dir
