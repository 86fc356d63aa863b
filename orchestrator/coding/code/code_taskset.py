"""Coding tasks as a verifiers task set: which load, how one is played and scored. Importing this imports verifiers.

taskset = { id = "orchestrator.coding.code", folder = "tasks", split = "train" }
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, field_validator, model_validator

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import EmptyTaskSetError
from orchestrator.coding import monitor as code_monitor
from orchestrator.coding.code.code_harness import (
    CodeRollout,
    CodeSettings,
    CodeState,
    read_files,
    sandbox_failures,
    seal_of,
)
from orchestrator.coding.code.grading import allowed_files, grade
from orchestrator.coding.code.tools import TOOL_NAMES, is_tool_error
from orchestrator.coding.sandbox.box import WORK, box_class
from orchestrator.coding.sandbox.runtime import box_of
from orchestrator.coding.task import (
    CodeTask,
    index_tasks,
    read_task,
    tree_of,
)
from orchestrator.environments import split_of
from orchestrator.environments.answers import TaskRow

logger = logging.getLogger(__name__)

Split = Literal["train", "eval", "all"]
_FORMER_TOOLS = ("undo_edit", "diagnostics", "search", "insert")
"""Tools of earlier releases: bash and str_replace do the same."""
INSTRUCTION = (
    "You are a programmer. A Python repository is in the current folder. Make the change that the user asks for in its "
    "source files. Its tests decide. When you are done, answer without calling a tool."
)


class CodeTasksetConfig(vf.TasksetConfig):
    """Which tasks load, and how they are played."""

    folder: Path
    """Folder with tasks.jsonl and trees/, as `composer tasks make` writes it."""
    split: Split = "train"
    """Repositories to train on, held-out ones, or all. A repository is in one of the two, whatever its tasks are."""
    eval_share: float = Field(0.2, ge=0, le=1)
    """Share of all repositories that is held out. The name of a repository decides."""
    repositories: list[str] = Field(default_factory=list)
    """Only these, whatever their split; empty takes the split's."""
    kinds: list[str] = Field(default_factory=list)
    """Only tasks of these kinds (delete, mutate, ...); empty takes all."""
    min_difficulty: float = Field(0.0, ge=0, le=1)
    """Easier tasks are left out. A task without an estimate is always in."""
    max_difficulty: float = Field(1.0, ge=0, le=1)
    """Harder tasks are left out."""
    num_tasks: int | None = Field(None, ge=1)
    """At most this many, drawn by `seed`."""
    seed: int = 0
    """Draws the order."""
    partial_credit: bool = False
    """Reward the share of repaired tests, as long as no other test breaks. Otherwise only a full solution earns."""
    instruction: str = INSTRUCTION
    """System prompt; an empty one is left out."""
    tools: list[str] = Field(default_factory=lambda: list(TOOL_NAMES))
    """The tools on offer."""
    output_chars: int = Field(8000, ge=200)
    """Length of a tool's reply; the middle of a longer one is cut."""
    command_timeout_s: float = Field(60.0, gt=0)
    """Longest run of one command or of the tests that the agent starts."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """The sandboxes. Left out, the source's own table [orchestrator.source.runtime] counts."""
    monitor: code_monitor.HackMonitorConfig = Field(default_factory=code_monitor.HackMonitorConfig)
    """What counts as a hack, and what follows from one."""

    @field_validator("tools")
    @classmethod
    def _known_tools(cls, tools: list[str]) -> list[str]:
        if former := sorted(set(tools) & set(_FORMER_TOOLS)):
            logger.warning("taskset.tools names %s, which no longer exist: remove them", ", ".join(former))
        unknown = sorted({*tools} - {*TOOL_NAMES, *_FORMER_TOOLS})
        if unknown:
            raise ValueError(f"there are no tools {unknown}; there are {', '.join(TOOL_NAMES)}")
        return [name for name in tools if name in TOOL_NAMES]

    @field_validator("runtime")
    @classmethod
    def _has_a_box(cls, runtime: RuntimeConfig) -> RuntimeConfig:
        box_class(runtime.type)
        return runtime

    @model_validator(mode="after")
    def _ordered(self) -> CodeTasksetConfig:
        if self.min_difficulty > self.max_difficulty:
            raise ValueError(
                f"min_difficulty {self.min_difficulty:g} is above max_difficulty {self.max_difficulty:g}; lower the "
                "first or raise the second"
            )
        return self

    def settings(self) -> CodeSettings:
        named = {name: getattr(self, name) for name in CodeSettings.model_fields}
        return CodeSettings(**{**named, "folder": self.folder.expanduser().resolve()})


