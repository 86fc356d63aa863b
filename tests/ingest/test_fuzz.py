"""Mutated records of every format: no crash, and taken + skipped = seen = what was written."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ingest_traces import MESSAGES, OPENHANDS, ROLLOUT, SESSION, taken, text, use
from test_agent_sessions import ATIF, CODEX

from composer_prime.traces.records import TraceState, digest, write_state
from composer_prime.traces.replay.voting import canonical

DEEP = "nested deeply"
WRONG: list[Any] = [None, 0, -1, 1.5, True, "", "x", "\x00", "é" * 30, [], {}, [[]], [None], {"type": "text"}]
WRONG += ["2" * 400, 10**30, "half \ud83d", {"\udc00": ["\ud83d"]}, DEEP]
REPEATED = ["<think>", "</think>", "<think>\n</think>", "password=", "--token ", "cookie: a=", "-----BEGIN ", "eyJ"]
REPEATED += ["```"]
"""What a reader or a pattern may look for, thousands of times."""
DEPTHS = (50, 100, 101, 480, 2_000)

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


def mutated(rng: random.Random, record: Any, keys: list[str]) -> bytes:
    """One line, without its end: `record` changed in its structure, its text or its bytes, or not at all."""
    value = copy.deepcopy(record)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        value = _changed(rng, value, keys)
    depth = rng.choice(DEPTHS)
    raw = json.dumps(value).replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode()
    if rng.random() < 0.15 and raw:
        start = rng.randrange(len(raw))
        raw = rng.choice(
            [
                raw[:start],
                raw[:start] + bytes([rng.randrange(256)]) + raw[start + 1 :],
                raw[start:],
                raw[:start] + raw,
                raw[:start] + b'"' + raw[start:],
            ]
        )
    return raw.replace(b"\n", b" ")


def _changed(rng: random.Random, value: Any, keys: list[str]) -> Any:
    """`value` with one place changed, wherever in it."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        move = rng.randrange(5)
        if move == 0:
            del value[key]
        elif move == 1:
            value[rng.choice(keys)] = value[key]
        else:
            value[key] = _changed(rng, value[key], keys)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        if rng.random() < 0.3:
            value.insert(index, copy.deepcopy(rng.choice(value)))
        else:
            value[index] = _changed(rng, value[index], keys)
        return value
    return rng.choice(REPEATED) * 2_000 if rng.random() < 0.02 else copy.deepcopy(rng.choice(WRONG))


def keys_of(value: Any) -> list[str]:
    """Every key of a JSON value."""
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in keys_of(item))]
    return [key for item in value for key in keys_of(item)] if isinstance(value, list) else []


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
