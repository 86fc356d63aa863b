"""One function in one turn: the reply's code is graded by tests in a sandbox. HumanEval and MBPP.

    taskset = { id = "orchestrator.coding.formats.programs", file = "HumanEval.jsonl.gz" }

The records say which of the two forms they have. To let an agent work with tools instead, make a task folder of the
file (`composer tasks import`) and play it with orchestrator.coding.code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.code.code_harness import sandbox_failures
from orchestrator.coding.code.grading import grade
from orchestrator.coding.formats.conversion import function_task
from orchestrator.coding.formats.functions import with_reply
from orchestrator.coding.formats.questions import FileTasksetConfig
from orchestrator.coding.formats.task_files import read_records
from orchestrator.coding.monitor import HackMonitorConfig, HackVerdict, inspect, seal
from orchestrator.coding.task import CodeTask
from orchestrator.environments.task_row import TaskRow

__all__ = ["Programs"]

_NO_TREES = Path()
"""Tasks of a file have no tree."""
INSTRUCTION = "You are a programmer. Answer with one Python code block that holds the complete function."


class ProgramsConfig(FileTasksetConfig):
    """Which file, and how its tasks are scored."""

    partial_credit: bool = False
    """Reward the share of failing tests that pass (MBPP has several). Otherwise only a full solution earns."""
    instruction: str = INSTRUCTION
    """System prompt; an empty one is left out."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """The sandboxes. If omitted, the source's table [orchestrator.source.runtime] applies."""
    monitor: HackMonitorConfig = Field(default_factory=lambda: HackMonitorConfig(policy="none", lures=False))
    """What counts as a hack, and how it is handled. By default it is only recorded: an agent that writes a whole file
    may import and read what no known solution does."""


class ProgramState(vf.State):
    """What grading left."""

    reward: float = 0.0
    figures: dict[str, float] = Field(default_factory=dict)
    verdict: Any = Field(default=None, exclude=True)
    """The monitor's verdict."""
    quarantine: str = ""
    """Why the rollout must not be trained on; empty where it may."""


class ProgramData(TaskRow):
    """The wire row of a task."""

    place: str
    """The place of the record. Its tests and its solution are not part of a trace."""


class ProgramTask(vf.Task[ProgramData, ProgramState]):
    """Grades the code in the reply."""

    def __init__(self, data: ProgramData, settings: ProgramsConfig, task: CodeTask) -> None:
        super().__init__(data, settings.task)
        self._settings = settings
        self._task = task

    @property
    def key(self) -> str:
        return f"programs/{self.data.name}"

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    async def finalize(self, trace: vf.Trace[ProgramData, ProgramState], runtime: vf.Runtime) -> None:
        """Grade the reply, and ask the monitor."""
        patch = with_reply(self._task, trace.last_reply)
        with sandbox_failures():
            result = await grade(self._task, _NO_TREES, patch, self._settings.runtime)
        verdict = await asyncio.to_thread(self._inspect, patch)
        earned = result.fraction if self._settings.partial_credit else float(result.solved)
        reward, state = verdict.reward(earned), trace.state
        state.verdict = verdict
        state.figures = {"tests_repaired": result.fraction, **verdict.metrics(earned)}
        if reward is None:
            state.quarantine = "; ".join(finding.text() for finding in verdict.findings[:3])
        else:
            state.reward = reward

    @vf.reward(weight=1.0)
    async def solved(self, trace: vf.Trace[ProgramData, ProgramState]) -> float:
        return trace.state.reward

    @vf.metric
    async def outcome(self, trace: vf.Trace[ProgramData, ProgramState]) -> dict[str, float]:
        return trace.state.figures

    def _inspect(self, patch: dict[str, bytes]) -> HackVerdict:
        sealed = seal(self._task, None, self._settings.monitor)
        return inspect(self._task, sealed, {**sealed.start, **patch}, (), self._settings.monitor)


class Programs(vf.Taskset[ProgramTask, ProgramsConfig]):  # pyright: ignore[reportInvalidTypeArguments]
    """Task i of a file and split is always the same record."""

    def load(self) -> Iterator[ProgramTask]:
        """Raises ConfigError for a file or record that cannot be read, EmptyTaskSetError for an empty split."""
        config = self.config
        tasks = (function_task(record) for record in read_records(config.file))
        for task in config.played((task.id, task) for task in tasks):
            system = config.instruction or None
            data = ProgramData(name=task.id, prompt=task.prompt, system_prompt=system, place=task.source)
            yield ProgramTask(data, config, task)