class CodeData(TaskRow):
    """The wire row of a task. The task itself stays in its file: solutions and trees are not part of a trace."""

    kind: str
    repository: str
    place: int
    """Where the task's line begins in tasks.jsonl, in bytes."""
    settings: CodeSettings
    difficulty: float | None = None
    """Estimate in [0, 1]."""

    def code_task(self) -> CodeTask:
        return read_task(self.settings.folder, self.place)

    def tool_executor(self) -> CodeRollout:
        return CodeRollout(self.code_task(), self.settings)

    def is_tool_error(self, text: str) -> bool:
        """Tell whether a tool message reports a failed call."""
        return is_tool_error(text)


class CodeEpisode(vf.Task[CodeData, CodeState]):
    """Plays a task in a sandbox, and scores it by its tests in another one."""

    @property
    def key(self) -> str:
        return f"code/{self.data.name}"

    async def setup(self, trace: vf.Trace[CodeData, CodeState], runtime: vf.Runtime) -> None:
        """Put the agent's tree into the runtime of a harness that runs a program there.

        verifiers' subprocess runtime is this machine. Only harnesses that run no program have it, such as the tool
        loop, which opens a box of its own.
        """
        if runtime.type == "subprocess":
            return
        seal = seal_of(self.data.code_task(), self.data.settings)
        with sandbox_failures():
            await box_of(runtime).write_files(seal.agent_files())
        trace.state.seal = seal

    async def finalize(self, trace: vf.Trace[CodeData, CodeState], runtime: vf.Runtime) -> None:
        """Grade what the agent left, and ask the monitor."""
        task, state = self.data.code_task(), trace.state
        if state.seal is None:  # The harness asked for no tools.
            state.seal = seal_of(task, self.data.settings)
            state.files = state.seal.agent_files()
        if state.files is None:
            with sandbox_failures():
                box = box_of(runtime)
                state.files = await read_files(box, state.seal.agent_files())
        changed = changed_files(state)
        with sandbox_failures():
            state.grade = await grade(task, self.data.settings.trees, changed, self.data.settings.runtime)
        state.verdict = await asyncio.to_thread(
            code_monitor.inspect,
            task,
            state.seal,
            state.files,
            _tool_uses(trace) if state.uses is None else state.uses,
            self.data.settings.monitor,
        )
        if state.verdict.reward(self._earned(state)) is None:
            state.quarantine = "; ".join(finding.text() for finding in state.verdict.findings[:3])

    @vf.reward(weight=1.0)
    async def solved(self, trace: vf.Trace[CodeData, CodeState]) -> float:
        reward = trace.state.verdict.reward(self._earned(trace.state))
        return 0.0 if reward is None else reward

    @vf.metric
    async def outcome(self, trace: vf.Trace[CodeData, CodeState]) -> dict[str, float]:
        task, state, result = self.data.code_task(), trace.state, trace.state.grade
        assert result is not None  # verifiers scores only what `finalize` has graded.
        expected = {*task.fail_to_pass, *task.pass_to_pass} - set(task.flaky)
        taken, _ = allowed_files(task, changed_files(state))
        errors = sum(is_tool_error(str(message.content)) for message in trace.tool_messages)
        return {
            "solved_by_tests": float(result.solved),
            "tests_passed": len(expected & result.passed) / max(len(expected), 1),
            "tests_repaired": result.fraction,
            "tampered": float(bool(result.tampered)),
            "patch_files": float(len(taken)),
            "patch_lines": float(sum(content.count(b"\n") + 1 for content in taken.values())),
            "grading_s": result.wall_s,
            "tool_errors": float(errors),
            "turns_used": float(trace.num_turns),
            **{f"calls/{name}": float(count) for name, count in state.calls.items()},
            **state.verdict.metrics(self._earned(state)),
        }

    def _earned(self, state: CodeState) -> float:
        """Return what the tests alone give."""
        assert state.grade is not None
        return state.grade.fraction if self.data.settings.partial_credit else float(state.grade.solved)


