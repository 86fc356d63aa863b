"""One function in one turn: the reply's code is graded in a sandbox. HumanEval and MBPP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import ConfigError

pytestmark = pytest.mark.process

ID = "orchestrator.coding.formats.programs"
SUBPROCESS = {"type": "subprocess"}
RECORDS: list[dict[str, Any]] = [
    {
        "task_id": "Made/0",
        "prompt": 'def middle(text: str) -> str:\n    """Return the middle character of a text."""\n',
        "entry_point": "middle",
        "canonical_solution": "    return text[len(text) // 2]\n",
        "test": "def check(candidate):\n    assert candidate('abc') == 'b'\n    assert candidate('x') == 'x'\n",
    },
    {
        "task_id": 7,
        "text": "Write a function that doubles a number.",
        "code": "def double(n):\n    return 2 * n",
        "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
    },
]


def written(tmp_path: Path) -> str:
    path = tmp_path / "functions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return str(path)


@pytest.mark.parametrize(
    ("index", "reply", "reward", "repaired"),
    [
        (0, "```python\ndef middle(text):\n    return text[len(text) // 2]\n```", 1.0, 1.0),
        (0, "    return text[len(text) // 2]\n", 1.0, 1.0),
        (0, "I would take the character at half the length.", 0.0, 0.0),
        (1, "```python\nimport math\n\ndef double(n):\n    return math.floor(0 * n)\n```", 0.5, 0.5),
    ],
)
async def test_a_reply_is_graded_by_the_records_tests(
    tmp_path: Path, index: int, reply: str, reward: float, repaired: float
) -> None:
    # A block, a continuation of the prompt, prose, and half of the assertions; an import is no hack here.
    from scripted_policy import play, source_spec_of

    spec = source_spec_of({"id": ID, "file": written(tmp_path), "partial_credit": True}, runtime=SUBPROCESS)
    result = await play(spec, lambda _: [reply], task_index=index)
    assert (result.failure, result.reward, result.metrics["tests_repaired"]) == (None, reward, repaired)
    assert result.task_id == ["programs/Made/0", "programs/mbpp/7"][index]
    solution = "text[len(text) // 2]"
    assert solution not in result.turns[1].text


async def test_the_same_file_is_played_with_tools_after_an_import(tmp_path: Path) -> None:
    # The agent finds solution.py with the prompt's beginning, runs code in its box, and edits the file.
    from scripted_policy import play, source_spec_of

    from orchestrator.coding.formats.conversion import ImportSettings, import_tasks

    kept, _ = await import_tasks(Path(written(tmp_path)), tmp_path / "tasks", ImportSettings())
    assert kept == 2
    taskset = {"id": "orchestrator.coding.code", "folder": str(tmp_path / "tasks"), "split": "all"}
    harness = {"id": "orchestrator.environments.tool_loop", "max_turns": 4}

    def call(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    def script(task_id: str) -> list[str]:
        solution = {
            "code/Made/0": "printf '    return text[len(text) // 2]\\n' >> solution.py",
            "code/mbpp/7": "printf 'def double(n):\\n    return 2 * n\\n' > solution.py",
        }[task_id]
        return [call("bash", command=solution), "Done."]

    for index in (0, 1):
        result = await play(source_spec_of(taskset, harness, runtime=SUBPROCESS), script, task_index=index)
        assert (result.failure, result.reward) == (None, 1.0), result.task_id


def test_a_file_of_another_form_says_which_are_known(tmp_path: Path) -> None:
    from scripted_policy import source_spec_of

    from orchestrator.workers.verifiers_adapter import Environment

    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*question, answer"):
        Environment(source_spec_of({"id": ID, "file": str(path)}), "train", None)
