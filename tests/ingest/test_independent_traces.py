"""Files whose lines are traces of different agents: which tools each is offered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ingest_traces import OPENHANDS, lines, taken

from composer_prime.traces.replay.actions import actions_in_text, may_act
from composer_prime.traces.states import TraceState

FUNCTION = "<function=bash><parameter=command>ls</parameter></function>"


def trace(text: str, *tools: str) -> dict[str, Any]:
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in enumerate(tools)
    ]
    asked = {"role": "user", "content": f"Do {text or tools}."}
    return {"messages": [asked, {"role": "assistant", "content": text, "tool_calls": calls}]}


def history(number: int, tool: str) -> dict[str, Any]:
    """A line of output.jsonl."""
    arguments = json.dumps({"number": number})
    call = {**OPENHANDS[2], "tool_name": tool, "tool_call": {"id": "c1", "name": tool, "arguments": arguments}}
    end = {"kind": "ActionEvent", "id": "e9", "source": "agent", "tool_name": "finish", "tool_call_id": "c9"}
    return {"instance_id": f"i{number}", "history": [OPENHANDS[1], call, end]}


def rollout(number: int, text: str, *tools: str) -> dict[str, Any]:
    calls = [{"name": name, "arguments": "{}"} for name in tools]
    asked = {"role": "user", "text": f"Do {number}.", "parent": None}
    said = {"role": "assistant", "text": text, "parent": 0, "tool_calls": calls}
    return {"rollout_id": f"r{number}", "task_id": "t", "turns": [asked, said]}


def offered(state: TraceState) -> list[str]:
    return [tool["function"]["name"] for tool in state.tools]


# More tools than one agent may have are those of several: each trace is offered its own, and none is lost.
@pytest.mark.parametrize("kind", ["messages", "rollouts", "output"])
def test_traces_of_many_agents(tmp_path: Path, kind: str) -> None:
    records = {
        "messages": [trace("", f"tool_{number}", "finish") for number in range(200)],
        "rollouts": [rollout(number, "", f"tool_{number}", "finish") for number in range(200)],
        "output": [history(number, f"tool_{number}") for number in range(200)],
    }[kind]
    states, _ = taken(lines(tmp_path / "m.jsonl", *records))
    found = {state.trace_id: offered(state) for state in states}
    assert list(found.values()) == [["finish", f"tool_{number}"] for number in range(200)]


# Up to that number they are taken for one agent's: each trace is offered what all call.
def test_traces_of_one_agent(tmp_path: Path) -> None:
    states, _ = taken(lines(tmp_path / "m.jsonl", trace("", "edit"), trace("", "bash"), trace("I am done.")))
    assert [offered(state) for state in states] == [["bash", "edit"]] * 3


# An agent that acts in its text has no tools, whatever other traces of the file call; one that calls tools and shows a
# command in a text has them.
@pytest.mark.parametrize("text", ["```bash\nls\n```", "```\nls\n```", FUNCTION])
def test_traces_that_act_in_their_text(tmp_path: Path, text: str) -> None:
    both = trace("", "edit")
    both["messages"] += [{"role": "user", "content": "How?"}, {"role": "assistant", "content": text}]
    states, _ = taken(lines(tmp_path / "m.jsonl", trace("", "bash"), trace(text), both))
    assert [offered(state) for state in states] == [["bash", "edit"], [], ["bash", "edit"], ["bash", "edit"]]
    states, _ = taken(lines(tmp_path / "r.jsonl", rollout(0, "", "bash"), rollout(1, text)))
    assert [offered(state) for state in states] == [["bash"], []]


# What is looked at in a text takes linear time, and finds what `written` would.
def test_texts_that_may_act() -> None:
    for text in ("```bash\nls\n```", "I look.\n```\nls\n```\n", FUNCTION, "```python\nx\n```\n```\nls\n```"):
        assert may_act(text) and actions_in_text(text)
    for text in ("Done.", "```python\nx = 1\n```", "```json\n{}\n``` is what I read", "```"):
        assert not may_act(text) and not actions_in_text(text)
    for unit in ("```\n", "```bash", "\n", "<function", "``"):
        may_act("```bash" + unit * 1_000_000)
