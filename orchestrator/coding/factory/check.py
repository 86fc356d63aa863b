"""Grade a sample of finished tasks again, with the grading that training uses.

Each task is graded with its solution (`times` times), with an empty patch, and with a patch that only rewrites tests.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError
from orchestrator.coding.code.grading import Grade, grade
from orchestrator.coding.task import TREES_FOLDER, CodeTask, read_tasks

_PASSING_TEST = b"def test_nothing():\n    pass\n"
_PASSING_CONFTEST = b"""\
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheck:
    """What the gradings of one task said."""

    task: str
    stable: bool
    """All gradings of the solution solved it, with the same tests passed."""
    empty_solved: bool
    tests_only_solved: bool
    detail: str
    """Of a task that is not stable: the first report."""
    wall_s: float
    """Seconds of one grading, the mean."""

    @property
    def good(self) -> bool:
        return self.stable and not self.empty_solved and not self.tests_only_solved


def draw_tasks(folder: Path, count: int, seed: int) -> list[CodeTask]:
    """Return `count` tasks drawn by the seed, or all where there are fewer."""
    tasks = sorted(read_tasks(folder), key=lambda task: task.id)
    return random.Random(seed).sample(tasks, min(count, len(tasks)))


def task_named(folder: Path, name: str) -> CodeTask:
    """Return one task. Raises ConfigError for an id that is not there."""
    names = []
    for task in read_tasks(folder):
        if task.id == name:
            return task
        names.append(task.id)
    near = [other for other in names if name in other][:5]
    raise ConfigError(f"{folder} has no task {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))


async def check_tasks(
    tasks: Iterable[CodeTask],
    folder: Path,
    runtime: RuntimeConfig,
    *,
    times: int,
    jobs: int,
    on_checked: Callable[[TaskCheck], None],
) -> list[TaskCheck]:
    """Check tasks, `jobs` at a time. Raises SandboxError where no box can be opened."""
    boxes = asyncio.Semaphore(jobs)

    async def checked(task: CodeTask) -> TaskCheck:
        async with boxes:
            result = await _check(task, folder / TREES_FOLDER, runtime, times)
        on_checked(result)
        return result

    return list(await asyncio.gather(*(checked(task) for task in tasks)))


async def _check(task: CodeTask, trees: Path, runtime: RuntimeConfig, times: int) -> TaskCheck:
    solution = {path: text.encode() for path, text in task.solution.items()}
    grades = [await grade(task, trees, solution, runtime) for _ in range(times)]
    empty = await grade(task, trees, {}, runtime)
    tests_only = await grade(task, trees, patch_of_tests(task), runtime)
    expected = frozenset(task.fail_to_pass) | frozenset(task.pass_to_pass)
    same = len({one.passed & expected for one in grades}) == 1
    failed = [one for one in grades if not one.solved]
    return TaskCheck(
        task=task.id,
        stable=same and not failed,
        empty_solved=empty.solved,
        tests_only_solved=tests_only.solved,
        detail=_words(failed[0]) if failed else "",
        wall_s=sum(one.wall_s for one in grades) / max(len(grades), 1),
    )


def patch_of_tests(task: CodeTask) -> dict[str, bytes]:
    """Return a patch that makes every test pass by changing tests alone: emptied tests, and a conftest that lies."""
    patch = dict.fromkeys(task.tests, _PASSING_TEST)
    folders = {test.rpartition("/")[0] for test in task.tests} | {""}
    for folder in folders:
        patch[f"{folder}/conftest.py".lstrip("/")] = _PASSING_CONFTEST
    return patch


def _words(failed: Grade) -> str:
    missing = sorted(failed.missing)[:3]
    return f"{failed.tampered or failed.ended_by} missing: {missing} {failed.report}".strip()[:600]
