"""Claude Code sessions: what is one turn, which branch, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingest_traces import SESSION, answer, lines, prompt, result, roles, taken, text, use

from composer_prime.traces.ingest.reading import Limits


# Four lines of one message.id are one turn; its context is what came before, its error what came after.
def test_lines_of_one_answer_are_one_turn(tmp_path: Path) -> None:
    states, tally = taken(lines(tmp_path / "s.jsonl", *SESSION))
    first, second = states
    assert (tally.taken, roles(first)) == (8, ["user"])
    assert [call["function"]["name"] for call in first.student_action["tool_calls"]] == ["Bash", "Read"]
    assert first.error == "no such file" and second.error is None
    assert roles(second) == ["user", "assistant", "tool", "tool"]
    assert (first.state_id, second.state_id) == ("s1/0000", "s1/0001")
    assert first.source_model == "claude-sonnet-4" and first.source_family == "claude"


# Thinking stands in the action of its own turn and in no context.
def test_thinking_is_kept_in_the_action_only(tmp_path: Path) -> None:
    first, second = taken(lines(tmp_path / "s.jsonl", *SESSION))[0]
    assert first.student_action["reasoning_content"] == "look first"
    assert "look first" not in str(second.messages)


# Results may come between the lines of one answer, as they do when tools run while the model still writes.
def test_results_between_the_lines_of_an_answer(tmp_path: Path) -> None:
    records = [*SESSION[:4], SESSION[5], SESSION[4], *SESSION[6:]]
    assert [len(state.messages) for state in taken(lines(tmp_path / "s.jsonl", *records))[0]] == [1, 4]


# A prompt whose parent lies further back leaves the later messages behind.
def test_going_back_starts_another_branch(tmp_path: Path) -> None:
    records = [*SESSION, prompt("u2", "u1", "Rather explain it."), answer("a9", "u2", text("It tests x."))]
    states, _ = taken(lines(tmp_path / "s.jsonl", *records))
    assert [message["content"] for message in states[2].messages] == ["Fix the test.", "Rather explain it."]


# After a compaction the summary is all there is; the records before it give their states still.
def test_compaction_starts_the_context_anew(tmp_path: Path) -> None:
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "c1", "parentUuid": None, "sessionId": "s1"}
    summary = prompt("u2", "c1", "So far: a.py is gone.", isCompactSummary=True)
    records = [*SESSION, boundary, summary, answer("a9", "u2", text("Then I am done."))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records))
    assert [message["content"] for message in states[2].messages] == ["So far: a.py is gone."]
    assert tally.skipped == {"system record: compact_boundary": 1}


# A resumed session copies its past: within a file by uuid, between files by content.
def test_a_resumed_session_counts_once(tmp_path: Path) -> None:
    more = [prompt("u2", "a5", "Why?"), answer("a9", "u2", text("I do not know."))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *SESSION, *SESSION[:3], *more))
    assert len(states) == 3 and tally.skipped == {"repeated uuid": 3}
    renamed = [{**record, "uuid": f"x{record['uuid']}", "sessionId": "s2", "parentUuid": None} for record in SESSION]
    both, accounts = taken(lines(tmp_path / "t.jsonl", *SESSION, *renamed))
    assert len(both) == 2 and accounts.passed_over == {"copy of an earlier state": 2}


# Subagents, other records and results without a call are skipped, each with its reason.
def test_what_is_skipped_has_a_reason(tmp_path: Path) -> None:
    records = [
        *SESSION,
        {**answer("a8", "a5", text("as a subagent")), "isSidechain": True},
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
        {"type": "from-the-future", "sessionId": "s1"},
        result("r9", "a5", "never-called", "stray"),
        answer("a7", "a5", text("API Error"), isApiErrorMessage=True),
    ]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records))
    assert len(states) == 2
    assert tally.skipped == {
        "subagent (sidechain)": 1,
        "record type file-history-snapshot": 1,
        "unknown record type": 1,
        "tool result without its call": 1,
        "not the model's own words (synthetic)": 1,
    }


# A call that was never answered gets a stand-in, for no endpoint takes a call without a result.
def test_every_call_in_a_context_has_a_result(tmp_path: Path) -> None:
    records = [
        prompt("u1", None, "Go."),
        answer("a1", "u1", use("t1", "Bash", command="ls")),
        prompt("u2", "a1", "Stop."),
    ]
    states, _ = taken(lines(tmp_path / "s.jsonl", *records, answer("a2", "u2", text("Stopped."))))
    assert roles(states[1]) == ["user", "assistant", "tool", "user"]
    assert states[1].messages[2]["content"] == "[no result was recorded]"


# Teachers are told of the tools that the file uses, with the types of their arguments, in every state of it alike: what
# a state offers does not tell what its student called.
def test_tools_are_those_that_the_file_calls(tmp_path: Path) -> None:
    more = [prompt("u2", "a5", "Make it."), answer("a6", "u2", use("t3", "Bash", command="touch a.py", timeout=5))]
    states, _ = taken(lines(tmp_path / "s.jsonl", *SESSION, *more))
    assert len(states) == 3
    for state in states:
        assert [tool["function"]["name"] for tool in state.tools] == ["Bash", "Read"]
        properties = state.tools[0]["function"]["parameters"]["properties"]
        assert properties == {"command": {"type": "string"}, "timeout": {"type": "integer"}}


# What a subagent calls is not offered, nor what no agent can have: the turns that call such a tool are passed over.
def test_tools_that_are_not_offered(tmp_path: Path) -> None:
    subagent = {**answer("b1", "u1", use("x", "Own", a=1)), "isSidechain": True}
    states, _ = taken(lines(tmp_path / "s.jsonl", *SESSION, subagent))
    assert [tool["function"]["name"] for tool in states[0].tools] == ["Bash", "Read"]
    records, parent = [prompt("u1", None, "Go.")], "u1"
    for number in range(130):
        records.append(answer(f"a{number}", parent, use(f"t{number}", f"tool{number}")))
        parent = f"a{number}"
    states, tally = taken(lines(tmp_path / "t.jsonl", *records))
    assert len(states) == len(states[0].tools) == 128
    assert tally.passed_over == {"its tool is not among the first 128 of the file": 2}


def _beside(kind: str, uuid: str, parent: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s1", **more}


# A microcompaction takes results out of what follows it, not out of what came before.
def test_microcompaction_clears_the_results_that_it_names(tmp_path: Path) -> None:
    metadata = {"trigger": "auto", "compactedToolIds": ["t1", "elsewhere"]}
    cleared = _beside("system", "c1", "a5", subtype="microcompact_boundary", microcompactMetadata=metadata)
    records = [*SESSION, cleared, prompt("u2", "c1", "And now?"), answer("a9", "u2", text("Done."))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records))
    results = [[message["content"] for message in state.messages if message["role"] == "tool"] for state in states]
    assert results == [[], ["a.py", "no such file"], ["[Old tool result content cleared]", "no such file"]]
    assert not tally.skipped


# A context that a microcompaction made short enough is shown again.
def test_microcompaction_makes_room(tmp_path: Path) -> None:
    metadata = {"compactedToolIds": ["t1"]}
    cleared = _beside("system", "c1", "a2", subtype="microcompact_boundary", microcompactMetadata=metadata)
    records = [
        prompt("u1", None, "Read it."),
        answer("a1", "u1", use("t1", "Read", file_path="a.py")),
        result("r1", "a1", "t1", "x" * 300),
        answer("a2", "r1", text("Read.")),
        cleared,
        prompt("u2", "c1", "y" * 300),
        answer("a3", "u2", text("Done.")),
    ]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records), limits=Limits(context_chars=500))
    assert len(states) == 3 and not tally.passed_over


# A context that is too long all the same is not shown: how much was taken out is counted before the next turn.
def test_microcompaction_of_too_little(tmp_path: Path) -> None:
    metadata = {"compactedToolIds": ["t1"]}
    cleared = _beside("system", "c1", "a2", subtype="microcompact_boundary", microcompactMetadata=metadata)
    records = [
        prompt("u1", None, "x" * 300),
        answer("a1", "u1", use("t1", "Read", file_path="a.py")),
        result("r1", "a1", "t1", "Read."),
        answer("a2", "r1", text("Read.")),
        cleared,
        prompt("u2", "c1", "y" * 300),
        answer("a3", "u2", text("Done.")),
    ]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records), limits=Limits(context_chars=500))
    assert len(states) == 2 and tally.passed_over == {"context over 500 characters": 1}


# The model saw what Claude Code attached: a file named with @, a nested CLAUDE.md, a hook's words.
def test_attachments_are_shown(tmp_path: Path) -> None:
    attached = [
        {"type": "file", "filename": "/r/a.py", "content": {"type": "text", "file": {"content": "x = 1"}}},
        {"type": "nested_memory", "path": "/r/CLAUDE.md", "content": {"path": "/r/CLAUDE.md", "content": "Use uv."}},
        {"type": "hook_additional_context", "hookName": "PostToolUse:Edit", "content": ["Tests pass.", "Go on."]},
        {"type": "todo_reminder", "content": [], "itemCount": 0},
    ]
    parents = ["u1", "b0", "b1", "b2"]
    records = [_beside("attachment", f"b{n}", parents[n], attachment=each) for n, each in enumerate(attached)]
    session = [prompt("u1", None, "Fix @a.py."), *records, answer("a1", "b3", text("Fixed."))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *session))
    assert [message["content"] for message in states[0].messages] == [
        "Fix @a.py.",
        "<system-reminder>\nContents of /r/a.py:\nx = 1\n</system-reminder>",
        "<system-reminder>\nContents of /r/CLAUDE.md:\nUse uv.\n</system-reminder>",
        "<system-reminder>\nPostToolUse:Edit hook:\nTests pass.\nGo on.\n</system-reminder>",
    ]
    assert tally.skipped == {"attachment todo_reminder": 1}
