"""Coding tasks as a verifiers task set: which load, how one is played and scored.

    taskset = { id = "orchestrator.coding.code", folder = "tasks", split = "train" }

    start     seal -> open_box(agent's tree) -> tools
    call      tool -> reply, recorded for the monitor
    finish    read the box's files -> trace.state, close the box
    finalize  grade what the agent left, ask the monitor

The tool loop plays `CodeRollout`. A harness that runs a program of its own has a verifiers runtime instead.
A box that cannot be opened, or ends in mid-rollout, fails the rollout; it is never an unsolved task.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import verifiers.v1 as vf
from pydantic import BaseModel, Field, field_validator
from verifiers.v1 import errors as vf_errors

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.code.grading import REGRESSION_S, Grade, allowed_files, grade
from orchestrator.coding.code.tools import TOOL_NAMES, CodeTools, is_tool_error
from orchestrator.coding.monitor.after import inspect
from orchestrator.coding.monitor.before import Seal, seal
from orchestrator.coding.monitor.commands import ToolUse, tool_use
from orchestrator.coding.monitor.verdict import HackMonitorConfig
from orchestrator.coding.sandbox.box import WORK, Box, box_class, open_box
from orchestrator.coding.sandbox.runtime import box_of
from orchestrator.coding.task import TREES_FOLDER, CodeTask, index_tasks, read_task, tree_of
from orchestrator.environments import split_of
from orchestrator.environments.answers import TaskRow

logger = logging.getLogger(__name__)

Split = Literal["train", "eval", "all"]
MAX_READ_BYTES = 2**22
"""A larger file of the agent's tree is not looked at."""
MAX_TREE_BYTES = 2**26
"""Of the agent's tree, besides what it had at the start."""
INSTRUCTION = (
    "You are a programmer. A repository is in the current folder. Make the change that the user asks for in its "
    "source files. Its tests decide; `{tests}` runs them. When you are done, answer without calling a tool."
)


class CodeSettings(BaseModel):
    """How the tasks of a set are played."""

    folder: Path
    """Folder with tasks.jsonl and trees/, as `composer tasks make` writes it."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """The sandboxes. Left out, the source's own table [orchestrator.source.runtime] counts."""
    tools: list[str] = Field(default_factory=lambda: list(TOOL_NAMES))
    """The tools on offer."""
    output_chars: int = Field(default=8000, ge=200)
    """Length of a tool's reply; the middle of a longer one is cut."""
    command_timeout_s: float = Field(default=60.0, gt=0)
    """Longest run of one command that the agent starts."""
    monitor: HackMonitorConfig = Field(default_factory=HackMonitorConfig)
    """What counts as a hack, and what follows from one."""
    regression_s: float = Field(default=REGRESSION_S, ge=0)
    """Seconds of the repository's other tests that a patch which would earn runs, besides all that reach the files
    that it touches; with 0 the task's own tests alone decide."""
    elsewhere: float = Field(default=0.5, ge=0, le=1)
    """Share of the reward that a patch earns which also changes what the known solution leaves alone: no test may see
    what breaks there. 1 pays it in full."""
    partial_credit: bool = False
    """Reward the share of repaired tests, as long as no other test breaks. Otherwise only a full solution earns."""

    @property
    def trees(self) -> Path:
        return self.folder / TREES_FOLDER

    @field_validator("folder")
    @classmethod
    def _whole_path(cls, folder: Path) -> Path:
        return folder.expanduser().resolve()

    @field_validator("tools")
    @classmethod
    def _known_tools(cls, tools: list[str]) -> list[str]:
        if unknown := sorted({*tools} - {*TOOL_NAMES}):
            raise ValueError(f"there are no tools {unknown}; there are {', '.join(TOOL_NAMES)}")
        return tools

    @field_validator("runtime")
    @classmethod
    def _has_a_box(cls, runtime: RuntimeConfig) -> RuntimeConfig:
        box_class(runtime.type)
        return runtime


class CodeTasksetConfig(CodeSettings, vf.TasksetConfig):
    """Which tasks load, and how they are played."""

    split: Split = "train"
    """Repositories to train on, held-out ones, or all. A repository is in one of the two, whatever its tasks are."""
    eval_share: float = Field(0.2, ge=0, le=1)
    kinds: list[str] = Field(default_factory=list)
    """Only tasks of these kinds (delete, mutate, ...); empty takes all."""
    num_tasks: int | None = Field(None, ge=1)
    """At most this many, drawn by `seed`."""
    seed: int = 0
    """Draws the order."""
    instruction: str = INSTRUCTION
    """System prompt, with the task's test command for {tests}; an empty one is left out."""


