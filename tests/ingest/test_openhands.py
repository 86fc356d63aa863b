"""OpenHands: what the model saw of a result, which model acted, and whose an event is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ingest_traces import OPENHANDS, lines, roles, taken, text

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
    action = {**OPENHANDS[2], "id": f"a{number}", "tool_call_id": f"c{number}", "llm_response_id": f"r{number}"}
    action["tool_call"] = {"id": f"c{number}", "name": "terminal", "arguments": "{}"}
    result = {"kind": "ObservationEvent", "id": f"o{number}", "source": "environment", "tool_call_id": f"c{number}"}
    return [action, {**result, "observation": observation}]


def _output(*events: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A line of the benchmark's output."""
    return {"instance_id": "i", "history": list(events), "metadata": {"llm": {"model": "litellm_proxy/gpt-5"}}, **more}


# The benchmark of version 1 names the model in metadata.llm.
def test_output_of_version_1_names_its_model(tmp_path: Path) -> None:
    states, _ = taken(lines(tmp_path / "output.jsonl", _output(*OPENHANDS)))
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
    events = [*OPENHANDS[:2], *_called(1, **observation), OPENHANDS[6]]
    first, second = taken(lines(tmp_path / "output.jsonl", _output(*events)))[0]
    assert second.messages[-1]["content"] == shown
    assert first.error == (shown if failed else None)


# Exports without the source of events give the same states as those with it.
@pytest.mark.parametrize("form", ["events", "output"])
def test_events_without_source(tmp_path: Path, form: str) -> None:
    bare = [{key: value for key, value in event.items() if key != "source"} for event in OPENHANDS]
    states = []
    for name, written in (("a.jsonl", OPENHANDS), ("b.jsonl", bare)):
        records = [_output(*written, instruction="Another.")] if form == "output" else written
        read, _ = taken(lines(tmp_path / name, *records))
        states.append([(roles(state), state.student_action, state.messages) for state in read])
    assert len(states[0]) == 2 and states[0] == states[1]
