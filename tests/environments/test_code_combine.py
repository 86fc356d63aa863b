"""Combinations of proven tasks: harder ones, made when played, that only the repair of every part solves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.code.combine import combine, combined_difficulty, draw_combinations
from orchestrator.coding.code.grading import grade
from orchestrator.coding.task import CodeTask

NAMES = ("double", "triple", "negate", "square")
BODIES = {"double": "2 * n", "triple": "3 * n", "negate": "-n", "square": "n * n"}


def source(*missing: str) -> str:
    bodies = {name: "raise NotImplementedError" if name in missing else f"return {BODIES[name]}" for name in NAMES}
    return "\n\n".join(f"def {name}(n):\n    {body}\n" for name, body in bodies.items())


TESTS = "from numbers_made import *\n" + "".join(
    f"\n\ndef test_{name}():\n    assert {name}(3) == {eval(BODIES[name], {'n': 3})}\n" for name in NAMES
)


def deletion(name: str, **more: object) -> CodeTask:
    return CodeTask(
        **{
            "id": f"made/{name}",
            "kind": "delete",
            "repository": "made",
            "tree": "made",
            "prompt": f"Write {name}.",
            "start": {"numbers_made.py": source(name)},
            "solution": {"numbers_made.py": source()},
            "editable": ["numbers_made.py"],
            "tests": ["test_numbers_made.py"],
            "fail_to_pass": [f"test_numbers_made.py::test_{name}"],
            "pass_to_pass": [f"test_numbers_made.py::test_{other}" for other in NAMES if other != name],
            "difficulty": 0.5,
            "symbols": [name],
            **more,
        }
    )


PRISTINE = {"numbers_made.py": source()}


def test_parts_become_one_task():
    # All functions are missing at once. A test that fails without one part must pass in the end.
    task = combine([deletion("double"), deletion("square"), deletion("negate")], PRISTINE)
    assert task.start == {"numbers_made.py": source("double", "square", "negate")}
    assert task.solution == PRISTINE
    assert task.fail_to_pass == [f"test_numbers_made.py::test_{name}" for name in ("double", "square", "negate")]
    assert task.pass_to_pass == ["test_numbers_made.py::test_triple"]
    assert task.difficulty == pytest.approx(1 - 0.5**3)
    assert all(f"Write {name}." in task.prompt for name in ("double", "square", "negate"))


def test_parts_that_meet_in_a_line_leave_the_first():
    # Two edits of one body have no common result; the task is then the one that can be made.
    other = deletion("double", id="made/other", start={"numbers_made.py": source().replace("2 * n", "2 + n")})
    task = combine([deletion("double"), other], PRISTINE)
    assert (task.start, task.prompt) == ({"numbers_made.py": source("double")}, "Write double.")
    assert task.id == "made/double + made/other"


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_merging_is_deleting_together(names):
    # Whatever the parts and their order, the merged text is the tree's without all of them.
    for order in (sorted(names), sorted(names, reverse=True)):
        assert combine([deletion(name) for name in order], PRISTINE).start == {"numbers_made.py": source(*names)}


@given(st.integers(0, 30), st.integers(0, 99))
def test_the_stock_is_drawn_by_its_seed(count, seed):
    # Different combinations within one tree each, the same for every worker of a run.
    trees = {"a": list(range(6)), "b": [7, 8], "c": [9]}
    drawn = draw_combinations(trees, count, seed)
    assert drawn == draw_combinations(trees, count, seed) and len(set(drawn)) == len(drawn) <= count
    assert all(len(tasks) >= 2 and any(set(tasks) <= set(tree) for tree in trees.values()) for tasks in drawn)


def test_the_difficulty_of_a_combination_needs_that_of_each_part():
    assert combined_difficulty([0.2, None]) is None
    assert combined_difficulty([0.2, 0.5]) == pytest.approx(0.6)


@pytest.mark.process
def test_only_the_repair_of_every_part_solves_a_combination(tmp_path: Path):
    # Graded in a sandbox: one part repaired is no solution.
    tree = tmp_path / "made"
    tree.mkdir()
    (tree / "numbers_made.py").write_text(source())
    (tree / "test_numbers_made.py").write_text(TESTS)
    task = combine([deletion("double"), deletion("square")], PRISTINE)

    async def solved(text: str) -> bool:
        patch = {"numbers_made.py": text.encode()}
        return (await grade(task, tmp_path, patch, RuntimeConfig(type="subprocess"))).solved

    assert [asyncio.run(solved(text)) for text in (source(), source("square"), source("double", "square"))] == [
        True,
        False,
        False,
    ]


@pytest.mark.process
def test_the_stock_stands_behind_the_single_tasks(tmp_path: Path):
    # A task set has its tasks first, then the combinations, with their estimates; each is made from the task file.
    from orchestrator.coding.code.taskset import CodeTaskset, CodeTasksetConfig
    from orchestrator.coding.task import write_tasks

    tree = tmp_path / "trees" / "made"
    tree.mkdir(parents=True)
    (tree / "numbers_made.py").write_text(source())
    write_tasks(tmp_path, [deletion(name) for name in NAMES])
    config = CodeTasksetConfig(id="orchestrator.coding.code", folder=tmp_path, split="all", combined=3)
    tasks = list(CodeTaskset(config))
    assert len(tasks) == 7 and [task.data.kind for task in tasks[4:]] == ["combined"] * 3
    assert all(task.data.difficulty > 0.5 for task in tasks[4:])
    made = tasks[-1].data.code_task()
    assert (made.id, made.prompt) == (tasks[-1].data.name, tasks[-1].data.prompt)
    assert len(made.symbols) >= 2
