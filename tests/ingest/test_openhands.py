"""OpenHands: what the model saw of a result, which model acted, and whose an event is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ingest_traces import OPENHANDS_V0, OPENHANDS_V1, lines, roles, taken, text

METADATA = {
    "exit_code": 2,
    "working_dir": "/repo",
    "py_interpreter_path": "/bin/python",
    "prefix": "",
    "suffix": "\n[x]",
}
SHOWN = "ls: x\n[x]\n[Current working directory: /repo]\n[Python interpreter: /bin/python]\n"
SHOWN += "[Command finished with exit code 2]"


def _called(number: int, **observation: Any) -> list[dict[str, Any]]:
    action = {**OPENHANDS_V1[2], "id": f"a{number}", "tool_call_id": f"c{number}", "llm_response_id": f"r{number}"}
    action["tool_call"] = {"id": f"c{number}", "name": "terminal", "arguments": "{}"}
    result = {"kind": "ObservationEvent", "id": f"o{number}", "source": "environment", "tool_call_id": f"c{number}"}
    return [action, {**result, "observation": observation}]


def _output(*events: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A line of the benchmark's output."""
    return {"instance_id": "i", "history": list(events), "metadata": {"llm": {"model": "litellm_proxy/gpt-5"}}, **more}


# The benchmark of version 1 names the model in metadata.llm.
def test_output_of_version_1_names_its_model(tmp_path: Path) -> None:
    states, _ = taken(lines(tmp_path / "output.jsonl", _output(*OPENHANDS_V1)))
    assert {state.source_family for state in states} == {"gpt"}


# A result reads as the sdk shows it to the model, and a failure is one wherever it is written.
@pytest.mark.parametrize(
    ("observation", "shown", "failed"),
    [
        ({"content": [text("ls: x")], "metadata": METADATA}, SHOWN, True),
        ({"output": "ls: x", "error": False, "metadata": METADATA}, SHOWN, True),
        ({"output": "", "error": "no such file: a.py"}, "no such file: a.py", True),
        ({"content": [text("no match")], "is_error": True}, "[An error occurred during execution.]\nno match", True),
        ({"content": [text("runs")], "metadata": {"exit_code": -1}}, "runs", False),
        ({"content": [text("fine")]}, "fine", False),
    ],
)
def test_results_of_version_1(tmp_path: Path, observation: dict[str, Any], shown: str, failed: bool) -> None:
    events = [*OPENHANDS_V1[:2], *_called(1, **observation), OPENHANDS_V1[6]]
    first, second = taken(lines(tmp_path / "output.jsonl", _output(*events)))[0]
    assert second.messages[-1]["content"] == shown
    assert first.error == (shown if failed else None)


# So does a command's result of version 0.
def test_commands_of_version_0(tmp_path: Path) -> None:
    result = {**OPENHANDS_V0[4], "content": "ls: x", "extras": {"metadata": METADATA}}
    states, _ = taken(lines(tmp_path / "e.jsonl", *OPENHANDS_V0[:4], result, OPENHANDS_V0[5]))
    assert states[1].messages[-1]["content"] == states[0].error == SHOWN


# Exports without the source of events give the same states as those with it.
@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("form", ["events", "output"])
def test_events_without_source(tmp_path: Path, version: str, form: str) -> None:
    said = [{"id": 6, "source": "agent", "action": "message", "args": {"content": "Shall I go on?"}}]
    said += [{"id": 7, "source": "user", "action": "message", "args": {"content": "Yes."}}]
    older = [*OPENHANDS_V0[:5], *said, {**OPENHANDS_V0[5], "id": 8}]
    events = older if version == "v0" else OPENHANDS_V1
    bare = [{key: value for key, value in event.items() if key != "source"} for event in events]
    states = []
    for name, written in (("a.jsonl", events), ("b.jsonl", bare)):
        records = [_output(*written, instruction="Another.")] if form == "output" else written
        read, tally = taken(lines(tmp_path / name, *records))
        assert "action of the environment" not in tally.skipped
        states.append([(roles(state), state.student_action, state.messages) for state in read])
    assert len(states[0]) == (3 if version == "v0" else 2) and states[0] == states[1]
