"""Claude Code sessions: turns, branches, compactions, and contexts that are walks along parentUuid."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingest_traces import SESSION, answer, lines, prompt, result, roles, taken, text, use

from composer_prime.traces.records import Message, TraceState


# Four lines of one message.id are one turn; its context is what came before, its error what came after. Thinking stands
# in the action of its own turn and in no context.
def test_lines_of_one_answer_are_one_turn(tmp_path: Path) -> None:
    states, tally = taken(lines(tmp_path / "s.jsonl", *SESSION))
    first, second = states
    assert (tally.taken, roles(first)) == (8, ["user"])
    assert [call["function"]["name"] for call in first.student_action["tool_calls"]] == ["Bash", "Read"]
    assert first.error == "no such file" and second.error is None
    assert roles(second) == ["user", "assistant", "tool", "tool"]
    assert (first.state_id, second.state_id) == ("s1/0000", "s1/0001")
    assert first.source_model == "claude-sonnet-4" and first.source_family == "claude"
    assert first.student_action["reasoning_content"] == "look first"
    assert "look first" not in str(second.messages)


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
    states, tally = taken(lines(tmp_path / "s.jsonl", *records), context_chars=500)
    assert len(states) == 3 and not tally.passed_over


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


@dataclass
class Forest:
    """A session being made: its records, which records each waits for, and what the walk to each point shows."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs: dict[str, set[str]] = field(default_factory=dict)
    points: list[tuple[str, set[str], list[Message]]] = field(default_factory=list)
    """(the record to follow, those that stand before it, the messages up to it)."""
    expected: dict[str, list[Message]] = field(default_factory=dict)
    """The context of the turn that says so."""

    def put(self, record: dict[str, Any], needs: set[str]) -> str:
        self.records[record["uuid"]], self.needs[record["uuid"]] = record, needs
        return record["uuid"]

    def ask(self, at: int) -> None:
        parent, needs, before = self.points[at]
        said = f"ask {len(self.records)}"
        uuid = self.put(prompt(f"u{len(self.records)}", parent, said), needs)
        self.points.append((uuid, needs | {uuid}, [*before, {"role": "user", "content": said}]))

    def aside(self, at: int) -> None:
        parent, needs, before = self.points[at]
        number = len(self.records)
        record = {"type": "system", "subtype": "x", "uuid": f"s{number}", "parentUuid": parent, "sessionId": "s1"}
        uuid = self.put(record, needs)
        self.points.append((uuid, needs | {uuid}, before))

    def act(self, at: int, calls: int, chained: bool) -> None:
        """A turn of a text and calls, a record each; results follow their call's record, or one another."""
        parent, needs, before = self.points[at]
        number = len(self.records)
        key, said, own = f"m{number}", f"act {number}", set(needs)
        part = self.put(answer(f"a{number}", parent, text(said), message_id=key), set(own))
        own |= {part}
        made, results = [], []
        for index in range(calls):
            call = use(f"t{number}-{index}", "Bash", command=f"c{number}-{index}")
            part = self.put(answer(f"a{number}-{index}", part, call, message_id=key), set(own))
            own |= {part}
            made.append((part, call["id"]))
        end = part
        for index, (of, call_id) in enumerate(made):
            stands = results[-1] if chained and results else of
            wait = set(own) if chained else needs | {of, *self.needs[of]}
            end = self.put(result(f"r{number}-{index}", stands, call_id, f"did {call_id}"), wait)
            own |= {end}
            results.append(end)
        self.expected[said] = before
        shown: Message = {"role": "assistant", "content": said}
        if made:
            shown["tool_calls"] = [called(call_id) for _, call_id in made]
        seen = [{"role": "tool", "tool_call_id": call_id, "content": f"did {call_id}"} for _, call_id in made]
        self.points.append((end, own, [*before, shown, *seen]))


def called(call_id: str) -> Message:
    arguments = f'{{"command": "c{call_id[1:]}"}}'
    return {"id": call_id, "type": "function", "function": {"name": "Bash", "arguments": arguments}}


