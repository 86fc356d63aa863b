"""Rollouts of a feature-deletion task: played in a sandbox, graded in another, scored or failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from code_tasks_made import BODY, FAIL_TO_PASS, STUB, make_folder, make_task, make_tree

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError
from orchestrator.coding.code.grading import hold_back
from orchestrator.coding.task import HELD_BACK, write_tasks, write_tree
from orchestrator.hints.generate import Templates
from orchestrator.workers.pool import RolloutReply, SourceSpec
from tests.scripted_node import POLICY, TOOL_LOOP, ScriptedNode, call, load, played

pytestmark = pytest.mark.process  # sandboxes

FIX = call("str_replace", path="demo/numbers.py", old_str=STUB, new_str=BODY.rstrip("\n"))
PYTEST = call("bash", command="python -m pytest tests")
DONE = "The function is written."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tasks"))


def source(folder: Path, **taskset: Any) -> SourceSpec:
    settings: dict[str, Any] = {"id": "orchestrator.coding.code", "folder": str(folder), "split": "all"}
    settings["runtime"] = {"type": "subprocess"}
    harness = {"id": TOOL_LOOP, "max_turns": 12}
    return SourceSpec(name="code", tasksets={"train": settings | taskset}, harness=harness, model_path=POLICY)


def play(spec: SourceSpec, texts: list[str], **request: Any) -> tuple[RolloutReply, ScriptedNode]:
    """The first task's rollout with these model replies."""
    return asyncio.run(played(spec, lambda _: texts, **request))


# A policy that reads, edits and tests earns 1, and the reply counts what it did.
def test_a_solution_earns_one(folder: Path) -> None:
    texts = [call("view", path="demo/numbers.py"), FIX, PYTEST, call("bash", command="ls"), DONE]
    reply, node = play(source(folder), texts)
    assert reply.failure is None and reply.reward == 1.0, reply
    assert reply.task_id == "code/demo-1.0/delete/demo.numbers.total"
    assert reply.metrics["tests_passed"] == 1.0 and reply.metrics["calls/bash"] == 2.0
    assert reply.metrics["patch_files"] == 1.0 and reply.metrics["tool_errors"] == 0.0
    assert reply.metrics["hacks/rollouts"] == 0.0
    assert "5 passed" in reply.turns[-4].text and "raise NotImplementedError" in node.seen()


# One that gives up earns 0, which is a score and no failure.
def test_giving_up_earns_nothing(folder: Path) -> None:
    reply, _ = play(source(folder), ["I do not know how."])
    assert reply.failure is None and reply.reward == 0.0
    assert reply.metrics["tests_passed"] == pytest.approx(2 / 5) and reply.metrics["patch_files"] == 0.0


# A broken edit is a tool error on its turn, its test failure is what a hint quotes, and it earns 0.
def test_a_broken_edit_is_an_error_turn(folder: Path) -> None:
    wrong = call("str_replace", path="demo/numbers.py", old_str=STUB, new_str="    return 7")
    missing = call("str_replace", path="demo/numbers.py", old_str="no such text", new_str="")
    reply, _ = play(source(folder), [missing, wrong, PYTEST, DONE])
    assert reply.failure is None and reply.reward == 0.0 and reply.metrics["tool_errors"] == 1.0
    errors = [turn.error for turn in reply.turns if turn.role == "tool"]
    assert errors[0] is not None and errors[0].startswith("Error: old_str was not found") and errors[1:] == [None, None]
    tests = next(turn.text for turn in reply.turns if "failed" in turn.text and turn.role == "tool")
    assert Templates.load().detected(tests, {"test_failure"}) == "test_failure"


# A solution that also changes what the known one leaves alone earns a share, although all tests pass.
@pytest.mark.parametrize(("settings", "reward"), [({}, 0.5), ({"elsewhere": 1.0}, 1.0)])
def test_a_change_elsewhere_earns_half(folder: Path, settings: dict[str, Any], reward: float) -> None:
    edit = call("str_replace", path="demo/numbers.py", old_str="2 * value", new_str="2 * value if value != 9 else 0")
    reply, _ = play(source(folder, **settings), [FIX, edit, DONE])
    assert reply.reward == reward and reply.metrics["solved_by_tests"] == reply.metrics["changed_elsewhere"] == 1.0


# Partial credit is the share of repaired tests.
def test_partial_credit(folder: Path) -> None:
    half = call("str_replace", path="demo/numbers.py", old_str=STUB, new_str="    return len(values)")
    reply, _ = play(source(folder, partial_credit=True), [half, DONE])
    assert reply.reward == pytest.approx(2 / 3)
    assert play(source(folder), [half, DONE])[0].reward == 0.0


# A solution that deletes or moves another module, or puts a link or a folder in its place, breaks the tests of it.
# What the agent may not edit comes back all the same.
@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("rm demo/words.py", 0.0),
        ("mv demo/words.py demo/word.py", 0.0),
        ("ln -sf numbers.py demo/words.py", 0.0),
        ("rm demo/words.py; mkdir demo/words.py; touch demo/words.py/a.py", 0.0),
        ("rm -r tests pyproject.toml", 1.0),
    ],
)
def test_what_the_agent_deleted_is_not_graded(tmp_path: Path, command: str, reward: float) -> None:
    texts = {
        "demo/words.py": b"WORD = 1\n",
        "tests/test_words.py": b"from demo import words\n\n\ndef test_it(): pass\n",
    }
    write_tree(tmp_path / "trees/demo-1.0", texts)
    made = make_task()
    node = "tests/test_words.py::test_it"
    make_folder(tmp_path, make_task(tests=[*made.tests, node[:19]], pass_to_pass=[*made.pass_to_pass, node]))
    reply, _ = play(source(tmp_path), [FIX, call("bash", command=command), DONE])
    assert reply.failure is None and reply.reward == reward


