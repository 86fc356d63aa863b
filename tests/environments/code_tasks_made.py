"""The small package of demo.toml, and tasks on it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.coding.task import CodeTask, write_tasks, write_tree

FILES = tomllib.loads(Path(__file__).with_name("demo.toml").read_text())
TOTAL, MORE_TESTS = FILES["demo/numbers.py"], FILES["tests/test_more.py"]
BODY = TOTAL[TOTAL.index("    result = 0") : TOTAL.index("\n\n\ndef twice")]
STUB = "    raise NotImplementedError"
FAIL_TO_PASS = ["tests/test_numbers.py::test_total"] + [
    f"tests/test_numbers.py::test_total_of_ones[{size}]" for size in (0, 4)
]
PASS_TO_PASS = ["tests/test_numbers.py::TestNumbers::test_twice", "tests/test_more.py::TestTwice::test_of_text"]


def make_tree(trees: Path, name: str = "demo-1.0") -> Path:
    write_tree(trees / name, {path: text.encode() for path, text in FILES.items()})
    return trees / name


def make_task(**changes: Any) -> CodeTask:
    """The task to write `total` again."""
    fields: dict[str, Any] = {
        "id": "demo-1.0/delete/demo.numbers.total",
        "kind": "delete",
        "repository": "demo-1.0",
        "tree": "demo-1.0",
        "prompt": "Implement demo.numbers.total: the sum of the values, 0 for none.",
        "start": {"demo/numbers.py": TOTAL.replace(BODY, STUB)},
        "solution": {"demo/numbers.py": TOTAL},
        "editable": ["demo/**/*.py"],
        "tests": ["tests/test_numbers.py", "tests/test_more.py"],
        "fail_to_pass": FAIL_TO_PASS,
        "pass_to_pass": PASS_TO_PASS,
        "timeout_s": 100.0,
    }
    return msgspec.convert(fields | changes, CodeTask)


def make_folder(folder: Path, *tasks: CodeTask) -> Path:
    make_tree(folder / "trees")
    write_tasks(folder, tasks or [make_task()])
    return folder