def interleaved(forest: Forest, rng: random.Random) -> list[dict[str, Any]]:
    """The records in any order in which none stands before those that it waits for."""
    waiting, done, order = dict(forest.needs), set[str](), []
    while waiting:
        uuid = rng.choice([uuid for uuid, needs in waiting.items() if needs <= done])
        del waiting[uuid]
        done.add(uuid)
        order.append(forest.records[uuid])
    return order


def said(state: TraceState) -> str:
    return state.student_action["content"]


def contents(state: TraceState) -> list[str | None]:
    return [message["content"] for message in state.messages]


MOVES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5), st.booleans()), min_size=1, max_size=12)


# Random trees in random orders: branches that are left and returned to, several terminals at once, results of parallel
# calls beside one another. Every turn gives its state, with the walk along parentUuid as its context.
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MOVES, st.randoms(use_true_random=False))
def test_contexts_are_walks(tmp_path: Path, moves: list[tuple[int, int, bool]], rng: random.Random) -> None:
    forest = Forest()
    uuid = forest.put(prompt("u", None, "task"), set())
    forest.points.append((uuid, {uuid}, [{"role": "user", "content": "task"}]))
    for where, kind, chained in moves:
        at = where % len(forest.points)
        if kind < 3:
            forest.act(at, kind, chained)
        elif kind == 3:
            forest.aside(at)
        else:
            forest.ask(at)
    states, tally = taken(lines(tmp_path / "s.jsonl", *interleaved(forest, rng)))
    assert {said(state): state.messages for state in states} == forest.expected
    assert tally.taken == sum(record["type"] != "system" for record in forest.records.values())
    assert len({state.state_id for state in states}) == len(states) == len(forest.expected)


# A note between the parts of one answer does not make two turns of it; it stands behind the answer and its results.
def test_a_note_within_an_answer(tmp_path: Path) -> None:
    records = [prompt("u1", None, "task"), answer("a1", "u1", use("t1", "Bash"), message_id="m1")]
    records += [result("r1", "a1", "t1", "one"), prompt("u2", "r1", "a hook said", isMeta=True)]
    records += [answer("a2", "u2", use("t2", "Bash"), message_id="m1"), result("r2", "a2", "t2", "two")]
    states, _ = taken(lines(tmp_path / "s.jsonl", *records, answer("a3", "r2", text("done"))))
    assert len(states) == 2 and len(states[0].student_action["tool_calls"]) == 2
    assert contents(states[1]) == ["task", None, "one", "two", "a hook said"]


# Where the parent is not in the file, or no line names one, a line follows the one before it.
def test_lines_without_their_parents(tmp_path: Path) -> None:
    for parents in ([None, None, None, None], [None, "u1", "gone", "u2"]):
        ids = zip(("u1", "a1", "u2", "a2"), parents, strict=True)
        u1, a1, u2, a2 = ids
        records = [prompt(*u1, "task"), answer(*a1, text("plan")), prompt(*u2, "go"), answer(*a2, text("went"))]
        states, _ = taken(lines(tmp_path / "s.jsonl", *records))
        assert contents(states[1]) == ["task", "plan", "go"]


def queued(uuid: str, parent: str, typed: object) -> dict[str, Any]:
    record = prompt(uuid, parent, "")
    del record["message"]
    return {**record, "type": "attachment", "attachment": {"type": "queued_command", "prompt": typed}}


# A prompt that was typed while the agent worked is there as an attachment alone, as text or in blocks: a message, once.
def test_queued_prompts(tmp_path: Path) -> None:
    start = [prompt("u1", None, "task"), answer("a1", "u1", use("t1", "Bash")), result("r1", "a1", "t1", "one")]
    for typed in ("also Z", [text("also Z")]):
        records = [*start, queued("q", "r1", typed), answer("a2", "q", text("Z too"))]
        states, tally = taken(lines(tmp_path / "s.jsonl", *records))
        assert contents(states[1]) == ["task", None, "one", "also Z"] and tally.taken == 5
    twice = [queued("q", "r1", "also Z"), prompt("u2", "q", "also Z"), answer("a2", "u2", text("Z too"))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *start, *twice))
    assert contents(states[1]) == ["task", None, "one", "also Z"]
    assert tally.skipped == {"queued prompt that is there already": 1}


