"""Which turns went wrong, of which kind, and the hints that templates give."""

from __future__ import annotations

import pytest

from composer_prime.errors import ConfigError
from orchestrator.environments.toolsmith.taskset import generate, run_call
from orchestrator.hints.generate import ErrorTurn, Templates, find_errors
from orchestrator.rollouts.groups import messages_before, tool_replies, turn_error_rate
from orchestrator.workers.call_schema import violation
from orchestrator.workers.pool import MessageRecord, ToolCall
from tests.rollouts_made import TOOLS, Step, call, play

ALL = ["tool_error", "exception", "test_failure", "schema"]
TEMPLATES = Templates.load()
GOOD = Step(call("add", '{"a": 1, "b": 2}'), "3", calls=[("add", '{"a": 1, "b": 2}')])


def errors(steps: list[Step], detect=ALL, **options) -> list[ErrorTurn]:
    return find_errors(TEMPLATES, set(detect), play("tiny", "Add.", steps, **options).rollout)


def test_the_turn_before_the_error_is_the_one_that_went_wrong():
    # Of three turns the second was answered by an error: its number, its tool, what the tool said.
    wrong = Step(call("plus", "{}"), "Tool not found: plus", error=True, calls=[("plus", "{}")])
    [found] = errors([GOOD, wrong, Step("3")])
    assert (found.turn, found.kind, found.tool, found.text) == (1, "tool_not_found", "plus", "Tool not found: plus")
    assert found.message == 3 and found.tools == TOOLS


def _toolsmith(name: str, arguments: str) -> str:
    episode = generate(seed=3, difficulty=1, split="train")
    return run_call(episode, name.replace("FIRST", episode.tools[0].name), arguments)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (_toolsmith("nope", "{}"), "tool_not_found"),
        (_toolsmith("FIRST", "{"), "bad_json"),
        (_toolsmith("FIRST", '{"zzz": 1}'), "argument_name"),
        (_toolsmith("FIRST", "{}"), "argument_name"),
        ("Wrong type for argument a: expected integer, got string", "argument_type"),
        ("Not a number: x", "argument_type"),
        ("Error: unknown tool 'plus'", "tool_not_found"),
        ("1 validation error for add\na\n  Input should be a valid integer", "argument_type"),
        ("the disk is on fire", "tool_error"),
        ("Traceback (most recent call last):\n  File 'x'\nValueError: no", "exception"),
    ],
)
def test_error_texts_have_kinds(text, kind):
    assert [found.kind for found in errors([Step("x", text, error=True), Step("3")])] == [kind]


@pytest.mark.parametrize(
    ("text", "kind", "detect"),
    [
        ("ran\nTraceback (most recent call last):\n  File 'a.py'\npkg.OddError: no\n", "exception", "exception"),
        ("..F\nFAILED tests/test_a.py::test_b - assert 1 == 2\n1 failed", "test_failure", "test_failure"),
        ("    def f():\nE   AssertionError: 3 != 4\n", "test_failure", "test_failure"),
        ("--- FAIL: TestSum (0.00s)\nFAIL", "test_failure", "test_failure"),
    ],
)
def test_failures_inside_good_answers_are_found_by_their_text(text, kind, detect):
    # The environment calls these answers fine; each kind can be switched off on its own.
    assert [found.kind for found in errors([Step("x", text), Step("3")])] == [kind]
    assert errors([Step("x", text), Step("3")], [name for name in ALL if name != detect]) == []


def test_good_answers_are_no_errors():
    # Nor are turns without an answer, and words that only sound alike.
    for text in ("3", "0 errors, 0 failures", "no exception was raised", "class ValueError(Exception): pass"):
        assert errors([Step("x", text), Step("3")]) == []


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("add", '{"a": 1, "b": 2}', None),
        ("add", '{"a": 1.0, "b": 2}', None),
        ("minus", '{"whatever": []}', None),
        ("plus", "{}", "tool_not_found"),
        ("add", '{"a": 1', "bad_json"),
        ("add", "[1]", "bad_json"),
        ("add", '{"a": 1}', "argument_name"),
        ("add", '{"a": 1, "b": 2, "c": 3}', "argument_name"),
        ("add", '{"a": 1, "b": "2"}', "argument_type"),
        ("add", '{"a": 1, "b": true}', "argument_type"),
        ("add", '{"a": 1, "b": null}', "argument_type"),
        ("add", '{"a": 1, "b": 2.5}', "argument_type"),
    ],
)
def test_calls_that_break_their_schema(name, arguments, kind):
    found = violation(ToolCall(id="c", name=name, arguments=arguments), TOOLS)
    assert (found and found[0]) == kind
    assert violation(ToolCall(id="c", name=name, arguments=arguments), []) is None


