"""Canonical actions, majorities and epsilon."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import call

from orchestrator.teachers.canonical import canonical
from orchestrator.teachers.consensus import epsilon, majority, settled
from orchestrator.teachers.edits import Files
from orchestrator.teachers.kill_switch import percentile


def acts(name: str, **arguments) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]}


def says(text: str) -> dict:
    return {"role": "assistant", "content": text}


def same(first: dict, second: dict, tools: list | None = None, before: list | None = None) -> bool:
    files = Files(before or [])
    return canonical(first, tools or [], files) == canonical(second, tools or [], files)


DEFAULTS = [
    {"function": {"name": "grep", "parameters": {"properties": {"path": {"default": "."}, "limit": {"default": 10}}}}}
]
WRITTEN = [
    {"role": "assistant", "content": None, "tool_calls": [call("Write", {"file_path": "a.py", "content": "x\ny\nz\n"})]}
]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (acts("read", path="./src/../a.py", n=1.0), acts("read", n=1, path="a.py"), True),
        (acts("read", path="a.py"), acts("read", path="b.py"), False),
        (acts("grep", pattern="x", limit=10, path=None), acts("grep", pattern="x"), True),
        (acts("Bash", command="ls  -la 'a b'", description="list"), acts("bash", command='ls -la "a b"'), True),
        (acts("Bash", command="ls|wc"), acts("Bash", command="ls | wc"), True),
        (acts("Bash", command="rm a # b"), acts("Bash", command="rm a"), False),
        (acts("Bash", command="echo 'open"), acts("Bash", command="echo  'open"), True),
        (says("I look.\n```bash\nls\n```"), acts("Bash", command="ls"), True),
        (says("Done."), says("All finished."), True),
        (says("Done."), acts("Bash", command="ls"), False),
        (says('<tool_call>{"name": "x"'), says("Done."), False),
        (acts("Write", file_path="a.py", content="x\n"), acts("write", path="./a.py", content="x"), True),
    ],
)
def test_what_is_the_same_action(first: dict, second: dict, equal: bool) -> None:
    assert same(first, second, DEFAULTS) == equal


# Two edits that quote more or less context, or one edit and a whole new file, leave the same content behind.
def test_edits_are_compared_by_what_they_leave() -> None:
    narrow = acts("Edit", file_path="a.py", old_string="y", new_string="Y")
    wide = acts("str_replace_editor", command="str_replace", path="./a.py", old_str="x\ny\nz", new_str="x\nY\nz")
    whole = acts("Write", file_path="a.py", content="x\nY\nz")
    assert same(narrow, wide, before=WRITTEN) and same(narrow, whole, before=WRITTEN)
    assert same(narrow, wide)  # the file is not known: the lines that change are the same
    assert not same(narrow, acts("Edit", file_path="a.py", old_string="z", new_string="Z"), before=WRITTEN)


# Calls of one turn are a set.
def test_the_order_of_calls_does_not_count() -> None:
    one, two = call("a", {}), call("b", {}, "c2")
    assert same({"role": "assistant", "tool_calls": [one, two]}, {"role": "assistant", "tool_calls": [two, one]})


def test_an_empty_action_has_no_form() -> None:
    assert canonical(says("  "), []) is None


# Whatever is written as arguments, there is a form, and it is hashable.
@given(st.text(), st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_any_call_has_a_form(name: str, arguments: str) -> None:
    action = {"tool_calls": [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}]}
    assert hash(canonical(action, [])) is not None


# settled() by enumeration: no continuation of the votes may change the majority.
@given(st.integers(2, 5), st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("abc")), max_size=5))
def test_settled_means_no_vote_can_change_it(planned: int, cast: list[tuple[str, str]]) -> None:
    votes = [(family, (form,)) for family, form in cast[:planned]]
    outcomes = {majority(votes, planned)} if len(votes) == planned else set()
    frontier = [votes] if len(votes) < planned else []
    while frontier:
        grown = [[*some, (f"new {len(some)}", (form,))] for some in frontier for form in "abcde"]
        outcomes |= {majority(some, planned) for some in grown if len(some) == planned}
        frontier = [some for some in grown if len(some) < planned]
    assert settled(votes, planned) == (len(outcomes) == 1)


# A majority within one family is none; with one vote a family only the count matters.
def test_a_majority_needs_two_families() -> None:
    one, other = ("x",), ("y",)
    assert majority([("gpt", one), ("qwen", other), ("gpt", one)], 3) is None
    assert majority([("gpt", one), ("qwen", one), ("gpt", other)], 3) == one
    assert not settled([("gpt", one), ("gpt", one)], 3)
    assert settled([("gpt", one), ("qwen", one)], 3)


# 1 - (k + 1/2) / (n + 1), the figures of the design; never above a half.
def test_epsilon() -> None:
    assert [epsilon(2, 2), epsilon(2, 3), epsilon(3, 3)] == [pytest.approx(1 / 6), 0.375, 0.125]
    assert epsilon(1, 3) == 0.5


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([7.0], 0.95) == 7 and percentile([], 0.95) == 0
