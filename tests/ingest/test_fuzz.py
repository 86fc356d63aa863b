"""Mutated records of every format: no crash, and taken + skipped = seen = what was written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from ingest_traces import MESSAGES, OPENHANDS, ROLLOUT, SESSION, taken, text, use
from mutations import keys_of, mutated
from test_agent_sessions import ATIF, CODEX

from composer_prime.traces.records import TraceState, digest, write_state
from composer_prime.traces.replay.voting import canonical

HISTORY = [{**message, "agent": "main", "message_type": "action"} for message in MESSAGES]
BLOCKS = [
    MESSAGES[1],
    {"role": "assistant", "content": [text("So."), use("t1", "cat", path="a.py")]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [text("x")]}]},
    {"role": "assistant", "content": None, "function_call": {"name": "cat", "arguments": "{}"}},
    {"role": "function", "name": "cat", "content": "y"},
]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
FILE = 1_000
"""Records a file: a trace without end would spend the time on its context."""
LINES = {
    "claude_code": SESSION,
    "openhands": OPENHANDS,
    "openhands_output": [{"instance_id": "i", "history": OPENHANDS}],
    "messages": [
        {"messages": MESSAGES, "model": "gpt-4o", "tools": []},
        {"messages": json.dumps(MESSAGES)},
        {"messages": BLOCKS},
        {"conversations": SHAREGPT},
    ],
    "rollouts": [ROLLOUT],
    "codex": CODEX,
}
DOCUMENTS = {
    "swe_agent": {"history": HISTORY, "trajectory": [{"action": "ls", "observation": "x", "thought": "y"}]},
    "openhands": {"instance_id": "i", "history": OPENHANDS},
    "atif": ATIF,
}


def copy_of(base: list, index: int) -> dict:
    """Record `index` of an endless file: `base` over and over, each time as another session with ids of its own."""
    own = f"-{index // len(base)}"
    record = {**base[index % len(base)]}
    for key in ("uuid", "parentUuid", "sessionId", "rollout_id", "instance_id"):
        if isinstance(record.get(key), str):
            record[key] += own
    return record


def survives(state: TraceState) -> bool:
    """Whether what comes after ingestion can take the state: writing it, its digest, the form of its action."""
    assert msgspec.json.decode(write_state(state))
    return bool(digest([state.messages, state.tools]) and digest(canonical(state.student_action, state.tools)))


def fuzz_lines(tmp_path: Path, name: str, records: int, seed: int) -> None:
    rng, base = random.Random(seed), LINES[name]
    keys = keys_of(base)
    written = [raw for index in range(records) if (raw := mutated(rng, copy_of(base, index), keys)).strip()]
    path = tmp_path / "fuzz.jsonl"
    for start in range(0, len(written), FILE):
        path.write_bytes(b"\n".join(written[start : start + FILE]) + b"\n")
        states, tally = taken(path, format=name.removesuffix("_output"))
        assert all(survives(state) for state in states)
        if not name.endswith("_output"):
            assert tally.seen == len(written[start : start + FILE])


@pytest.mark.parametrize("name", LINES)
def test_mutated_lines(tmp_path: Path, name: str) -> None:
    fuzz_lines(tmp_path, name, 1_500, seed=1)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_mutated_documents(tmp_path: Path, name: str) -> None:
    rng, keys = random.Random(2), keys_of(DOCUMENTS[name])
    for number in range(300):
        path = tmp_path / f"{number}.json"
        path.write_bytes(mutated(rng, DOCUMENTS[name], keys))
        states, tally = taken(path)
        assert tally.seen > 0 or not path.read_bytes().strip() or tally.format is not None
        assert all(state.student_action["role"] == "assistant" and survives(state) for state in states)