def test_a_tool_that_takes_a_broken_call_does_not_hide_it():
    # The tool answered "3" to a string; the schema asked for an integer.
    step = Step("x", "3", calls=[("add", '{"a": "1", "b": 2}')])
    assert [found.kind for found in errors([step, Step("3")])] == ["argument_type"]
    assert errors([step, Step("3")], ["tool_error"]) == []


def test_an_error_that_no_template_knows_is_named_by_the_call_that_caused_it():
    # The environment's own words for a missing tool and for a wrong type; the schema knows better, so there is a hint.
    missing = Step("x", "KeyError: 'plus'", error=True, calls=[("plus", "{}")])
    typed = Step("x", "add() refused its input", error=True, calls=[("add", '{"a": "1", "b": 2}')])
    found = errors([missing, typed, Step("3")])
    assert [error.kind for error in found] == ["tool_not_found", "argument_type"]
    assert [TEMPLATES.fill(error) for error in found] == [
        "Reminder: Available tools are: add, minus",
        "Reminder: The arguments of add are: a (integer), b (integer)",
    ]
    assert [error.kind for error in errors([missing, Step("3")], ["tool_error"])] == ["tool_error"]
    sound = Step("x", "the disk is on fire", error=True, calls=[("add", '{"a": 1, "b": 2}')])
    assert [error.text for error in errors([sound, Step("3")])] == ["the disk is on fire"]


def test_the_last_turn_of_a_failed_rollout_is_wrong_where_that_is_asked_for():
    # Not of one that got a reward, and not beside an error that the turn has anyway.
    assert errors([GOOD, Step("9")]) == []
    [found] = errors([GOOD, Step("9")], ["failed"])
    assert (found.turn, found.kind) == (1, "failed")
    assert errors([GOOD, Step("9")], ["failed"], reward=1.0) == []
    [found] = errors([Step("x", "Tool not found: x", error=True)], ["failed", "tool_error"])
    assert found.kind == "tool_not_found"


def test_the_last_turn_by_what_it_is():
    # An answer right after an error gives up; whatever rule is asked for first, the most telling kind is given. A turn
    # with calls does not give up. Of a solved rollout only `every` names the last turn.
    bad = Step("x", "the disk is on fire", error=True, calls=[("add", '{"a": 1, "b": 2}')])
    ends = ["every", "failed", "gave_up"]
    assert [(e.turn, e.kind) for e in errors([bad, Step("9")], ends)] == [(1, "gave_up")]
    assert [e.kind for e in errors([bad, GOOD], ends)] == ["failed"]
    assert [e.kind for e in errors([GOOD, Step("9")], ends)] == ["failed"]
    assert errors([GOOD, Step("9")], ["gave_up"]) == []
    assert [e.kind for e in errors([bad, Step("9")], ends, reward=0.5)] == ["every"]
    assert errors([bad, Step("9")], ["failed", "gave_up"], reward=0.5) == []


def test_a_repeated_call_is_an_error():
    # The same calls with the same reply, however far apart. Another reply is news, and so are other arguments.
    other = Step("x", "4", calls=[("add", '{"a": 1, "b": 2}')])
    more = Step("x", "3", calls=[("add", '{"a": 2, "b": 1}')])
    assert [(e.turn, e.kind) for e in errors([GOOD, more, other, GOOD, Step("3")], ["repeated"])] == [(3, "repeated")]
    assert errors([GOOD, more, other, Step("3"), Step("3")], ["repeated"]) == []


def filled(text: str, tool: str | None = "add") -> str | None:
    kind = TEMPLATES.kind_of(text)
    return TEMPLATES.fill(ErrorTurn(message=1, turn=0, kind=kind, text=text, tool=tool, tools=TOOLS))


def test_templates_say_what_the_models_were_taught_to_heed():
    # These are the forms of infra/tiny_models/demonstrate.py, word for word.
    assert filled("Tool not found: plus") == "Reminder: Available tools are: add, minus"
    assert filled("Missing argument: b") == "Reminder: The arguments of add are: a (integer), b (integer)"
    assert filled("Wrong type for argument a: expected integer, got string") == filled("Missing argument: b")
    assert filled("Invalid JSON in tool call") == "Reminder: A tool call is one JSON object with a name and arguments."


