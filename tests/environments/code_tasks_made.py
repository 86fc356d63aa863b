"""A small package with tests, and tasks on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from orchestrator.coding.task import CodeTask, write_tasks

TOTAL = '''"""Numbers."""


def total(values):
    """Return the sum of the values, 0 for none."""
    result = 0
    for value in values:
        result += value
    return result


def twice(value):
    return 2 * value
'''
BODY = TOTAL[TOTAL.index("    result = 0") : TOTAL.index("\n\n\ndef twice")]
STUB = "    raise NotImplementedError"
TESTS = """import unittest

import pytest

from demo.numbers import total, twice


def test_total():
    assert total([1, 2, 3]) == 6


@pytest.mark.parametrize("size", [0, 4])
def test_total_of_ones(size):
    assert total([1] * size) == size


class TestNumbers(unittest.TestCase):
    def test_twice(self):
        self.assertEqual(twice(4), 8)
"""
MORE_TESTS = """from demo.numbers import twice


class TestTwice:
    def test_of_text(self):
        assert twice("ab") == "abab"
"""
FAIL_TO_PASS = ["tests/test_numbers.py::test_total"] + [
    f"tests/test_numbers.py::test_total_of_ones[{size}]" for size in (0, 4)
]
PASS_TO_PASS = ["tests/test_numbers.py::TestNumbers::test_twice", "tests/test_more.py::TestTwice::test_of_text"]


def make_tree(trees: Path, name: str = "demo-1.0") -> Path:
    files = {
        "demo/__init__.py": "",
        "demo/numbers.py": TOTAL,
        "tests/test_numbers.py": TESTS,
        "tests/test_more.py": MORE_TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--cov=demo"\n',
    }
    for path, text in files.items():
        (trees / name / path).parent.mkdir(parents=True, exist_ok=True)
        (trees / name / path).write_text(text)
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
