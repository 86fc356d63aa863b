"""The file of states: what it takes, what it refuses, and what it names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from ingest_traces import MESSAGES, lines, taken

from composer_prime.errors import ConfigError
from composer_prime.traces.ingest.ingest_command import main
from composer_prime.traces.states import TraceState, read_states, state_lines, state_names, write_state


def made(tmp_path: Path) -> tuple[Path, list[TraceState]]:
    """A file of states of two traces, and the states."""
    path = lines(tmp_path / "m.jsonl", {"messages": MESSAGES, "id": "a"}, {"messages": MESSAGES[1:], "id": "b"})
    assert main([str(path), "-o", str(tmp_path / "s.zst")]) == 0
    return tmp_path / "s.zst", taken(path)[0]


# Every state comes back, from the compressed file and from plain lines, and its name without its context.
def test_states_come_back(tmp_path: Path) -> None:
    path, states = made(tmp_path)
    assert list(read_states(path)) == states and len(states) == 4
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(b"".join(state_lines(path)))
    assert list(read_states(plain)) == states
    assert [name.state_id for name in state_names(path) if name] == [state.state_id for state in states]


# The same trace in two files is read once, and other states of its name get a name of their own.
def test_several_files(tmp_path: Path) -> None:
    one = lines(tmp_path / "a.jsonl", {"messages": MESSAGES, "id": "a"})
    other = lines(tmp_path / "b.jsonl", {"messages": MESSAGES, "id": "a"}, {"messages": MESSAGES[1:], "id": "a"})
    assert main([str(one), str(other), "-o", str(tmp_path / "s.zst")]) == 0
    assert [state.trace_id for state in read_states(tmp_path / "s.zst")] == ["a", "a", "a~3", "a~3"]


# What is damaged, ends in the middle, is of an earlier release or is no state is an error that names file and line.
def test_what_is_refused(tmp_path: Path) -> None:
    path, (state, *_) = made(tmp_path)
    raw, other = path.read_bytes(), tmp_path / "other"
    newer = write_state(msgspec.structs.replace(state, schema_version=9))
    for content, named in (
        (raw[: len(raw) // 2], "other"),
        (raw[:50] + b"\0\0\0\0" + raw[54:], "other"),
        (b'{"trace":"a"}\n', "composer ingest"),
        (newer, "other:1"),
        (write_state(state) + b'{"trace_id": 1}\n', "other:2"),
        (write_state(msgspec.structs.replace(state, messages=[{"content": "x"}])), "other:1"),
    ):
        other.write_bytes(content)
        with pytest.raises(ConfigError, match=named):
            list(read_states(other))
    other.write_bytes(write_state(state) + b'{"trace_id": 1}\n')
    bad: list[ConfigError] = []
    assert list(read_states(other, bad.append)) == [state] and len(bad) == 1
