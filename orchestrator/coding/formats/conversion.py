"""A published task file becomes a folder of coding tasks: `composer tasks import FILE -o tasks/` calls `import_tasks`.

    records -> form (by their fields) -> CodeTask -> proof: the solution passes, an empty patch fails -> tasks.jsonl
                                            └─ refused, with the reason -> refused.jsonl

One bad record does not end an import. A file none of whose records becomes a task does. tasks.jsonl is written once all
records are done.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.console import ProgressLines
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.code.grading import grade
from orchestrator.coding.formats.functions import human_eval_task, mbpp_task
from orchestrator.coding.formats.swe_bench import instance_task
from orchestrator.coding.formats.task_files import Record, read_records
from orchestrator.coding.in_order import in_order
from orchestrator.coding.sandbox.opening import open_box
from orchestrator.coding.task import TASKS_FILE, TREES_FOLDER, CodeTask, write_tasks

REFUSED_FILE = "refused.jsonl"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A record that became no task."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    """How records become tasks."""

    repositories: Path | None = None
    """Folder with a clone or a tree for each repository; SWE-bench's family needs one."""
    timeout_s: float = 300.0
    """SWE-bench's family: wall-clock limit of one run of the tests."""
    runtime: RuntimeConfig | None = None
    """Where tasks are proven; None takes them unproven."""
    jobs: int = 1
    """Proofs at one time."""


def function_task(record: Record) -> CodeTask:
    """Return the task of a record in HumanEval's or MBPP's form. Raises ConfigError for any other record."""
    if record.has("test", "entry_point", "prompt"):
        return human_eval_task(record)
    if record.has("test_list"):
        return mbpp_task(record)
    raise ConfigError(
        f"{record.place}: its fields ({', '.join(record.values)}) are of no known form: SWE-bench (instance_id, ...), "
        "HumanEval (prompt, test, entry_point), MBPP (text, test_list)"
    )


async def import_tasks(path: Path, folder: Path, settings: ImportSettings) -> tuple[int, list[Refusal]]:
    """Write the tasks of a file below `folder`. Return how many, and the records that are none.

    Raises ConfigError where no record is one, SandboxError where no sandbox can be opened.
    """
    if (folder / TASKS_FILE).exists():
        raise ConfigError(f"{folder / TASKS_FILE} exists: name another folder, or remove it")
    records = list(read_records(path))
    if settings.runtime is not None:
        async with await open_box(settings.runtime):
            pass  # Without sandboxes every record would be refused for it.
    refusals: list[Refusal] = []
    tasks: dict[str, CodeTask] = {}
    lines = ProgressLines()
    outcomes = in_order(lambda record: _outcome(record, folder, settings), records, settings.jobs)
    async with aclosing(outcomes):
        async for outcome in outcomes:
            if isinstance(outcome, Refusal):
                refusals.append(outcome)
            elif outcome.id in tasks:
                reason = f"its id {outcome.id} is another record's, too"
                refusals.append(Refusal(place=records[len(tasks) + len(refusals)].place, reason=reason))
            else:
                tasks[outcome.id] = outcome
            lines.tell(lambda: f"{len(tasks)} of {len(tasks) + len(refusals)} records are tasks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REFUSED_FILE).write_bytes(b"".join(msgspec.json.encode(refusal) + b"\n" for refusal in refusals))
    if not tasks:
        shown = "\n".join(f"{refusal.place}: {refusal.reason}" for refusal in refusals[:5])
        raise ConfigError(f"{path}: none of its {len(records)} records became a task:\n{shown}")
    write_tasks(folder, tasks.values())
    return len(tasks), refusals


async def _outcome(record: Record, folder: Path, settings: ImportSettings) -> CodeTask | Refusal:
    try:
        task = await asyncio.to_thread(_convert, record, folder, settings)
        reason = await why_unproven(task, folder / TREES_FOLDER, settings.runtime) if settings.runtime else ""
    except (ConfigError, SandboxError, OSError) as error:  # OSError: its files do not fit.
        return Refusal(place=record.place, reason=str(error).removeprefix(f"{record.place}: "))
    return Refusal(place=record.place, reason=f"{task.id}: {reason}") if reason else task


def _convert(record: Record, folder: Path, settings: ImportSettings) -> CodeTask:
    if not record.has("instance_id"):
        return function_task(record)
    if settings.repositories is None:
        raise ConfigError("an instance of SWE-bench's form needs its repository: give --repositories FOLDER")
    return instance_task(record, settings.repositories, folder / TREES_FOLDER, timeout_s=settings.timeout_s)


async def why_unproven(task: CodeTask, trees: Path, runtime: RuntimeConfig) -> str:
    """Return why a task is not proven; empty where it is. One without a known solution needs only fail."""
    if task.solution:
        solution = {path: text.encode() for path, text in task.solution.items()}
        result = await grade(task, trees, solution, runtime)
        if not result.solved:
            expected = {*task.fail_to_pass, *task.pass_to_pass}
            lost = sorted(expected - result.passed)
            first = f", first {lost[0]}" if lost else ""
            tail = " ".join(result.report.split())[:400]
            return f"its own solution fails {len(lost)} of {len(expected)} tests{first}: {tail}"
    if (await grade(task, trees, {}, runtime)).solved:
        return "its tests pass without any change"
    return ""