class CodeState(vf.State):
    """What a rollout leaves for grading, and what grading says."""

    seal: Any = Field(default=None, exclude=True)
    uses: Any = Field(default=None, exclude=True)
    files: dict[str, bytes] | None = Field(default=None, exclude=True)
    """The agent's tree at the end; None until it was read."""
    grade: Grade | None = Field(default=None, exclude=True)
    verdict: Any = Field(default=None, exclude=True)


class CodeRollout:
    is_over = False

    def __init__(self, task: CodeTask, settings: CodeSettings) -> None:
        self._task = task
        self._settings = settings
        self._box: Box | None = None
        self._tools: CodeTools | None = None
        self._seal = seal_of(task, settings)
        self._uses: list[ToolUse] = []
        self.schemas: list[dict[str, Any]] = []

    async def start(self) -> str:
        """Open the box. The task's prompt says all, so that nothing is added to it."""
        settings = self._settings
        with sandbox_failures():
            self._box = await open_box(
                settings.runtime, files=self._seal.agent_files(), python_path=self._task.python_path
            )
        self._tools = CodeTools(
            self._box, names=settings.tools, output_chars=settings.output_chars, timeout_s=settings.command_timeout_s
        )
        self.schemas = self._tools.schemas
        return ""

    async def call(self, name: str, arguments_json: str) -> str:
        assert self._tools is not None
        with sandbox_failures():
            reply = await self._tools.call(name, arguments_json)
        self._uses.append(tool_use(len(self._uses), name, arguments_json, reply))
        return reply

    async def finish(self, trace: vf.Trace) -> None:
        if self._box is None:
            return
        state = cast(CodeState, trace.state)
        try:
            with sandbox_failures():
                state.files = await read_files(self._box, self._seal.agent_files())
            state.seal, state.uses = self._seal, self._uses
        finally:
            await self._box.close()


@contextlib.contextmanager
def sandbox_failures() -> Iterator[None]:
    try:
        yield
    except (SandboxError, OSError) as error:
        raise vf_errors.SandboxError(str(error)) from error


def seal_of(task: CodeTask, settings: CodeSettings) -> Seal:
    return seal(task, tree_of(task, settings.trees), settings.monitor)


