"""Canonical actions, also of shell commands and calls in text; majorities and epsilon."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from loopback import call, says, xml

from composer_prime.traces.records import VoteRecord, digest
from composer_prime.traces.replay.voting import (
    Vote,
    actions_in_text,
    canonical,
    epsilon,
    majority,
    settled,
    shell,
    way_of,
)

COMMANDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())


def acts(name: str, **arguments) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]}


def same(first: dict, second: dict, tools: list | None = None) -> bool:
    return canonical(first, tools or []) == canonical(second, tools or [])


TOOLS = [{"function": {"name": "grep"}}]


# What only looks different is one action; what may do something else is not.
@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (acts("read", path="./src/../a.py", n=1.0), acts("read", n=1, path="a.py"), True),
        (acts("read", path="a.py"), acts("read", path="b.py"), False),
        (acts("grep", pattern="x", path=None), acts("grep", pattern="x"), True),
        (acts("Bash", command="ls  -la 'a b'", description="list"), acts("bash", command='ls -la "a b"'), True),
        (acts("Bash", command="ls|wc"), acts("Bash", command="ls | wc"), True),
        (acts("Bash", command="rm a # b"), acts("Bash", command="rm a"), False),
        (acts("Bash", command="ls", cwd="/a"), acts("Bash", command="ls", cwd="/b"), False),
        (acts("Bash", command="sleep 5"), acts("Bash", command="sleep 5", run_in_background=True), False),
        (acts("execute_bash", command="C-c"), acts("execute_bash", command="C-c", is_input="true"), False),
        (acts("Bash", command="ls", cwd="./a"), acts("Bash", command="ls", cwd="a", security_risk="LOW"), True),
        (acts("grep", pattern=" x"), acts("grep", pattern="x"), False),
        (acts("grep", pattern="x", limit=True), acts("grep", pattern="x", limit=1), False),
        (acts("new_issue", description="a"), acts("new_issue", description="b"), False),
        (acts("fetch", path="https://x/a"), acts("fetch", path="https:/x/a"), False),
        (says("Done."), says("All finished."), True),
        (says("Done."), acts("Bash", command="ls"), False),
        (acts("finish", message="All is fixed."), says("Done."), True),
        (acts("submit"), says("Done."), True),
        (acts("finish", message="Done A", task_completed="true"), acts("finish", message="All done"), True),
        (acts("finish", outputs={}), acts("finish", final_thought="x", outputs={"content": "y"}), True),
        (acts("finish", message="No.", task_completed="false"), acts("finish", message="Done."), False),
        (acts("finish", message="A", task_completed="partial"), acts("finish", task_completed="partial"), True),
        (acts("submit", answer="4"), acts("submit", answer="5"), False),
        (says('<tool_call>{"name": "x"'), says("Done."), False),
        (acts("Write", file_path="a.py", content="x"), acts("Write", file_path="./a.py", content="x"), True),
        (acts("Write", file_path="a.py", content="x\n"), acts("Write", file_path="a.py", content="x"), False),
        (acts("Bash", command="pytest", timeout=60_000), acts("Bash", command="pytest"), True),
        (acts("Bash", command="pytest", run_in_background=False), acts("Bash", command="pytest"), True),
        (acts("Bash", command="ls -la"), acts("Bash", command="ls -al"), False),
        (acts("wait", timeout=1), acts("wait", timeout=2), False),
        (acts("Read", file_path="a", limit=100), acts("Read", file_path="a"), False),
    ],
)
def test_what_is_the_same_action(first: dict, second: dict, equal: bool) -> None:
    assert same(first, second, TOOLS) == same(second, first, TOOLS) == equal


# A command in a fence is an action where that is how the agent acts; where it has tools, it is an example.
def test_fences_are_actions_of_agents_without_tools() -> None:
    shown, run = says("Run it with:\n```bash\nls\n```"), acts("Bash", command="ls")
    assert same(shown, run, []) and not same(shown, run, TOOLS) and same(shown, says("Done."), TOOLS)
    assert same(says("```\nls\n```"), run, [])
    twice = says("```bash\necho a\n```\n```bash\nrm b\n```")
    assert not same(twice, says("```bash\necho a rm b\n```"), [])
    assert not same(twice, says("```bash\necho a\nrm b\n```"), [])


# Where an agent has two shells, a command in one is not the same in the other.
def test_a_command_in_another_shell() -> None:
    both = [{"function": {"name": "bash"}}, {"function": {"name": "terminal"}}]
    assert not same(acts("bash", command="ls"), acts("terminal", command="ls"), both)


# A call more, or calls in another order, are another action.
def test_the_order_of_calls() -> None:
    def turn(*calls: dict) -> dict:
        return {"role": "assistant", "tool_calls": list(calls)}

    one, two = call("a", {}), call("b", {}, "c2")
    assert not same(turn(one, two), turn(two, one)) and not same(turn(one, two), turn(one, two, one))


def test_an_empty_action_has_no_form() -> None:
    assert canonical(says("  "), []) is None


# Whatever is written as arguments, there is a form, and it is hashable.
@given(st.text(), st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_any_call_has_a_form(name: str, arguments: str) -> None:
    action = {"tool_calls": [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}]}
    assert digest(canonical(action, [])) and hash(canonical(action, [])) is not None


# Nor is there text that breaks a form: half of a surrogate pair, and JSON that is nested as deep as it may be.
@pytest.mark.parametrize(
    "arguments", ['{"command": "\\ud800"}', *('{"q": ' + "[" * n + "]" * n + "}" for n in (900, 990))]
)
def test_a_form_can_be_written_down(arguments: str) -> None:
    function = {"name": "bash", "arguments": arguments}
    assert digest(canonical({"tool_calls": [{"id": "c", "type": "function", "function": function}]}, []))


def votes_of(teacher: str, form: str) -> list[Vote]:
    """One teacher's vote; its family is the word before a dash."""
    free = {"form": "", "agrees": False, "answer": "", "cached": True, "cost_usd": 0.0}
    record = VoteRecord(teacher=teacher, family=teacher.split("-")[0], **free)
    return [Vote(record=record, form=(form,), message={})]


