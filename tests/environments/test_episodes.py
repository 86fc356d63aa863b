"""Claims about toolsmith's episodes and tools; nothing here needs a model."""

import json

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.environments import split_one_in
from orchestrator.environments.toolsmith.taskset import (
    ARGUMENT_NAMES,
    EVAL_SHARE,
    INVALID_JSON,
    OPERATIONS,
    Episode,
    generate,
    is_error,
    run_call,
)

seeds = st.integers(0, 2**53)
levels = st.integers(1, 3)
splits = st.sampled_from(["train", "eval"])


def episode_with(argument_type: str, *, arity: int = 2) -> Episode:
    """Some episode whose first step's tool has this argument type and arity."""
    for seed in range(1000):
        episode = generate(seed=seed, difficulty=1, split="train")
        tool = episode.tool_for(episode.steps[0].operation)
        if tool.argument_type == argument_type and len(tool.arguments) == arity:
            return episode
    raise AssertionError("no such episode")


@given(seeds, levels, splits)
def test_the_same_seed_gives_the_same_episode(seed, difficulty, split):
    # An episode is a function of (seed, difficulty, split) alone.
    first = generate(seed=seed, difficulty=difficulty, split=split)
    assert first == generate(seed=seed, difficulty=difficulty, split=split)
    assert len(first.steps) == difficulty
    assert len({tool.name for tool in first.tools}) == len(first.tools)


def test_a_known_episode_never_changes():
    # Saved runs name episodes by seed, so the generator's output is part of the contract.
    episode = generate(seed=7, difficulty=2, split="train")
    assert (episode.question, episode.answer) == ("Reverse 43, then take the larger of that and 26.", "34")


@given(seeds, levels)
def test_the_splits_share_no_question(seed, difficulty):
    # Train and eval are disjoint in their questions, whatever the seeds.
    for split in ("train", "eval"):
        assert split_one_in(EVAL_SHARE, generate(seed=seed, difficulty=difficulty, split=split).question) == split


@given(seeds, levels, splits)
def test_the_expert_calls_lead_to_the_answer(seed, difficulty, split):
    # Calling each step's tool with its arguments returns each step's result; the last is the answer.
    episode = generate(seed=seed, difficulty=difficulty, split=split)
    for step in episode.steps:
        tool = episode.tool_for(step.operation)
        reply = run_call(episode, tool.name, json.dumps(tool.encode(step.operands)))
        assert reply == str(step.result)
        assert not is_error(reply)
    assert reply == episode.answer


def test_each_kind_of_mistake_comes_back_as_its_error():
    # Wrong name, bad JSON, wrong argument, missing argument and wrong type each have their own text.
    episode = episode_with("integer")
    tool = episode.tool_for(episode.steps[0].operation)
    first, second = tool.arguments
    good = json.dumps({first: 4, second: 2})
    assert run_call(episode, "no_such_tool", good) == "Tool not found: no_such_tool"
    assert run_call(episode, tool.name, good[:-1]) == INVALID_JSON
    assert run_call(episode, tool.name, "[4, 2]") == INVALID_JSON
    assert run_call(episode, tool.name, json.dumps({"q": 4, second: 2})) == "Unknown argument: q"
    assert run_call(episode, tool.name, json.dumps({first: 4})) == f"Missing argument: {second}"
    for value, kind in (("4", "string"), (4.0, "number"), (True, "boolean"), (None, "null"), ([4], "array")):
        reply = run_call(episode, tool.name, json.dumps({first: value, second: 2}))
        assert reply == f"Wrong type for argument {first}: expected integer, got {kind}"


def test_a_string_tool_refuses_integers_and_words():
    # The drawn type is enforced both ways, and the text must be a number.
    episode = episode_with("string", arity=1)
    tool = episode.tool_for(episode.steps[0].operation)
    (only,) = tool.arguments
    wrong = run_call(episode, tool.name, json.dumps({only: 12}))
    assert wrong == f"Wrong type for argument {only}: expected string, got integer"
    assert run_call(episode, tool.name, json.dumps({only: "many"})) == "Not a number: many"
    assert is_error(run_call(episode, tool.name, json.dumps({only: "9" * 5000})))


@given(st.text(), st.text())
def test_no_call_raises(name, arguments):
    # Whatever a model writes, the tool answers with text.
    assert is_error(run_call(episode_with("integer"), name, arguments))


def test_names_tell_operations_apart():
    # A drawn tool name belongs to one operation only, so the prompt is never ambiguous.
    names = [name for operation in OPERATIONS for name in operation.names]
    assert len(names) == len(set(names))
    assert all(len(group) == arity for arity, groups in ARGUMENT_NAMES.items() for group in groups)