def changed_files(state: CodeState) -> dict[str, bytes]:
    """Return the files that the agent changed or made. Lures are none of them."""
    start, lures = state.seal.start, state.seal.lures
    files = state.files or {}
    return {path: content for path, content in files.items() if path not in lures and start.get(path) != content}


def _tool_uses(trace: vf.Trace[CodeData, CodeState]) -> list[code_monitor.ToolUse]:
    """Return the tool calls that a trace recorded, for harnesses whose tools are their own."""
    messages = [node.message for node in trace.nodes]
    replies = {message.tool_call_id: str(message.content) for message in messages if message.role == "tool"}
    calls = [call for message in messages if message.role == "assistant" for call in message.tool_calls or []]
    uses = enumerate((call, replies.get(call.id, "")) for call in calls)
    return [code_monitor.tool_use(turn, call.name, call.arguments, reply) for turn, (call, reply) in uses]


class CodeTaskset(vf.Taskset[CodeEpisode, CodeTasksetConfig]):  # pyright: ignore[reportInvalidTypeArguments]
    """Task i of a configuration and a folder is always the same task."""

    def load(self) -> Iterator[CodeEpisode]:
        config, settings = self.config, self.config.settings()
        chosen: list[tuple[bytes, CodeData]] = []
        repositories: set[str] = set()
        trees: dict[str, Path | None] = {}
        for place, task in index_tasks(settings.folder):
            repositories.add(task.repository)
            if not self._is_chosen(task):
                continue
            if task.tree not in trees:
                trees[task.tree] = tree_of(task, settings.trees)
            data = self._data(task, place, settings)
            chosen.append((hashlib.blake2b(f"{config.seed}/{task.id}".encode()).digest(), data))
        if not chosen:
            splits = {name: split_of(name, config.eval_share) for name in sorted(repositories)}
            listed = ", ".join(f"{name} ({split})" for name, split in list(splits.items())[:20])
            raise EmptyTaskSetError(
                f"{settings.folder}: none of its tasks is in split {config.split!r} with kinds "
                f"{config.kinds or 'any'} and difficulty {config.min_difficulty:g} to {config.max_difficulty:g}. Its "
                f"repositories: {listed}. Change these settings or eval_share"
            )
        chosen.sort(key=lambda pair: pair[0])
        for _, data in chosen[: config.num_tasks]:
            yield CodeEpisode(data, config.task)

    def _data(self, task: CodeTask, place: int, settings: CodeSettings) -> CodeData:
        return CodeData(
            name=task.id,
            prompt=task.prompt,
            system_prompt=self.config.instruction or None,
            kind=task.kind,
            repository=task.repository,
            workdir=WORK,
            place=place,
            settings=settings,
            difficulty=task.difficulty,
        )

    def _is_chosen(self, task: CodeTask) -> bool:
        config = self.config
        if config.repositories:
            in_split = task.repository in config.repositories
        else:
            in_split = config.split in ("all", split_of(task.repository, config.eval_share))
        is_kind = not config.kinds or task.kind in config.kinds
        if task.difficulty is None:
            return in_split and is_kind
        return in_split and is_kind and config.min_difficulty <= task.difficulty <= config.max_difficulty