# A compaction may keep the last messages: they stand behind its summary, and what is said then behind them.
def test_messages_that_a_compaction_keeps(tmp_path: Path) -> None:
    start = [prompt("u1", None, "task"), answer("a1", "u1", text("one")), prompt("u2", "a1", "two?")]
    start += [answer("a2", "u2", use("t1", "Bash")), result("r2", "a2", "t1", "did")]
    kept = {"preservedSegment": {"headUuid": "u2", "anchorUuid": "s", "tailUuid": "r2"}}
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "sessionId": "s1"}
    records = [*start, {**boundary, "compactMetadata": kept}, prompt("s", "c", "summary", isCompactSummary=True)]
    records += [prompt("u3", "r2", "three?"), answer("a3", "u3", text("three"))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records))
    assert [contents(state) for state in states] == [
        ["task"],
        ["task", "one", "two?"],
        ["summary", "two?", None, "did", "three?"],
    ]
    assert tally.taken == len(records) - 1


# After a compaction the summary is all there is, but uuids are not new: what is repeated behind it is skipped.
def test_repeated_uuids_behind_a_compaction(tmp_path: Path) -> None:
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "sessionId": "s1"}
    start = [prompt("u1", None, "task"), answer("a1", "u1", text("one"))]
    records = [*start, boundary, prompt("u2", "c", "summary", isCompactSummary=True), answer("a2", "u2", text("two"))]
    records += [*start, prompt("u3", "a2", "three?"), answer("a3", "u3", text("three"))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records))
    assert tally.skipped == {"system record: compact_boundary": 1, "repeated uuid": 2}
    assert sorted(map(said, states)) == ["one", "three", "two"]
    assert contents(states[-1]) == ["summary", "two", "three?"]


# A note behind a call whose result is too long leads to no state: its context would have a hole.
def test_a_note_behind_what_cannot_be_shown(tmp_path: Path) -> None:
    records = [prompt("u1", None, "task"), answer("a1", "u1", use("t1", "Bash")), result("r1", "a1", "t1", "x" * 5_000)]
    records += [prompt("u2", "r1", "a note", isMeta=True), answer("a2", "u2", text("one"))]
    records += [prompt("u3", "a2", "and now?"), answer("a3", "u3", text("two"))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records), context_chars=4_000)
    assert [contents(state) for state in states] == [["task"]]
    assert tally.passed_over == {"context over 4,000 characters": 2}


# After errors of the endpoint the answer may hang beside the program's records, on which the session goes on.
def test_an_answer_beside_the_records_of_errors_is_seen(tmp_path: Path) -> None:
    def program(uuid: str, parent: str, subtype: str) -> dict[str, Any]:
        return {"type": "system", "subtype": subtype, "uuid": uuid, "parentUuid": parent, "sessionId": "s1"}

    records = [
        prompt("u1", None, "What is it?"),
        program("e1", "u1", "api_error"),
        program("e2", "e1", "api_error"),
        answer("a1", "u1", text("Seven.")),
        program("s", "e2", "stop_hook_summary"),
    ]
    for link in ("s", "e2"):
        more = [prompt("u2", link, "Sure?"), answer("a2", "u2", text("Yes."))]
        _, second = taken(lines(tmp_path / f"{link}.jsonl", *records, *more))[0]
        assert [message["content"] for message in second.messages] == ["What is it?", "Seven.", "Sure?"]
    # Who goes back to an earlier answer does not see the later one.
    back = [prompt("u2", "a1", "Sure?"), answer("a2", "u2", text("Yes.")), program("c", "a1", "local_command")]
    (*_, last), _ = taken(
        lines(tmp_path / "back.jsonl", *records, *back, prompt("u3", "c", "So?"), answer("a3", "u3", text("No.")))
    )
    assert [message["content"] for message in last.messages] == ["What is it?", "Seven.", "So?"]