async def read_files(box: Box, start: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the regular files of a box's work folder. `start`: files that are read whatever the others take."""
    listed = await box.list_files()
    content = {path: start[path] for path in start.keys() & listed.keys()}
    left = MAX_TREE_BYTES + sum(map(len, start.values()))
    for path, size in sorted(listed.items(), key=lambda item: (item[0] not in start, item[0])):
        if size > MAX_READ_BYTES or (size > left and path not in start):
            continue
        with contextlib.suppress(OSError, ValueError):
            content[path] = await box.read_file(path, MAX_READ_BYTES)
            left -= size
    return content


class CodeData(TaskRow):
    """The wire row of a task. The task itself stays in its file: solutions and trees are not part of a trace."""

    settings: CodeSettings
    repository: str = ""
    place: int = 0
    """Where the task's line begins in tasks.jsonl, in bytes."""

    def code_task(self) -> CodeTask:
        return read_task(self.settings.folder, self.place)

    def tool_executor(self) -> CodeRollout:
        return CodeRollout(self.code_task(), self.settings)

    def is_tool_error(self, text: str) -> bool:
        return is_tool_error(text)


class CodeEpisode(vf.Task[CodeData, CodeState]):
    """Plays a task in a sandbox, and scores it by its tests in another one."""

    @property
    def key(self) -> str:
        return f"code/{self.data.name}"

    async def setup(self, trace: vf.Trace[CodeData, CodeState], runtime: vf.Runtime) -> None:
        """Put the agent's tree into the runtime of a harness that runs a program there; the tool loop opens its own."""
        if runtime.type == "subprocess":
            return
        seal = seal_of(self.data.code_task(), self.data.settings)
        with sandbox_failures():
            await box_of(runtime).write_files(seal.agent_files())
        trace.state.seal = seal

    async def finalize(self, trace: vf.Trace[CodeData, CodeState], runtime: vf.Runtime) -> None:
        task, state = self.data.code_task(), trace.state
        if state.seal is None:  # The harness asked for no tools.
            state.seal = seal_of(task, self.data.settings)
            state.files = state.seal.agent_files()
        if state.files is None:
            with sandbox_failures():
                box = box_of(runtime)
                state.files = await read_files(box, state.seal.agent_files())
        if state.uses is None:
            state.uses = _tool_uses(trace)
        settings, changed = self.data.settings, state.seal.changed_files(state.files)
        monitor, bound = settings.monitor, settings.regression_s
        with sandbox_failures():
            state.grade = await grade(task, settings.trees, changed, settings.runtime, regression_s=bound)
        found = state.grade.findings
        state.verdict = await asyncio.to_thread(inspect, task, state.seal, state.files, state.uses, monitor, found)

    @vf.reward(weight=1.0)
    async def solved(self, trace: vf.Trace[CodeData, CodeState]) -> float:
        return trace.state.verdict.reward(self._earned(trace.state))

    @vf.metric
    async def outcome(self, trace: vf.Trace[CodeData, CodeState]) -> dict[str, float]:
        task, state, result = self.data.code_task(), trace.state, trace.state.grade
        assert result is not None  # verifiers scores only what `finalize` has graded.
        expected = {*task.fail_to_pass, *task.pass_to_pass} - set(task.flaky)
        taken, refused = allowed_files(task, state.seal.changed_files(state.files or {}))
        if refused:
            logger.info("task %s: not graded: %s", task.id, str(refused)[:2000])
        calls = Counter(use.name for use in state.uses)
        errors = sum(is_tool_error(str(message.content)) for message in trace.tool_messages)
        return {
            "solved_by_tests": float(result.solved),
            "tests_passed": len(expected & result.passed) / max(len(expected), 1),
            "tests_repaired": result.fraction,
            "tampered": float(bool(result.tampered)),
            "changed_elsewhere": float(len(result.elsewhere)),
            "patch_files": float(len(taken)),
            "patch_files_refused": float(len(refused)),
            "grading_s": result.wall_s,
            "regression_s": result.regression_s,
            "tool_errors": float(errors),
            **{f"calls/{name}": float(calls[name]) for name in self.data.settings.tools},
            **state.verdict.metrics(self._earned(state)),
        }

    def _earned(self, state: CodeState) -> float:
        assert state.grade is not None
        earned = state.grade.fraction if self.data.settings.partial_credit else float(state.grade.solved)
        return earned * self.data.settings.elsewhere if state.grade.elsewhere else earned


def _tool_uses(trace: vf.Trace[CodeData, CodeState]) -> list[ToolUse]:
    messages = [node.message for node in trace.nodes]
    replies = {message.tool_call_id: str(message.content) for message in messages if message.role == "tool"}
    calls = [call for message in messages if message.role == "assistant" for call in message.tool_calls or []]
    uses = enumerate((call, replies.get(call.id, "")) for call in calls)
    return [tool_use(turn, call.name, call.arguments, reply) for turn, (call, reply) in uses]


class CodeTaskset(vf.Taskset[CodeEpisode, CodeTasksetConfig]):  # pyright: ignore[reportInvalidTypeArguments]
    """Task i of a configuration and a folder is always the same task."""

    def load(self) -> Iterator[CodeEpisode]:
        config = self.config
        settings = CodeSettings(**{name: getattr(config, name) for name in CodeSettings.model_fields})
        chosen: list[tuple[bytes, CodeData]] = []
        splits: dict[str, str] = {}
        for place, task in index_tasks(settings.folder):
            split = splits[task.repository] = split_of(task.repository, config.eval_share)
            if config.split not in ("all", split) or (config.kinds and task.kind not in config.kinds):
                continue
            tree_of(task, settings.trees)  # Say now that one is missing.
            command = task.runner.command if task.runner else ["python", "-m", "pytest"]
            tests = shlex.join(command).replace("{report}", "report")
            data = CodeData(
                name=task.id,
                prompt=task.prompt,
                system_prompt=config.instruction.replace("{tests}", tests) or None,
                repository=task.repository,
                workdir=WORK,
                place=place,
                settings=settings,
            )
            chosen.append((hashlib.blake2b(f"{config.seed}/{task.id}".encode()).digest(), data))
        if not chosen:
            listed = ", ".join(f"{name} ({split})" for name, split in sorted(splits.items())[:20])
            raise ConfigError(
                f"{settings.folder}: none of its tasks is in split {config.split!r} with kinds "
                f"{config.kinds or 'any'}. Its repositories: {listed}. Change these settings or eval_share"
            )
        chosen.sort(key=lambda pair: pair[0])
        for _, data in chosen[: config.num_tasks]:
            yield CodeEpisode(data, config.task)