# settled() by enumeration: no continuation of the votes may change the majority.
@given(st.integers(2, 5), st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("abc")), max_size=5))
def test_settled_means_no_vote_can_change_it(planned: int, cast: list[tuple[str, str]]) -> None:
    votes = [vote for each, (family, form) in enumerate(cast[:planned]) for vote in votes_of(f"{family}-{each}", form)]
    outcomes = {majority(votes, planned)} if len(votes) == planned else set()
    frontier = [votes] if len(votes) < planned else []
    while frontier:
        grown = [[*some, *votes_of(f"new{len(some)}", form)] for some in frontier for form in "abcde"]
        outcomes |= {majority(some, planned) for some in grown if len(some) == planned}
        frontier = [some for some in grown if len(some) < planned]
    assert settled(votes, planned) == (len(outcomes) == 1)


# A majority within one family is none; with one vote a family only the count matters.
def test_a_majority_needs_two_families() -> None:
    gpt, again, qwen = votes_of("gpt-a", "x"), votes_of("gpt-b", "x"), votes_of("qwen", "x")
    assert majority([*gpt, *votes_of("qwen", "y"), *again], 3) is None
    assert majority([*gpt, *qwen, *votes_of("gpt-b", "y")], 3) == ("x",)
    assert not settled([*gpt, *again], 3) and settled([*gpt, *qwen], 3)


# 1 - (k + 1/2) / (n + 1), the figures of the design; never above a half.
def test_epsilon() -> None:
    assert [epsilon(2, 2), epsilon(2, 3), epsilon(3, 3)] == [pytest.approx(1 / 6), 0.375, 0.125]
    assert epsilon(1, 3) == 0.5


