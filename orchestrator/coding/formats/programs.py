"""HumanEval: one function in one turn. The tests of its record grade the reply's code in a sandbox.

    taskset = { id = "orchestrator.coding.formats.programs", file = "HumanEval.jsonl.gz" }

The test imports the asked function from solution.py by name, and nothing else of a solution; helpers that it calls come
from the prompt. `composer tasks import` makes tasks of the file for agents with tools.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.code.code_taskset import CodeState, sandbox_failures
from orchestrator.coding.code.grading import grade
from orchestrator.coding.formats.conversion import INDENT, SOLUTION, human_eval_task, read_records
from orchestrator.coding.formats.questions import FileTasksetConfig
from orchestrator.coding.task import CodeTask
from orchestrator.environments.answers import TaskRow

__all__ = ["Programs"]


class ProgramsConfig(FileTasksetConfig):
    """Which file, and how its tasks are scored."""

    instruction: str = "You are a programmer. Answer with one Python code block that holds the complete function."
    """System prompt; an empty one is left out."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """The sandboxes. If omitted, the source's table [orchestrator.source.runtime] applies."""


class ProgramTask(vf.Task[TaskRow, CodeState]):
    """Grades the code in the reply. The tests and the solution are not part of a trace."""

    def __init__(self, data: TaskRow, settings: ProgramsConfig, task: CodeTask) -> None:
        super().__init__(data, settings.task)
        self._runtime = settings.runtime
        self._task = task

    @property
    def key(self) -> str:
        return f"programs/{self.data.name}"

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    async def finalize(self, trace: vf.Trace[TaskRow, CodeState], runtime: vf.Runtime) -> None:
        patch = with_reply(self._task, trace.last_reply)
        with sandbox_failures():
            trace.state.grade = await grade(self._task, Path(), patch, self._runtime)

    @vf.reward(weight=1.0)
    async def solved(self, trace: vf.Trace[TaskRow, CodeState]) -> float:
        return float(trace.state.grade is not None and trace.state.grade.solved)


class Programs(vf.Taskset[ProgramTask, ProgramsConfig]):  # pyright: ignore[reportInvalidTypeArguments]
    """Task i of a file and split is always the same record."""

    def load(self) -> Iterator[ProgramTask]:
        config = self.config
        tasks = (human_eval_task(record) for record in read_records(config.file))
        for task in config.played((task.id, task) for task in tasks):
            data = TaskRow(name=task.id, prompt=task.prompt, system_prompt=config.instruction or None)
            yield ProgramTask(data, config, task)


def with_reply(task: CodeTask, reply: str) -> dict[str, bytes]:
    """Return the files that a reply in words makes: its last Python block, or all of it where it has none.

    A block that defines the asked function goes before later ones. One without it continues what the task gave.
    """
    name = re.escape(task.symbols[0])
    define = re.compile(rf"^((async )?def {name}\b|{name} *=[^=]|from .* import .*\b{name}\b)", re.MULTILINE)
    fences = re.findall(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", reply, re.DOTALL)
    blocks = [code for language, code in fences if language.lower() in ("", "python", "py", "python3")]
    defining = [code for code in blocks if define.search(code)]
    code = (defining or blocks or [reply])[-1]
    if not define.search(code):
        given = task.start[SOLUTION]
        # Chat templates strip replies, and with them the first line's indentation.
        code = given + (code if code[:1].isspace() else INDENT + code)
    return {SOLUTION: code.encode("utf-8", "replace")}
