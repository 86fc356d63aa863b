"""Read this project's own rollouts/*.jsonl (orchestrator/rollouts/rollout_log.py): one rollout a line.

A rollout's messages form a tree by `parent`. Each branch is read once, and a turn that two share gives one state.
Evaluations are skipped: pairs from held-out tasks would train on them. The model is the run's, from config.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.conversation import TraceBuilder, arguments_of
from composer_prime.traces.ingest.trace_file import Call, FileStart, TraceFile, at, objects, parse_json, string
from composer_prime.traces.records import TraceState

NAME, VERSION = "rollouts", 1


def matches(sample: FileStart) -> bool:
    return any(isinstance(record["turns"], list) for record in sample.objects("rollout_id", "task_id", "turns"))


def read(file: TraceFile) -> Iterator[TraceState]:
    model = _model(file)
    for record in file.records():
        yield from _rollout(file, record, model)
        del record


def _rollout(file: TraceFile, record: Any, model: str | None) -> Iterator[TraceState]:
    reason = _unusable(record)
    if reason is not None:
        file.tally.skip(reason)
        return
    file.tally.taken += 1
    turns = record["turns"]
    for number, branch in enumerate(_branches(turns)):
        name = f"{record['rollout_id']}" + (f"/{number}" if number else "")
        builder = TraceBuilder(file, name, model)
        builder.list_tools(record.get("tools"), always=True)
        for position, index in enumerate(branch):
            _take(builder, position, turns[index])
            yield from file.drain()
        builder.close()
        yield from file.drain()


def _take(builder: TraceBuilder, position: int, turn: dict[str, Any]) -> None:
    text = string(turn.get("text")) or ""
    if turn["role"] == "assistant":
        builder.assistant(text, _calls(position, turn), string(turn.get("reasoning")) or "")
    elif turn["role"] == "tool":
        error = string(turn.get("error"))
        if not builder.tool_result(None, text, error=error):
            # A tool's reply to a call that was no JSON, for example.
            builder.context("user", text, error=error)
    else:
        builder.context("system" if turn["role"] == "system" else "user", text)


def _calls(position: int, turn: dict[str, Any]) -> list[Call]:
    """Return a turn's calls, with ids made from the position."""
    return [
        Call(call_id=f"call_{position}_{index}", name=str(call["name"]), arguments=arguments_of(call["arguments"]))
        for index, call in enumerate(objects(turn.get("tool_calls")))
        if {"name", "arguments"} <= call.keys()
    ]


def _branches(turns: list[dict[str, Any]]) -> list[list[int]]:
    """Return the indices to each leaf, or all turns without valid parents."""
    parents = [turn.get("parent") for turn in turns]
    sound = all(
        parent is None or (isinstance(parent, int) and 0 <= parent < index) for index, parent in enumerate(parents)
    )
    if not sound or all(parent is None for parent in parents):
        return [list(range(len(turns)))]
    inner = {parent for parent in parents if parent is not None}
    branches = []
    for leaf in (index for index in range(len(turns)) if index not in inner):
        branch: list[int] = []
        index: int | None = leaf
        while index is not None:
            branch.append(index)
            index = parents[index]
        branches.append(branch[::-1])
    return branches


def _unusable(record: Any) -> str | None:
    if not isinstance(record, dict):
        return "not an object"
    turns = record.get("turns")
    if not isinstance(turns, list) or not isinstance(record.get("rollout_id"), str):
        return "no rollout"
    if not turns:
        return "rollout without turns"
    if record.get("status") == "evaluated" or (record.get("status") == "failed" and record.get("group", 0) is None):
        return "evaluation on held-out tasks"
    if record.get("early"):
        return "failed rollout that is in its step's file too"
    if any(not isinstance(turn, dict) or not isinstance(turn.get("role"), str) for turn in turns):
        return "a turn without a role"
    return None


def _model(file: TraceFile) -> str | None:
    config = file.path.resolve().parent.parent / "config.json"
    value = parse_json(config.read_bytes()) if config.is_file() else None
    return string(at(value, "model", "path"))
