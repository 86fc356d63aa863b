"""Sessions as trees: each state's context is the walk along parentUuid, in whatever order the lines stand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingest_traces import answer, lines, prompt, result, taken, text, use

from composer_prime.traces.states import Message, TraceState


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


# The user returns to an earlier branch: what was said on the other one is not there.
def test_returning_to_a_branch(tmp_path: Path) -> None:
    records = [prompt("u1", None, "task"), answer("a1", "u1", text("plan")), prompt("u2", "a1", "do X")]
    records += [answer("a2", "u2", text("did X")), prompt("u3", "a1", "do Y"), answer("a3", "u3", text("did Y"))]
    states, _ = taken(lines(tmp_path / "s.jsonl", *records, prompt("u4", "a2", "more"), answer("a4", "u4", text("X2"))))
    assert contents(states[-1]) == ["task", "plan", "do X", "did X", "more"]


# A note between the parts of one answer does not make two turns of it; it stands behind the answer and its results.
def test_a_note_within_an_answer(tmp_path: Path) -> None:
    records = [prompt("u1", None, "task"), answer("a1", "u1", use("t1", "Bash"), message_id="m1")]
    records += [result("r1", "a1", "t1", "one"), prompt("u2", "r1", "a hook said", isMeta=True)]
    records += [answer("a2", "u2", use("t2", "Bash"), message_id="m1"), result("r2", "a2", "t2", "two")]
    states, _ = taken(lines(tmp_path / "s.jsonl", *records, answer("a3", "r2", text("done"))))
    assert len(states) == 2 and len(states[0].student_action["tool_calls"]) == 2
    assert contents(states[1]) == ["task", None, "one", "two", "a hook said"]


# A second terminal went on while a call ran: its context has no result, that of the first one has.
def test_a_result_after_another_branch_went_on(tmp_path: Path) -> None:
    records = [prompt("u1", None, "task"), answer("a1", "u1", use("t1", "Bash"), use("t2", "Bash"))]
    records += [prompt("u2", "a1", "meanwhile"), answer("a2", "u2", text("yes")), result("r1", "a1", "t1", "one")]
    records += [result("r2", "a1", "t2", "two"), answer("a3", "r2", text("done"))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records))
    found = {said(state): contents(state) for state in states[1:]}
    assert found["yes"] == ["task", None, *["[no result was recorded]"] * 2, "meanwhile"]
    assert found["done"] == ["task", None, "one", "two"] and tally.taken == len(records)


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
    other = {**queued("q", "r1", ""), "attachment": {"type": "todo_reminder", "content": []}}
    states, tally = taken(lines(tmp_path / "s.jsonl", *start, other, answer("a2", "q", text("done"))))
    assert contents(states[1]) == ["task", None, "one"] and tally.skipped == {"attachment todo_reminder": 1}


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


# A compaction does not make uuids new: what is repeated behind it is skipped.
def test_repeated_uuids_behind_a_compaction(tmp_path: Path) -> None:
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "sessionId": "s1"}
    start = [prompt("u1", None, "task"), answer("a1", "u1", text("one"))]
    records = [*start, boundary, prompt("u2", "c", "summary", isCompactSummary=True), answer("a2", "u2", text("two"))]
    records += [*start, prompt("u3", "a2", "three?"), answer("a3", "u3", text("three"))]
    states, tally = taken(lines(tmp_path / "s.jsonl", *records))
    assert tally.skipped == {"system record: compact_boundary": 1, "repeated uuid": 2}
    assert sorted(map(said, states)) == ["one", "three", "two"]
    assert contents(states[-1]) == ["summary", "two", "three?"]
