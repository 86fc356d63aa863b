"""Sessions of Codex CLI, Claude stream-json, Gemini CLI, Cline, Aider, and the formats ATIF and ADP."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import (
    ADP,
    AIDER,
    ATIF,
    CLAUDE_STREAM,
    CLINE,
    CODEX,
    GEMINI,
    GEMINI_CHECKPOINT,
    GEMINI_DOCUMENT,
    GEMINI_STREAM,
    codex,
    gemini,
    item,
    returned,
    said,
    spoken,
    stream,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_traces import lines, roles, taken, text, use
from mutations import keys_of, mutated

from composer_prime.traces.ingest.formats.claude_stream import NO_PROMPT
from composer_prime.traces.ingest.trace_file import NO_RESULT
from composer_prime.traces.state import TraceState


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


# The first releases wrote the items themselves. A call of a kind to come is a call, and never lost.
def test_codex_bare_items(tmp_path: Path) -> None:
    meta = {"id": "old", "timestamp": "t", "instructions": "x"}
    new = {"type": "holo_call", "call_id": "h1", "angle": 3}
    bare = [meta, *(line["payload"] for line in CODEX[5:6]), {"record_type": "state"}, new]
    bare += [{"type": "holo_call_output", "call_id": "h1", "output": {"content": "dark", "success": False}}]
    (state,), tally = taken(lines(tmp_path / "a.jsonl", *bare))
    assert calls(state) == [("holo", {"angle": 3})] and state.error == "dark" and state.trace_id == "old"
    assert tally.skipped == {"record of the program's state": 1}


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


# Copied steps and those without a model are context only. A subagent's trajectory is a trace of its own.
def test_atif_of_several_trajectories(tmp_path: Path) -> None:
    steps = [{**step, "is_copied_context": True} if step["source"] == "agent" else step for step in ATIF["steps"][:4]]
    ran = {"step_id": 5, "source": "agent", "message": "Set up.", "llm_call_count": 0}
    last = {"step_id": 6, "source": "agent", "message": "Two.", "extra": {"status": "ok"}}
    inner = {**ATIF, "session_id": None, "trajectory_id": "inner"}
    whole = {**ATIF, "steps": [*steps, ran, last], "subagent_trajectories": [inner]}
    states, tally = taken(lines(tmp_path / "a.jsonl", whole, {"steps": []}))
    assert [state.trace_id for state in states] == ["trial-1", "inner", "inner", "inner"]
    assert roles(states[0])[-3:] == ["assistant", "tool", "assistant"] and tally.passed_over.total() == 2
    assert tally.skipped == {"no ATIF trajectory": 1}


# Actions that no observation parts are one turn, and code is a call of the tool that runs it.
def test_adp(tmp_path: Path) -> None:
    for path in (lines(tmp_path / "a.jsonl", ADP), document(tmp_path / "a.json", [ADP])):
        states, tally = taken(path)
        assert (tally.format, tally.taken) == ("adp/1", 7)
        assert [calls(state)[0] for state in states] == [
            ("execute_bash", {"command": "ls x"}),
            ("open", {"path": "a.py"}),
            ("finish", {"message": "One."}),
        ]
        assert states[0].student_action["content"] == "I look.\n\nList x." and states[0].error == "Error: no x"
        assert states[2].messages[-1]["content"] == "http://a\nbutton 'b'"


# The prompt is not printed: the first turn gives no state, and stands in the context of the others behind a stand-in.
def test_claude_stream(tmp_path: Path) -> None:
    states, tally = taken(lines(tmp_path / "a.jsonl", *CLAUDE_STREAM))
    assert taken(document(tmp_path / "a.json", CLAUDE_STREAM))[0] == states  # --output-format json --verbose
    assert tally.format == "claude_stream/1" and tally.passed_over == {"its prompt was not recorded": 1}
    (state,) = states
    assert roles(state) == ["user", "assistant", "tool", "tool"] and calls(state) == [("Read", {"file_path": "a.py"})]
    assert [message["content"] for message in state.messages[1:]] == ["I look.", "a.py", "failed"]
    assert sorted(tool["function"]["name"] for tool in state.tools) == ["Bash", "Read", "Task"]
    assert tally.skipped == {"subagent": 1, "result of the session": 1}


# A result ends what the first prompt explains. The answer to the next prompt, which is not printed, gives no state.
def test_claude_stream_of_several_prompts(tmp_path: Path) -> None:
    again = [
        spoken("m5", text("More."), use("t5", "Bash", command="ls")),
        returned("t5", "a"),
        spoken("m6", text("So.")),
    ]
    states, tally = taken(lines(tmp_path / "a.jsonl", *CLAUDE_STREAM, *again))
    assert tally.passed_over == {"its prompt was not recorded": 2}
    assert [state.student_action["content"] for state in states] == [None, "So."]
    assert [message["content"] for message in states[1].messages if message["role"] == "user"] == [NO_PROMPT] * 2


# With the prompt printed too, every turn gives a state. A compaction starts anew. A file may hold several sessions.
def test_claude_stream_with_prompts(tmp_path: Path) -> None:
    asked = stream("user", message={"role": "user", "content": "Count."}, isReplay=True)
    boundary = stream("system", subtype="compact_boundary", compact_metadata={"trigger": "auto"})
    summary = stream("user", message={"role": "user", "content": [text("So far: listed.")]})
    search = {"type": "server_tool_use", "id": "w1", "name": "web_search", "input": {"query": "x"}}
    again = [boundary, summary, spoken("m3", text("Two."), search)]
    other = {**spoken("m4", text("Hi.")), "session_id": "s-2"}
    session = [CLAUDE_STREAM[0], asked, *CLAUDE_STREAM[1:], *again]
    states, tally = taken(lines(tmp_path / "a.jsonl", *session, {**asked, "session_id": "s-2"}, other))
    assert [state.state_id for state in states] == ["s-1/0000", "s-1/0001", "s-1/0002", "s-2/0000"]
    assert [message["content"] for message in states[2].messages] == ["So far: listed."] and not tally.passed_over
    assert states[0].error == "failed" and calls(states[2]) == [("web_search", {"query": "x"})]


# The four files of Gemini CLI hold the same turns. The last version of a message counts.
@pytest.mark.parametrize("kind", ["session", "document", "checkpoint", "stream"])
def test_gemini(tmp_path: Path, kind: str) -> None:
    if kind in ("session", "stream"):
        path = lines(tmp_path / "s.jsonl", *(GEMINI if kind == "session" else GEMINI_STREAM))
    else:
        path = document(tmp_path / "s.json", GEMINI_DOCUMENT if kind == "document" else GEMINI_CHECKPOINT)
    (first, second), tally = taken(path)
    assert tally.format == "gemini_cli/1" and first.student_action["content"] == "I look."
    assert calls(first)[-1] == ("read_file", {"file_path": "b.py"}) and first.error == "File not found"
    assert second.messages[-1] == {"role": "tool", "tool_call_id": "g2", "content": "File not found"}
    assert second.student_action["content"] == "One." and NO_RESULT not in json.dumps(second.messages)
    if kind in ("session", "document"):
        assert first.source_model == "gemini-2.5-pro" and second.source_model == "gemini-2.5-flash"
        assert first.student_action["reasoning_content"] == "Plan: look" and tally.skipped["message of type info"] == 1


# Results beside a text or an image are the calls' results, and the rest is shown.
def test_gemini_results_beside_other_parts(tmp_path: Path) -> None:
    history = GEMINI_CHECKPOINT["history"]
    beside = {**history[3], "parts": [*history[3]["parts"], {"inlineData": {"data": ""}}, {"text": " Go on."}]}
    (first, second), _ = taken(document(tmp_path / "s.json", {"history": [*history[:3], beside, history[4]]}))
    assert first.error == "File not found"
    assert [message["content"] for message in second.messages[-2:]] == ["File not found", "[image] Go on."]


# Two sessions of stream-json in one file are two traces.
def test_gemini_streams_in_one_file(tmp_path: Path) -> None:
    other = [{**GEMINI_STREAM[0], "session_id": "g-3", "model": "gemini-2.5-flash"}]
    other += [{**GEMINI_STREAM[1], "content": "Count again."}, *GEMINI_STREAM[2:]]
    states, _ = taken(lines(tmp_path / "a.jsonl", *GEMINI_STREAM, *other))
    assert [state.trace_id for state in states] == ["g-2", "g-2", "g-3", "g-3"]
    assert len(states[2].messages) == 1 and states[2].source_model == "gemini-2.5-flash"


# A rewind takes messages back; a new version of the history is a context without new states.
def test_gemini_branches(tmp_path: Path) -> None:
    back, more = {"$rewindTo": "5"}, gemini("6", "gemini", "Two.", model="gemini-2.5-pro")
    short = {"$set": {"messages": [gemini("s", "user", "So far: listed."), gemini("s2", "gemini", "Fine.")]}}
    end = [gemini("7", "user", "And now?"), gemini("8", "gemini", "Three.")]
    states, tally = taken(lines(tmp_path / "a.jsonl", *GEMINI, back, more, short, *end))
    assert [state.student_action["content"] for state in states] == ["I look.", "One.", "Two.", "Three."]
    assert states[1].messages == states[2].messages
    assert [message["content"] for message in states[3].messages] == ["So far: listed.", "Fine.", "And now?"]
    assert tally.passed_over.total() == 1


# Calls in the text are calls, with their results, whatever their parameters hold. One that is cut off is one too.
def test_cline(tmp_path: Path) -> None:
    (tmp_path / "1769").mkdir()
    states, tally = taken(document(tmp_path / "1769" / "api_conversation_history.json", CLINE))
    assert tally.format == "cline/1" and tally.taken == 6
    assert [calls(state) for state in states] == [
        [("execute_command", {"command": "ls x &&\npwd", "requires_approval": "false"})],
        [("write_to_file", {"path": "a.html", "content": "<p>see <content></content></p>"})],
        [("attempt_completion", {"result": "One."})],
    ]
    assert "no x" in (states[0].error or "") and states[1].error is None and states[0].source_family == "claude"
    assert roles(states[1]) == ["user", "assistant", "tool", "user"] and NO_RESULT not in json.dumps(states[2].messages)
    assert [tool["function"]["name"] for tool in states[0].tools] == [
        "attempt_completion",
        "execute_command",
        "write_to_file",
    ]


# A tool that is named in prose is no call, nor is one that a shown file's [words] name. A file may hold the end of a
# call. A call may have no parameter.
def test_cline_calls_and_what_only_looks_so(tmp_path: Path) -> None:
    content = "Write\n</write_to_file>\nat the end."
    told = [
        "<thinking>I will use <read_file> now.</thinking>\n<execute_command><command>ls</command></execute_command>",
        "See <read_file>\n<execute_command><command>pwd</command></execute_command>",
        f"<write_to_file><path>a</path><content>\n{content}\n</content></write_to_file>",
        "<load_mcp_documentation>\n</load_mcp_documentation>",
        "<project>x</project><own_tool><level>3</level></own_tool>",
    ]
    shown = {"role": "user", "content": [text("[read_file for 'a.toml'] Result:\n[project]\n[own_tool] Result:\nx")]}
    session = [CLINE[0], *(part for words in told for part in ({"role": "assistant", "content": words}, shown))]
    (tmp_path / "1").mkdir()
    states, _ = taken(document(tmp_path / "1" / "api_conversation_history.json", session))
    assert [calls(state) for state in states] == [
        [("execute_command", {"command": "ls"})],
        [("execute_command", {"command": "pwd"})],
        [("write_to_file", {"path": "a", "content": content})],
        [("load_mcp_documentation", {})],
        [("own_tool", {"level": "3"})],
    ]
    assert states[1].student_action["content"] == "See <read_file>"


# What Roo Code condensed is shown no longer, once its summary is there.
def test_roo_condensation(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    old = [{**message, "condenseParent": "c1"} for message in CLINE[:3]]
    summary = {"role": "user", "content": [text("So far: looked.")], "isSummary": True, "condenseId": "c1"}
    states, _ = taken(document(tmp_path / "1" / "api_conversation_history.json", [*old, summary, *CLINE[3:]]))
    assert [message["content"] for message in states[1].messages] == ["So far: looked."] and len(states) == 3


# Only Aider's own lines part the speakers: a comment and a quotation in code stay in the answer.
@pytest.mark.parametrize("trimmed", [False, True])
def test_aider(tmp_path: Path, trimmed: bool) -> None:
    path = tmp_path / ".aider.chat.history.md"
    path.write_text("\n".join(line.rstrip() for line in AIDER.split("\n")) if trimmed else AIDER)
    states, tally = taken(path)
    assert tally.format == "aider/1" and tally.skipped["command to Aider"] == 2
    if trimmed:
        assert [state.source_family for state in states][-1] == "claude"
        return
    first, second, third = states
    assert first.messages == [{"role": "user", "content": "Set x to 2.\nKeep y."}] and first.source_model == "gpt-4o"
    assert "# the answer\n> quoted\n<<<<<<< SEARCH" in first.student_action["content"]
    assert first.error is not None and "did not conform" in first.error and "failed to match" in first.error
    assert second.messages[-1] == {"role": "user", "content": first.error} and second.error is None
    assert third.messages == [{"role": "user", "content": "What is x?"}] and third.source_family == "claude"
    assert first.trace_id.endswith("2026-01-02 03:04:05")


LINES = {
    "codex": [*CODEX, codex("compacted", message="s", replacement_history=[CODEX[5]["payload"]])],
    "claude_stream": [*CLAUDE_STREAM, returned("t9", "late")],
    "gemini_cli": [*GEMINI, {"$rewindTo": "2"}, {"$set": {"messages": [GEMINI[1]]}}, *GEMINI_STREAM],
    "atif": [ATIF, {**ATIF, "subagent_trajectories": [ATIF]}],
    "adp": [ADP],
}
DOCUMENTS = {
    "claude_stream": CLAUDE_STREAM,
    "cline": CLINE,
    "gemini_cli": GEMINI_CHECKPOINT,
    "atif": ATIF,
    "codex": {"session": {}, "items": []},
}


# Whatever happened to a file of lines, each line is counted, and no reader fails.
@pytest.mark.parametrize("name", LINES)
@settings(max_examples=25)
@given(data=st.data())
def test_damaged_lines(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng, base = random.Random(data.draw(st.integers(0, 10_000))), LINES[name]
    keys = keys_of(base)
    order = data.draw(st.permutations(base)) if data.draw(st.booleans()) else base
    raw = b"\n".join(mutated(rng, line, keys) for line in order)
    path = tmp_path_factory.mktemp("damaged") / "a.jsonl"
    path.write_bytes(raw[: len(raw) * data.draw(st.integers(0, 100)) // 100])
    taken(path)
    _, tally = taken(path, format=name)
    if name not in ("atif", "adp"):  # whose records are steps
        assert tally.seen == sum(1 for line in path.read_bytes().split(b"\n") if line.strip())


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=25)
@given(data=st.data())
def test_damaged_documents(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    raw = mutated(random.Random(data.draw(st.integers(0, 10_000))), DOCUMENTS[name], keys_of(DOCUMENTS[name]))
    path = tmp_path_factory.mktemp("damaged") / "api_conversation_history.json"
    path.write_bytes(raw)
    for named in (None, name):
        taken(path, format=named)


@settings(max_examples=25)
@given(data=st.data())
def test_damaged_histories_of_aider(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    parts = data.draw(st.permutations(AIDER.split("\n")))
    path = tmp_path_factory.mktemp("damaged") / "a.md"
    path.write_bytes("\n".join(parts).encode()[: data.draw(st.integers(0, 900))] + data.draw(st.binary(max_size=9)))
    for named in (None, "aider"):
        taken(path, format=named)
