"""The format of coding tasks: what one is, and the folder that holds many.

    tasks/
      tasks.jsonl        one CodeTask a line
      trees/NAME/        pristine source trees, tests included; many tasks share one
      trees/NAME.json    what the tests of that tree do (`Suite`); trees of published files have none

The agent starts in the tree without `removed` and with `start` written over it. Grading never runs there. It puts the
editable files of the agent's tree into the pristine one (see `grading.py`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from composer_prime.errors import ConfigError
from composer_prime.run.run_dir import write_atomic

TASK_VERSION = 1
"""The version that this program writes, and the newest that it reads."""
TASKS_FILE = "tasks.jsonl"
TREES_FOLDER = "trees"
REPORTS = ("junit", "tap", "go", "cargo")
"""Forms of a report that grading reads (`reports.py`)."""
HELD_BACK = "held-back.json"
"""Among a task's `test_files`, and never put into a tree: inputs that its agent does not see (`grading.py`)."""


def parsed(source: Any, parse: Callable[[Any], Any] = ast.parse) -> Any:
    """Parse, again after a SystemError: CPython 3.11 mixes up the recursion depths of threads that do."""
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return parse(source)
    return parse(source)


class Runner(msgspec.Struct, frozen=True, kw_only=True):
    """A command that runs the tests of another language, and reports on them."""

    command: list[str]
    """Words; it runs in the tree's top folder. {report} in one is the path of a file that it must write."""
    report: str
    """Form of its report, one of `REPORTS`: of that file, or of its output where no word has {report}."""

    def __post_init__(self) -> None:
        if not self.command or self.report not in REPORTS:
            raise ConfigError(
                f"the test command {self.command} has the report {self.report!r}; it needs words, and a report that is "
                f"one of {', '.join(REPORTS)}"
            )


class CodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task: a tree to begin with, words that ask for a change, and tests that decide."""

    id: str
    """Stable and unique: "toolz-1.2.0/delete/toolz.itertoolz.groupby"."""
    version: int = TASK_VERSION
    kind: str
    """delete | mutate | history | issue | write, or another word of the program that made it."""
    repository: str
    """Held-out splits are made by it: "toolz-1.2.0"."""
    tree: str = ""
    """Folder below trees/ with the pristine tree, tests included; "" for none."""
    prompt: str
    start: dict[str, str] = {}
    removed: list[str] = []
    """Paths that the agent's tree lacks: hidden tests, caches, wheels, .git."""
    solution: dict[str, str] = {}
    """Path -> text of one correct end; {} where none is known."""
    editable: list[str] = []
    """Patterns of the files that grading takes from the agent's tree (`matches`)."""
    tests: list[str] = []
    """Files of the tests that decide."""
    runner: Runner | None = None
    """What runs them; None for pytest."""
    test_files: dict[str, str] = {}
    """Path -> text of files that grading adds or replaces (a test patch)."""
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    flaky: list[str] = []
    """Test ids that count for nothing."""
    python_path: list[str] = msgspec.field(default_factory=lambda: ["."])
    """Folders put on PYTHONPATH."""
    timeout_s: float = 60.0
    symbols: list[str] = []
    """Qualified names of what was deleted or changed."""
    source: str = ""


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """What all tests of a pristine tree do. The factory measures it once for all tasks of the tree."""

    tests: dict[str, list[str]]
    seconds: dict[str, float]
    reach: dict[str, list[str]]
    """Source file -> test files that run code of it."""


_DECODER = msgspec.json.Decoder(CodeTask)


def index_tasks(folder: Path) -> Iterator[tuple[int, CodeTask]]:
    """Yield the tasks of a folder, each behind the place of its line in bytes. Raises ConfigError."""
    path = folder / TASKS_FILE
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; make tasks with `composer tasks make SOURCE -o {folder}`, or of a published file "
            f"with `composer tasks import FILE -o {folder}`"
        )
    count = place = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                count += 1
                yield place, _decode(line, f"{path}:{number}")
            place += len(line)
    if not count:
        raise ConfigError(f"{path} holds no task; its maker's report says why each candidate was refused")


def read_task(folder: Path, place: int) -> CodeTask:
    """Read the one task whose line begins at a place that `index_tasks` gave."""
    with (folder / TASKS_FILE).open("rb") as file:
        file.seek(place)
        return _decode(file.readline(), f"{folder / TASKS_FILE} at byte {place}")


def write_tasks(folder: Path, tasks: Iterable[CodeTask]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / TASKS_FILE, b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))


def tree_of(task: CodeTask, trees: Path) -> Path | None:
    if not task.tree:
        return None
    folder = trees / check_path(task.tree)
    if not folder.is_dir():
        raise ConfigError(f"task {task.id}: its tree {folder} is missing; copy trees/ together with {TASKS_FILE}")
    return folder


def suite_of(task: CodeTask, trees: Path) -> Suite | None:
    path = trees / f"{task.tree}.json"
    return msgspec.json.decode(path.read_bytes(), type=Suite) if task.tree and path.is_file() else None


def write_suite(folder: Path, suite: Suite) -> None:
    write_atomic(folder.with_name(f"{folder.name}.json"), msgspec.json.encode(suite))


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a pristine tree. Raises ValueError for a path that leaves the folder."""
    for path, content in files.items():
        target = folder / check_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def check_path(path: str) -> str:
    """Return a path in its plain form. Raises ValueError unless it is relative and stays below its folder."""
    plain = PurePosixPath(path)
    if not path or "\0" in path or plain.is_absolute() or ".." in plain.parts or not plain.parts:
        raise ValueError(f"the path {path!r} must be relative and must not leave its folder")
    return str(plain)


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether the last pattern that fits a path takes it: one that begins with `!` leaves the path out.

    `*` and `?` stay within a folder, `**/` crosses folders.
    """
    for pattern in reversed(patterns):
        if _compiled(pattern.removeprefix("!")).fullmatch(path) is not None:
            return not pattern.startswith("!")
    return False


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    special = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(special.get(part, re.escape(part)) for part in parts), re.DOTALL)


def _decode(line: bytes, place: str) -> CodeTask:
    try:
        task = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: this line is not a task: {error}; make the tasks again") from error
    if task.version != TASK_VERSION:
        raise ConfigError(
            f"{place}: a task of version {task.version}; this program reads version {TASK_VERSION}: "
            "update it, or make the tasks again"
        )
    return task