@pytest.mark.parametrize(
    ("said", "way", "calls"),
    [
        (xml("bash", command="ls"), "xml", [("bash", {"command": "ls"})]),
        (xml("edit", path="\na\n", new="\n\n  b\n"), "xml", [("edit", {"path": "a", "new": "\n  b"})]),
        (xml("submit"), "xml", [("submit", {})]),
        (xml("a") + xml("b", x="1"), "xml", [("a", {}), ("b", {"x": "1"})]),
        (xml("write", text="```bash\nls\n```"), "xml", [("write", {"text": "```bash\nls\n```"})]),
        (xml("a", "Not:\n```bash\nls\n```"), "xml", [("a", {})]),
        ("```bash\ncat <<E\n<function=a>\nE\n```", "fence", [("bash", {"command": "cat <<E\n<function=a>\nE\n"})]),
        (xml("a", x="</function>"), "broken", []),
        (xml("a", x="<function=b></function>"), "broken", []),
        (xml("a").removesuffix("</function>"), "broken", []),
        ("<function=a>\nls\n</function>", "broken", []),
        ("<function=a><parameter=x>1</function>", "broken", []),
        ("<function=>", "broken", []),
    ],
)
def test_what_a_text_does(said: str, way: str, calls: list) -> None:
    acts = actions_in_text(said)
    assert acts == (way, calls)
    assert way_of([says("Hm."), says(said), says("Done.")]) == (None if way == "broken" else way)


# Line breaks beside the tags do not count, the command does; and a call in another way of writing is another action.
def test_forms_of_calls_in_text() -> None:
    def form(said: str, tools: list | None = None):
        return canonical(says(said), tools or [])

    one, other = xml("bash", "Let me look.", command="ls -l"), xml("bash", "So.", command="\nls  -l\n")
    assert form(one) == form(other) != form(xml("bash", command="ls"))
    assert form(one) != form("```bash\nls -l\n```")
    assert form(xml("submit")) == form("Done.")
    offered = [{"function": {"name": "bash"}}]
    assert form(one, offered) != form(other, offered)  # where tools are offered, a call in the text is none


PARTS = ["<function=a>", "</function>", "<parameter=b>", "</parameter>", "```bash\n", "```", "x"]


# Whatever a text holds, it has a reading, and a form that is hashable.
@given(st.lists(st.sampled_from(PARTS)))
def test_any_text_can_be_read(parts: list[str]) -> None:
    acts = actions_in_text("".join(parts))
    assert acts is None or (acts[0] == "broken") == (not acts[1])
    assert hash(canonical(says("".join(parts)), [])) is not None


WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=4)
BLANKS = st.sampled_from([" ", "  ", "\t", " \\\n"])


@pytest.mark.parametrize(("first", "second"), COMMANDS["same"])
def test_the_same_command(first: str, second: str) -> None:
    assert shell(first) == shell(second)


@pytest.mark.parametrize(("first", "second"), COMMANDS["different"])
def test_another_command(first: str, second: str) -> None:
    assert shell(first) != shell(second)


# Python's own quoting as oracle: words come back whatever stands between them, and other words are another form.
@given(WORDS, WORDS, st.data())
def test_words_are_told_apart(words: list[str], others: list[str], data: st.DataObject) -> None:
    spaced = "".join(shlex.quote(word) + data.draw(BLANKS) for word in words)
    assert shell(spaced) == shell(shlex.join(words)) and len(shell(spaced)) == len(words)
    assert (shell(shlex.join(words)) == shell(shlex.join(others))) == (words == others)


# Any character inside quotes, and any character of a here-document, counts; so does whether one is quoted at all that
# could mean something.
@given(st.text(max_size=9), st.text(max_size=9), st.sampled_from(["'", "cat <<'END'\n"]))
def test_every_quoted_character_counts(first: str, second: str, opening: str) -> None:
    closing = "'" if opening == "'" else "\nEND\n"
    assume(first != second and closing.strip() not in first + second)
    assert shell(f"{opening}{first}{closing}") != shell(f"{opening}{second}{closing}")


@given(st.text("ab", max_size=3), st.sampled_from("*?[]{}~$`\\!#;&|<>()\n \t="), st.text("ab", max_size=3))
def test_quotes_around_what_is_active_count(before: str, active: str, after: str) -> None:
    assert shell(f"x {before}'{active}'{after}") != shell(f"x {before}{active}{after}")


# A form says all that the command says but for spaces and quotes (and the line that ends a here-document).
@given(st.text("ab '\"\\$();<>\n#2={}*`", max_size=12))
def test_nothing_but_spaces_and_quotes_is_left_out(command: str) -> None:
    assume("<<" not in command)
    said = "".join(token if isinstance(token, str) else token[1] for token in shell(command))
    assert re.sub(r"[\s'\"\\]", "", said) == re.sub(r"[\s'\"\\]", "", command)