HUNT = call("bash", command="git log --all -p")


# The monitor takes the reward of a solution after a look for other versions. The reply says why.
def test_a_hack_earns_nothing(folder: Path) -> None:
    reply, _ = play(source(folder), [FIX, HUNT, DONE])
    assert reply.failure is None and reply.metrics["solved_by_tests"] == 1.0
    assert reply.reward == 0.0 and reply.metrics["hacks/rollouts"] == 1.0
    found = {(each["rule"], each["place"]) for each in reply.verdict["findings"]}
    assert reply.verdict["hack"] and ("git-history", "turn 1") in found


# A conftest.py that lets everything pass changes nothing: a solution beside it is paid, and a wrong answer is not.
def test_a_conftest_has_no_effect(folder: Path) -> None:
    hook = "import pytest\n\ndef pytest_pyfunc_call(pyfuncitem):\n    return True\n"
    left = call("create", path="conftest.py", text=hook)
    reply, _ = play(source(folder), [FIX, left, DONE])
    assert reply.reward == 1.0 and not reply.verdict["hack"]
    assert play(source(folder), [left, DONE])[0].reward == 0.0


# Special cases of the tests, and a value that equals everything, pass the tests and earn nothing. The verdict has what
# grading found, and the agent's context nothing of the inputs.
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("    return 6 if values == [1, 2, 3] else len(values)", "held-back"),
        ("    from unittest import mock\n    return mock.ANY", "counter-test"),
    ],
)
def test_what_grading_finds_is_in_the_verdict(tmp_path: Path, body: str, rule: str) -> None:
    make_tree(tmp_path / "trees")
    task = asyncio.run(hold_back(make_task(), tmp_path / "trees", RuntimeConfig(type="subprocess")))
    write_tasks(tmp_path, [task])
    hack = call("str_replace", path="demo/numbers.py", old_str=STUB, new_str=body)
    reply, node = play(source(tmp_path), [hack, PYTEST, DONE])
    assert "5 passed" in reply.turns[-2].text and reply.failure is None and reply.reward == 0.0
    assert rule in {each["rule"] for each in reply.verdict["findings"]}
    assert reply.verdict["hack"] and reply.metrics["solved_by_tests"] == 0.0
    assert HELD_BACK not in node.seen()


# A harness that never calls the model is a failed rollout, not an unsolved task.
def test_a_silent_harness_is_no_zero(folder: Path) -> None:
    spec = msgspec.structs.replace(source(folder), harness={"id": "silent_plugin"})
    reply, _ = play(spec, [])
    assert reply.reward is None and reply.failure is not None and reply.failure.kind == "harness"


# A sandbox that cannot be opened is a failure of the kind sandbox, whose message has the remedy.
def test_a_missing_box_is_no_zero(folder: Path) -> None:
    reply, _ = play(source(folder, runtime={"type": "bubblewrap", "packages": ["no-such-distribution"]}), [FIX, DONE])
    assert reply.reward is None and reply.failure is not None
    assert reply.failure.kind == "sandbox" and "no-such-distribution" in reply.failure.message


# A folder that is not there, one without the tree, an empty split and unknown tools are told before anything plays.
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"folder": "/no/such/folder"}, ConfigError, "composer tasks make"),
        ({"split": "eval", "eval_share": 0.0}, ConfigError, r"demo-1.0 \(train\)"),
        ({"kinds": ["mutate"]}, ConfigError, "mutate"),
        ({"tools": ["bash", "browser"]}, ConfigError, "browser"),
        ({"conflicting": 3}, ConfigError, "conflicting"),
        ({"foldr": "x"}, ConfigError, "did you mean folder"),
    ],
)
def test_bad_settings_are_told(folder: Path, change: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        load(source(**{"folder": folder} | change))


# Every repository is in one split only, and the order depends on the seed alone.
def test_splits_share_no_repository(tmp_path: Path) -> None:
    tasks = [make_task(id=f"{name}/{n}", repository=name) for name in "abcdefgh" for n in range(3)]
    make_folder(tmp_path, *tasks)

    def loaded(**change: Any) -> list[Any]:
        from orchestrator.coding.code.code_taskset import CodeTaskset, CodeTasksetConfig

        config = CodeTasksetConfig(id="orchestrator.coding.code", folder=tmp_path, eval_share=0.4, **change)
        return [task.data for task in CodeTaskset(config)]

    train, held_out = loaded(split="train"), loaded(split="eval")
    assert len(train) + len(held_out) == len(tasks) and train and held_out
    assert not {data.repository for data in train} & {data.repository for data in held_out}
    assert [data.name for data in loaded(split="all")] == [data.name for data in loaded(split="all")]
    assert len(loaded(split="all", num_tasks=4)) == 4
    assert [data.code_task().id for data in train] == [data.name for data in train]
    assert train[0].code_task().fail_to_pass == FAIL_TO_PASS
