"""Sessions of Codex CLI, and trajectories in ATIF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ingest_traces import SESSIONS, lines, roles, taken

from composer_prime.traces.records import TraceState


def codex(kind: str, **payload: Any) -> dict[str, Any]:
    """A line of a rollout of Codex CLI."""
    return {"timestamp": "2026-01-02T03:04:05.678Z", "type": kind, "payload": payload}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return codex("response_item", type=kind, **fields)


def said(role: str, words: str) -> dict[str, Any]:
    block = {"type": "output_text" if role == "assistant" else "input_text", "text": words}
    return item("message", role=role, content=[block])


CODEX = [
    codex("session_meta", id="0197-a", cwd="/home/me/x", cli_version="0.6", base_instructions={"text": "Be Codex."}),
    said("developer", "Sandbox: workspace-write."),
    said("user", "<environment_context>\n  <cwd>/x</cwd>\n</environment_context>"),
    codex("event_msg", type="task_started", turn_id="1"),
    codex("turn_context", turn_id="1", cwd="/x", model="gpt-5-codex", approval_policy="never", summary="auto"),
    said("user", "Fix the test."),
    codex("event_msg", type="user_message", message="Fix the test.", images=[]),
    item("reasoning", summary=[{"type": "summary_text", "text": "Look first."}], encrypted_content="gAAA"),
    said("assistant", "I look."),
    item("function_call", name="shell", arguments='{"command": ["ls"]}', call_id="call_1"),
    item("custom_tool_call", name="apply_patch", input="*** Begin Patch\n*** End Patch", call_id="call_2"),
    codex("event_msg", type="token_count", info=None),
    item("function_call_output", call_id="call_1", output="Exit code: 0\nWall time: 0.1 seconds\nOutput:\na.py"),
    item("custom_tool_call_output", call_id="call_2", output="Exit code: 1\nWall time: 0 seconds\nOutput:\nno hunk"),
    item("local_shell_call", call_id="call_3", status="completed", action={"type": "exec", "command": ["pytest"]}),
    item("function_call_output", call_id="call_3", output='{"output":"1 failed","metadata":{"exit_code":1}}'),
    item("web_search_call", id="ws_1", status="completed", action={"type": "search", "query": "pytest"}),
    item("ghost_snapshot", ghost_commit={}),
    said("assistant", "Done."),
]

ATIF = SESSIONS["atif"]


def calls(state: TraceState) -> list[tuple[str, Any]]:
    listed = state.student_action.get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in listed]


def document(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=1))
    return path


# Items between two outputs are one turn. Every kind of call keeps its name, arguments and result. A failure is one.
def test_codex(tmp_path: Path) -> None:
    states, tally = taken(lines(tmp_path / "rollout.jsonl", *CODEX))
    assert tally.format == "codex/1" and tally.seen == len(CODEX)
    assert tally.skipped == {
        "event task_started": 1,
        "event user_message": 1,
        "event token_count": 1,
        "item ghost_snapshot": 1,
    }
    assert [calls(state) for state in states] == [
        [("shell", {"command": ["ls"]}), ("apply_patch", {"input": "*** Begin Patch\n*** End Patch"})],
        [("local_shell", {"type": "exec", "command": ["pytest"]})],
        [("web_search", {"type": "search", "query": "pytest"})],
    ]
    first, second, third = states
    assert roles(first) == ["system", "system", "user", "user"] and first.messages[0]["content"] == "Be Codex."
    assert first.student_action["reasoning_content"] == "Look first." and first.student_action["content"] == "I look."
    assert first.error is not None and second.error is not None and third.error is None
    assert [message["content"] for message in third.messages[-3:]] == [
        "Exit code: 1\nWall time: 0 seconds\nOutput:\nno hunk",
        None,
        '{"output":"1 failed","metadata":{"exit_code":1}}',
    ]
    assert third.student_action["content"] == "Done." and third.source_family == "gpt" and third.trace_id == "0197-a"


# A compaction replaces the context, in either form. What it copies gives no states again.
def test_codex_compaction(tmp_path: Path) -> None:
    history = [said("user", "Fix the test.")["payload"], said("assistant", "Seen.")["payload"]]
    compacted = codex("compacted", message="So far: looked.", replacement_history=history)
    (*_, last), _ = taken(
        lines(tmp_path / "a.jsonl", *CODEX, compacted, said("user", "Go on."), said("assistant", "OK."))
    )
    assert [message["content"] for message in last.messages] == ["Be Codex.", "Fix the test.", "Seen.", "Go on."]
    older = codex("compacted", message="So far: looked.")
    (*_, last), _ = taken(lines(tmp_path / "b.jsonl", *CODEX, older, said("assistant", "OK.")))
    assert roles(last) == ["system", "system", "user", "user", "user"]
    assert last.messages[-1]["content"] == "So far: looked."


# A rollback takes back what the user typed last and all that followed, and those that were taken back do not count.
def test_codex_rollback(tmp_path: Path) -> None:
    def asked(number: int) -> list[dict[str, Any]]:
        return [said("user", f"Ask {number}."), said("assistant", f"Answer {number}.")]

    back = codex("event_msg", type="thread_rolled_back", num_turns=1)
    rollout = [*asked(1), *asked(2), back, *asked(3), back, *asked(4)]
    states, tally = taken(lines(tmp_path / "a.jsonl", *rollout))
    assert [message["content"] for message in states[-1].messages] == ["Ask 1.", "Answer 1.", "Ask 4."]
    assert tally.states == 4 and not tally.skipped


# Calls without an id are told apart, and an image that comes between two outputs parts no call from its output.
def test_codex_calls_without_ids_and_images_between(tmp_path: Path) -> None:
    searches = [item("web_search_call", action={"query": word}) for word in ("a", "b")]
    shown = item("message", role="user", content=[{"type": "input_image", "image_url": "data:"}])
    views = [item("function_call", name="view_image", arguments="{}", call_id=call_id) for call_id in ("v1", "v2")]
    outputs = [item("function_call_output", call_id=call_id, output=f"saw {call_id}") for call_id in ("v1", "v2")]
    rollout = [said("user", "Look."), *searches, *views, outputs[0], shown, outputs[1], said("assistant", "Seen.")]
    (first, second), tally = taken(lines(tmp_path / "a.jsonl", *rollout))
    assert [arguments for name, arguments in calls(first) if name == "web_search"] == [{"query": "a"}, {"query": "b"}]
    assert [message["content"] for message in second.messages[-3:]] == ["saw v1", "saw v2", "[input_image]"]
    assert not tally.skipped


# A call of a kind to come is a call, and never lost.
def test_codex_calls_of_new_kinds(tmp_path: Path) -> None:
    new = item("holo_call", call_id="h1", angle=3)
    output = item("holo_call_output", call_id="h1", output={"content": "dark", "success": False})
    (state,), tally = taken(lines(tmp_path / "a.jsonl", CODEX[5], new, output))
    assert calls(state) == [("holo", {"angle": 3})] and state.error == "dark"
    assert not tally.skipped


# A text and its call are one turn. One result for several calls stands with the last. Errors have Harbor's marks.
def test_atif(tmp_path: Path) -> None:
    states, tally = taken(document(tmp_path / "trajectory.json", ATIF))
    assert (tally.format, tally.taken, tally.seen) == ("atif/1", 6, 6)
    first, second, third = states
    assert first.student_action["content"] == "I look." and calls(first) == [("Bash", {"command": "ls x"})]
    assert first.error and first.messages[1]["content"] == "Count the files.\n[image]"
    assert [message["content"] for message in third.messages[-2:]] == [
        "[its result is shown with the last call]",
        "a.py\n/x",
    ]
    assert second.source_model == "claude-opus-4" and second.error is None and third.student_action["content"] == "One."


# A result without a call's id, or of a call that is not there, is context, and parts no call from its result.
@pytest.mark.parametrize("stray", [{"content": "note"}, {"source_call_id": "gone", "content": "note"}])
def test_atif_results_of_no_call(tmp_path: Path, stray: dict[str, Any]) -> None:
    named = [{"source_call_id": call_id, "content": f"of {call_id}"} for call_id in ("k1", "k2")]
    step = {**ATIF["steps"][4], "observation": {"results": [stray, *named]}}
    states, _ = taken(lines(tmp_path / "a.jsonl", {**ATIF, "steps": [*ATIF["steps"][:2], step, ATIF["steps"][5]]}))
    assert [message["content"] for message in states[1].messages[-3:]] == ["of k1", "of k2", "note"]


# Copied steps and those without a model are context only. A subagent's trajectory is not read.
def test_atif_of_several_trajectories(tmp_path: Path) -> None:
    steps = [{**step, "is_copied_context": True} if step["source"] == "agent" else step for step in ATIF["steps"][:4]]
    ran = {"step_id": 5, "source": "agent", "message": "Set up.", "llm_call_count": 0}
    last = {"step_id": 6, "source": "agent", "message": "Two.", "extra": {"status": "ok"}}
    inner = {**ATIF, "session_id": None, "trajectory_id": "inner"}
    whole = {**ATIF, "steps": [*steps, ran, last], "subagent_trajectories": [inner]}
    states, tally = taken(lines(tmp_path / "a.jsonl", whole, {"steps": []}))
    assert [state.trace_id for state in states] == ["trial-1"]
    assert roles(states[0])[-3:] == ["assistant", "tool", "assistant"] and tally.passed_over.total() == 2
    assert tally.skipped == {"no ATIF trajectory": 1}


# Newer versions run all tools through one `exec`, whose output begins with how its script ended.
@pytest.mark.parametrize(("end", "failed"), [("failed", True), ("terminated", True), ("completed", False)])
def test_codex_scripts(tmp_path: Path, end: str, failed: bool) -> None:
    shown = [{"type": "input_text", "text": f"Script {end}\nWall time 0.1 seconds\nOutput:\n"}]
    call = item("custom_tool_call", name="exec", input="await tools.shell()", call_id="c")
    output = item("custom_tool_call_output", call_id="c", output=[*shown, {"type": "input_text", "text": "x"}])
    first, _ = taken(
        lines(tmp_path / "r.jsonl", CODEX[0], said("user", "Go."), call, output, said("assistant", "Ok."))
    )[0]
    assert (first.error is not None) == failed
    assert first.error is None or first.error.startswith(f"Script {end}")
