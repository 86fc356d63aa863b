"""The other formats, on synthetic traces, and which tools a trace is offered."""

import json
from pathlib import Path
from typing import Any

import pytest
from ingest_traces import MESSAGES, OPENHANDS, ROLLOUT, TOOLS, lines, roles, taken, text, use

from composer_prime.traces.records import TraceState


# Two calls of one answer are one turn; the tools are those that the format lists.
def test_openhands_events(tmp_path: Path) -> None:
    states, tally = taken(lines(tmp_path / "e.jsonl", *OPENHANDS))
    assert (tally.format, tally.taken, tally.seen) == ("openhands/1", 7, 7)
    assert [roles(state) for state in states] == [["system", "user"], ["system", "user", "assistant", "tool", "tool"]]
    assert states[0].error == "pwd: not allowed" and states[0].tools == TOOLS
    assert states[0].student_action["reasoning_content"] == "hm"


# The sdk lists its tools by the class of their arguments, MCP tools with a schema; what is missing, calls tell.
def test_openhands_tools_of_the_sdk(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}
    own = {"kind": "TerminalTool", "title": "terminal", "description": "Run it.", "action_type": "TerminalAction"}
    served = {"kind": "MCPToolDefinition", "title": "Search issues", "description": "Find it."}
    served |= {"action_type": "MCPToolAction", "mcp_tool": {"name": "search", "inputSchema": schema}}
    prompt = {**OPENHANDS[0], "tools": [own, served], "dynamic_context": text("You are in /repo.")}
    states, _ = taken(lines(tmp_path / "e.jsonl", prompt, *OPENHANDS[1:]))
    assert [tool["function"] for tool in states[0].tools] == [
        {
            "name": "terminal",
            "description": "Run it.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
        {"name": "search", "description": "Find it.", "parameters": schema},
    ]
    assert states[0].messages[0] == {"role": "system", "content": "Be brief.\nYou are in /repo."}


# A condensation takes the forgotten events out of the context, and no result is left without its call.
def test_openhands_condensation(tmp_path: Path) -> None:
    condensed = {"kind": "Condensation", "id": "e7", "source": "environment"}
    condensed |= {"forgotten_event_ids": ["e2", "e3", "e4", "e5"], "summary": "Listed."}
    last = {**OPENHANDS[6], "id": "e8", "llm_message": {"role": "assistant", "content": "Again."}}
    once_more = {**condensed, "id": "e9", "forgotten_event_ids": ["e7-summary", "e6"], "summary": "All listed."}
    end = {**OPENHANDS[6], "id": "e10"}
    states, _ = taken(lines(tmp_path / "e.jsonl", *OPENHANDS, condensed, last, once_more, end))
    said = [[message["content"] for message in state.messages] for state in states[2:]]
    assert said[0] == ["Be brief.", "What is in a.py?", "Listed.", "Done."]
    assert said[1] == ["Be brief.", "What is in a.py?", "All listed.", "Again."]


# A conversation folder is one trace, and its state names the model.
def test_openhands_folder(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "base_state.json").write_text(json.dumps({"id": "c1", "agent": {"llm": {"model": "gpt-5-mini"}}}))
    for number, event in enumerate(OPENHANDS):
        (tmp_path / "events" / f"event-{number:05d}-x.json").write_text(json.dumps(event))
    states, _ = taken(tmp_path)
    assert [(state.trace_id, state.source_family) for state in states] == [("c1", "gpt")] * 2


def _statistics(model: str) -> dict:
    value = {"usage_to_metrics": {"default": {"model_name": model}}}
    return dict(kind="ConversationStateUpdateEvent", id=model, source="environment", key="stats", value=value)


# Statistics that name another model while a turn is open may mean that turn: it is nobody's.
def test_openhands_statistics_name_the_model(tmp_path: Path) -> None:
    turns = [{**OPENHANDS[6], "id": f"t{number}"} for number in range(3)]
    first, other = _statistics("gpt-5"), _statistics("claude-sonnet-4")
    path = lines(tmp_path / "e.jsonl", *OPENHANDS[:2], first, turns[0], turns[1], other, turns[2])
    states, _ = taken(path, model="qwen3-8b")
    assert [state.source_family for state in states] == ["gpt", "unknown", "claude"]


# Demonstrations and messages of other agents are no part of what the agent saw.
def test_swe_agent_history(tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "Solve it.", "agent": "main", "message_type": "system_prompt"},
        {"role": "user", "content": "a demonstration", "agent": "main", "is_demo": True},
        {"role": "user", "content": "The issue.", "agent": "main"},
        {"role": "assistant", "content": "I submit.\n```\nsubmit\n```", "agent": "main", "action": "submit"},
        {"role": "assistant", "content": "as a reviewer", "agent": "reviewer"},
        {"role": "user", "content": "done", "agent": "main"},
    ]
    model = json.dumps({"agent": {"model": {"name": "gpt-4o"}}})
    path = lines(tmp_path / "t.traj", {"history": said, "trajectory": [], "replay_config": model, "instance_id": "i"})
    states, tally = taken(path)
    assert tally.skipped == {"demonstration": 1, "another agent's message": 1}
    assert [(state.trace_id, state.source_family, roles(state)) for state in states] == [
        ("i", "gpt", ["system", "user"])
    ]


