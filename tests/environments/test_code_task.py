"""The format of coding tasks: files, versions, paths and patterns."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from code_tasks_made import make_task

from composer_prime.errors import ConfigError
from orchestrator.coding.task import CodeTask, check_path, index_tasks, matches, tree_of, write_tasks


def _task(**changes: Any) -> CodeTask:
    return make_task(**{"tree": ""} | changes)


# What is written is what is read.
def test_tasks_round_trip(tmp_path: Path) -> None:
    first, second = _task(start={"a.py": "é\n"}), _task(id="other")
    write_tasks(tmp_path, [first, second])
    assert list(dict(index_tasks(tmp_path)).values()) == [first, second]


# A missing folder, an empty file, a broken line and another version each name the file and the remedy.
@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (None, ConfigError, "composer tasks make"),
        ("\n", ConfigError, "holds no task"),
        ('{"id": 3}\n', ConfigError, "tasks.jsonl:1: this line is not a task"),
        (msgspec.json.encode(_task(version=99)).decode(), ConfigError, "version 99"),
    ],
)
def test_bad_task_files_are_told(tmp_path: Path, content: str | None, kind: type[Exception], words: str) -> None:
    if content is not None:
        (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(kind, match=words):
        list(dict(index_tasks(tmp_path)).values())


# A task whose tree is gone says which folder it wants.
def test_missing_tree_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is missing; copy trees"):
        tree_of(_task(tree="demo-1.0"), tmp_path)
    assert tree_of(_task(), tmp_path) is None


# A path that leaves its folder is refused; a plain one comes back normalised.
@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", ".", "a\0b"])
def test_paths_that_escape_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="must be relative"):
        check_path(path)
    assert check_path("./pkg//a.py") == "pkg/a.py"


# A star stays within its folder; two stars cross folders and may match none.
def test_patterns() -> None:
    assert matches("pkg/a.py", ["pkg/*.py"])
    assert not matches("pkg/sub/a.py", ["pkg/*.py"])
    assert matches("pkg/sub/a.py", ["pkg/**/*.py"])
    assert matches("pkg/a.py", ["pkg/**/*.py"])
    assert matches("pkg/a[1].py", ["pkg/a[1].py"])
    assert not matches("tests/pkg/a.py", ["pkg/**"])