def test_templates_quote_the_failing_test_and_the_exception():
    assert filled("FAILED tests/test_a.py::test_b - assert 1 == 2") == (
        "Reminder: This test fails after the next step: tests/test_a.py::test_b - assert 1 == 2"
    )
    assert filled("Traceback (most recent call last):\n  x\nKeyError: 'a'") == (
        "Reminder: The next step may fail with KeyError: 'a'"
    )


def test_a_template_without_its_field_falls_away():
    # No schema, no argument list; and no tools, no list of tools.
    assert filled("Missing argument: b", tool="unheard_of") is None
    error = ErrorTurn(message=1, turn=0, kind="tool_not_found", text="Tool not found: x")
    assert TEMPLATES.fill(error) is None


def test_a_users_templates_come_first():
    # Data only: a kind of its own, found where the environment saw no error, with a group of the pattern in the hint.
    hint = "Mind the rule $rule; it costs $$1"
    table = {"kind": "lint", "detects": "test_failure", "pattern": "(?m)^lint: (?P<rule>.*)$", "hint": hint}
    templates = Templates.load([table])
    played = play("tiny", "Add.", [Step("x", "ok\nlint: line too long"), Step("3")])
    [found] = find_errors(templates, set(ALL), played.rollout)
    assert found.kind == "lint"
    assert templates.fill(found) == "Mind the rule line too long; it costs $1"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"hint": "x", "pattern": "("}, "not a regular expression"),
        ({"hint": "$"}, r"a lone \$"),
        ({"hint": "$nothing"}, r"uses \['nothing'\], which is not a field"),
        ({"hint": "x", "detects": "exception"}, "together with a pattern"),
        ({"hnt": "x"}, "hint"),
    ],
)
def test_a_wrong_template_is_refused(table, said):
    with pytest.raises(ConfigError, match=rf"orchestrator\.hints\.template .*{said}"):
        Templates.load([{"kind": "a", **table}])


def test_a_pattern_that_backtracks_holds_nobody_up(caplog):
    # Under `re` it takes minutes and holds the interpreter. Here the search ends, and the next template is tried.
    templates = Templates.load([{"kind": "slow", "pattern": "(a|aa)+$", "hint": "x"}])
    assert templates.kind_of("Tool not found: " + "a" * 60 + "!") == "tool_not_found"
    assert "took more than 0.25 s and was given up" in caplog.text


# An undefined name, a missing module and a missing attribute are errors of their own kind, in Python's words or a
# linter's. A failed test stays a failed test: its own line comes first.
@pytest.mark.parametrize(
    "text",
    [
        "E   NameError: name 'frequency' is not defined",
        "ModuleNotFoundError: No module named 'demo.words'",
        "ImportError: cannot import name 'total' from 'demo' (demo/__init__.py)",
        "E   AttributeError: module 'demo' has no attribute 'total'",
        "demo/words.py:3:12: undefined name 'frequency'",
    ],
)
def test_a_missing_name_is_found(text):
    assert TEMPLATES.detected(text, {"exception"}) == "missing_name"
    failed = f"1 failed\nFAILED t.py::test_a - {text}\n{text}"
    assert TEMPLATES.detected(failed, {"exception", "test_failure"}) == "test_failure"


def test_answers_and_histories_follow_the_tree():
    # Two calls of one message are answered by two messages in a row; a branch has its own history.
    turns = [
        MessageRecord(role="user", text="q"),
        MessageRecord(role="assistant", text="a", parent=0),
        MessageRecord(role="tool", text="1", parent=1),
        MessageRecord(role="tool", text="bad", error="bad", parent=2),
        MessageRecord(role="assistant", text="b", parent=3),
        MessageRecord(role="assistant", text="c", parent=2),
    ]
    assert tool_replies(turns) == {1: [2, 3], 4: [], 5: []}
    assert [turn.text for turn in messages_before(turns, 4)] == ["q", "a", "1", "bad"]
    assert [turn.text for turn in messages_before(turns, 5)] == ["q", "a", "1"]


def test_the_turn_error_rate_counts_turns_not_messages():
    # One of two assistant turns failed, then none of one: a third in all. No turns give no rate.
    wrong = Step("x", "Tool not found: x", error=True)
    rollouts = [play("tiny", "Add.", [wrong, Step("3")]).rollout, play("tiny", "Add.", [Step("3")]).rollout]
    assert turn_error_rate(rollouts) == pytest.approx(1 / 3)
    assert turn_error_rate([]) is None