# Steps alone hold no prompt: a state of them would show a teacher less than the agent saw.
def test_swe_agent_steps_alone(tmp_path: Path) -> None:
    steps = [{"thought": f"{n}", "action": f"cat {n}", "observation": "text"} for n in range(3)]
    states, tally = taken(lines(tmp_path / "t.traj", {"trajectory": steps}))
    assert not states and tally.skipped == {"not a known trace format": 1}


# mini-swe-agent tells of a failed command in the next message.
def test_mini_swe_agent(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "The issue."},
        {"role": "assistant", "content": "```bash\nfalse\n```"},
        {"role": "user", "content": "<returncode>1</returncode>\n<output></output>"},
        {"role": "assistant", "content": "```bash\ntrue\n```"},
        {"role": "user", "content": "<returncode>0</returncode>\n<output></output>"},
    ]
    document = {"messages": said, "info": {"config": {"model": {"model_name": "claude-x"}}}}
    known = lines(tmp_path / "a.traj.json", {**document, "trajectory_format": "mini-swe-agent-1"})
    states, tally = taken(known)
    assert tally.format == "messages/1" and [bool(state.error) for state in states] == [True, False]
    assert states[0].source_family == "claude"


# SWE-smith writes a conversation as JSON text; a line that holds no conversation is skipped whole.
def test_messages_only(tmp_path: Path) -> None:
    smith = {"messages": json.dumps(MESSAGES), "traj_id": "t1", "model": "claude-3-7-sonnet", "tools": TOOLS}
    broken = {"messages": [{"role": "user", "content": "x"}, {"role": "narrator", "content": "y"}]}
    states, tally = taken(lines(tmp_path / "m.jsonl", smith, {"messages": MESSAGES[:3]}, broken))
    assert [state.trace_id for state in states] == ["t1", "t1"]
    assert tally.skipped == {"a message has an unknown role": 1}
    assert tally.passed_over == {"copy of an earlier state": 1}
    assert states[0].student_action["reasoning_content"] == "open it"
    assert states[0].student_action["content"] is None


def _listing(call: dict, result: dict) -> dict:
    """A trace whose first turn makes a call and gets its result."""
    said = [{"role": "user", "content": "List."}, {"role": "assistant", **call}, result]
    return {"messages": [*said, {"role": "assistant", "content": "a.py"}]}


USED = {"content": [{"type": "thinking", "thinking": "hm"}, text("I look."), use("t1", "bash", command="ls")]}
OLDER = {"content": "I look.", "function_call": {"name": "bash", "arguments": '{"command": "ls"}'}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "exit code: 2", "is_error": True}


# A call is one, whether OpenAI's older form or Anthropic's blocks write it, and what comes back is its result.
@pytest.mark.parametrize(
    ("call", "result"),
    [
        (USED, {"role": "user", "content": [RESULT]}),
        (USED, {"role": "user", "content": [{"type": "tool_result", "content": [text("exit code: 2")]}]}),
        (OLDER, {"role": "function", "name": "bash", "content": "exit code: 2"}),
    ],
)
def test_calls_in_other_forms(tmp_path: Path, call: dict, result: dict) -> None:
    states, _ = taken(lines(tmp_path / "m.jsonl", _listing(call, result)))
    assert states[0].student_action["content"] == "I look." and states[0].error == "exit code: 2"
    assert states[0].student_action["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert states[0].student_action.get("reasoning_content") == ("hm" if call is USED else None)
    assert roles(states[1]) == ["user", "assistant", "tool"] and states[1].messages[-1]["content"] == "exit code: 2"


# What the user says beside results follows them; a result that nobody asked for was seen all the same.
def test_results_beside_text(tmp_path: Path) -> None:
    beside = [RESULT, {**RESULT, "tool_use_id": "t9", "content": "of another"}, text("Go on.")]
    states, _ = taken(lines(tmp_path / "m.jsonl", _listing(USED, {"role": "user", "content": beside})))
    assert roles(states[1]) == ["user", "assistant", "tool", "user"]
    assert states[1].messages[-1]["content"] == "of another\nGo on."


# An action or a result that cannot be read would leave a hole: the record is skipped, with the reason.
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"content": None, "tool_calls": [{"type": "custom", "custom": {"name": "x"}}]}, "call without a name"),
        ({"content": [{"type": "tool-call", "toolName": "x"}]}, "unknown form"),
        ({"content": [{"type": "server_tool_use", "name": "x"}]}, "unknown form"),
    ],
)
def test_calls_that_cannot_be_read(tmp_path: Path, call: dict, reason: str) -> None:
    states, tally = taken(lines(tmp_path / "m.jsonl", _listing(call, {"role": "tool", "content": ""})))
    assert not states and tally.taken == 0 and reason in next(iter(tally.skipped))


# ShareGPT names the speaker and what was said in its own words.
def test_sharegpt(tmp_path: Path) -> None:
    said = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
    called = [*said[:2], {"from": "function_call", "value": "{}"}]
    states, tally = taken(lines(tmp_path / "s.jsonl", {"conversations": said, "id": "g"}, {"conversations": called}))
    assert tally.format == "messages/1" and tally.skipped == {"a message has an unknown role": 1}
    assert [(state.trace_id, roles(state), state.student_action["content"]) for state in states] == [
        ("g", ["system", "user"], "Yo")
    ]


# This project's own rollouts: the error of a call is its turn's, the model is the run's.
def test_own_rollouts(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": "tiny"}}))
    states, tally = taken(lines(tmp_path / "rollouts" / "step_000003.jsonl", ROLLOUT))
    assert tally.format == "rollouts/1" and len(states) == 2
    assert states[0].error == "Tool not found: sum" and states[0].tools == TOOLS
    assert states[0].source_family == "tiny-policy"


# Held-out tasks stay held out: an evaluation gives no states, with the reason.
def test_own_evaluations(tmp_path: Path) -> None:
    states, tally = taken(lines(tmp_path / "eval_000000.jsonl", {**ROLLOUT, "status": "evaluated"}, ROLLOUT))
    assert len(states) == 2 and tally.skipped == {"evaluation on held-out tasks": 1}


# A tool's word on a call that was none stays in what the agent saw next.
def test_own_rollouts_with_a_broken_call(tmp_path: Path) -> None:
    turns = [{**turn, "tool_calls": []} for turn in ROLLOUT["turns"]]
    turns[1]["text"] = "<tool_call>{sum"
    states, _ = taken(lines(tmp_path / "r.jsonl", {**ROLLOUT, "turns": turns}))
    assert [roles(state) for state in states] == [["user"], ["user", "assistant", "user"]]
    assert states[0].error == "Tool not found: sum"


# Two branches share their first turn: it is one state.
def test_own_rollouts_with_branches(tmp_path: Path) -> None:
    again = {"role": "assistant", "text": "4", "parent": 2, "tool_calls": []}
    states, tally = taken(lines(tmp_path / "r.jsonl", {**ROLLOUT, "turns": [*ROLLOUT["turns"], again]}))
    assert [state.student_action["content"] for state in states] == [None, "3", "4"]
    assert tally.passed_over == {"copy of an earlier state": 1}


# Some traces write a message's words under `text`.
def test_text_instead_of_content(tmp_path: Path) -> None:
    said = [{"role": "user", "text": "Hi."}, {"role": "assistant", "content": None, "text": "Hello."}]
    (state,), tally = taken(lines(tmp_path / "m.jsonl", {"messages": said}))
    assert state.messages == [{"role": "user", "content": "Hi."}] and state.student_action["content"] == "Hello."
    assert not tally.passed_over


# What the user says of a trace holds where the trace is silent; the family, whatever it says.
def test_model_and_family_from_the_user(tmp_path: Path) -> None:
    path = lines(tmp_path / "m.jsonl", {"messages": MESSAGES}, {"messages": MESSAGES[1:], "model": "gpt-4o"})
    assert [state.source_model for state in taken(path, model="qwen3-8b")[0]] == ["qwen3-8b"] * 2 + ["gpt-4o"] * 2
    assert {state.source_family for state in taken(path, family="mine")[0]} == {"mine"}


METADATA = dict(exit_code=2, working_dir="/repo", py_interpreter_path="/bin/python", prefix="", suffix="\n[x]")
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


def trace(text: str, *tools: str) -> dict[str, Any]:
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in enumerate(tools)
    ]
    asked = {"role": "user", "content": f"Do {text or tools}."}
    return {"messages": [asked, {"role": "assistant", "content": text, "tool_calls": calls}]}


def rollout(number: int, text: str, *tools: str) -> dict[str, Any]:
    calls = [{"name": name, "arguments": "{}"} for name in tools]
    asked = {"role": "user", "text": f"Do {number}.", "parent": None}
    said = {"role": "assistant", "text": text, "parent": 0, "tool_calls": calls}
    return {"rollout_id": f"r{number}", "task_id": "t", "turns": [asked, said]}


def offered(state: TraceState) -> list[str]:
    return [tool["function"]["name"] for tool in state.tools]


# All tools that a file calls are offered to each of its traces.
def test_traces_of_one_agent(tmp_path: Path) -> None:
    states, _ = taken(lines(tmp_path / "m.jsonl", trace("", "edit"), trace("", "bash"), trace("I am done.")))
    assert [offered(state) for state in states] == [["bash", "edit"]] * 3


# A rollout of an agent without tools says so, whatever other rollouts of the file call.
def test_rollouts_without_tools(tmp_path: Path) -> None:
    acting = {**rollout(1, "```bash\nls\n```"), "tools": []}
    states, _ = taken(lines(tmp_path / "r.jsonl", rollout(0, "", "bash"), acting))
    assert [offered(state) for state in states] == [["bash"], []]
