"""One rollout's box: opened for the agent, read at the end. The tool loop plays it.

    start   seal -> open_box(agent's tree) -> tools
    call    tool -> reply, recorded for the monitor
    finish  read the box's files -> trace.state, close the box

A harness that runs a program of its own has a verifiers runtime instead, which the task set prepares and reads.

A box that cannot be opened, or ends in mid-rollout, raises verifiers' SandboxError. The rollout then has failed with
the kind `sandbox`; it never counts as an unsolved task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import verifiers.v1 as vf
from pydantic import BaseModel, Field
from verifiers.v1 import errors as vf_errors

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from orchestrator.coding import monitor as code_monitor
from orchestrator.coding.code.grading import Grade
from orchestrator.coding.code.tools import TOOL_NAMES, CodeTools
from orchestrator.coding.sandbox.box import Box, open_box
from orchestrator.coding.task import TREES_FOLDER, CodeTask, tree_of

MAX_READ_BYTES = 2**22
"""A larger file of the agent's tree is not looked at."""
MAX_TREE_BYTES = 2**26
"""Of the agent's tree, besides what it had at the start."""


class CodeSettings(BaseModel):
    """What a task set says about the rollouts of its tasks."""

    folder: Path
    """With tasks.jsonl and trees/."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    tools: tuple[str, ...] = TOOL_NAMES
    output_chars: int
    command_timeout_s: float
    monitor: code_monitor.HackMonitorConfig = Field(default_factory=code_monitor.HackMonitorConfig)
    partial_credit: bool = False

    @property
    def trees(self) -> Path:
        return self.folder / TREES_FOLDER


class CodeState(vf.State):
    """What a rollout leaves for grading."""

    seal: Any = Field(default=None, exclude=True)
    """The monitor's Seal of the agent's tree."""
    uses: Any = Field(default=None, exclude=True)
    """The monitor's ToolUses; None where a program outside of the tool loop played."""
    files: dict[str, bytes] | None = Field(default=None, exclude=True)
    """The agent's tree at the end; None until it was read."""
    calls: dict[str, int] = Field(default_factory=dict)
    """Tool calls by tool."""
    tool_errors: int = 0
    grade: Grade | None = Field(default=None, exclude=True)
    verdict: Any = Field(default=None, exclude=True)
    """The monitor's HackVerdict."""
    quarantine: str = ""
    """Why the rollout must not be trained on; empty where it may."""


class CodeRollout:
    """The tools of one rollout, in a box of its own. Implements the tool loop's `ToolExecutor`."""

    is_over = False

    def __init__(self, task: CodeTask, settings: CodeSettings) -> None:
        self._task = task
        self._settings = settings
        self._box: Box | None = None
        self._tools: CodeTools | None = None
        self._seal = seal_of(task, settings)
        self._uses: list[code_monitor.ToolUse] = []
        self.schemas: list[dict[str, Any]] = []

    async def start(self) -> str:
        """Open the box. The task's prompt says all, so that nothing is added to it."""
        settings = self._settings
        with sandbox_failures():
            self._box = await open_box(
                settings.runtime, files=self._seal.agent_files(), python_path=self._task.python_path
            )
        self._tools = CodeTools(
            self._task,
            self._box,
            names=settings.tools,
            output_chars=settings.output_chars,
            timeout_s=settings.command_timeout_s,
        )
        self.schemas = self._tools.schemas
        return ""

    async def call(self, name: str, arguments_json: str) -> str:
        assert self._tools is not None
        with sandbox_failures():
            reply = await self._tools.call(name, arguments_json)
        self._uses.append(code_monitor.tool_use(len(self._uses), name, arguments_json, reply))
        return reply

    async def finish(self, trace: vf.Trace) -> None:
        """Read the agent's files into the trace's state, and close the box."""
        if self._box is None:
            return
        state = cast(CodeState, trace.state)
        try:
            if self._tools is not None:
                with sandbox_failures():
                    state.files = await read_files(self._box, self._seal.agent_files())
                state.calls, state.tool_errors = dict(self._tools.calls), self._tools.errors
                state.seal, state.uses = self._seal, self._uses
        finally:
            await self._box.close()


@contextlib.contextmanager
def sandbox_failures() -> Iterator[None]:
    """Turn a sandbox's failure into verifiers' error of that kind."""
    try:
        yield
    except SandboxError as error:
        raise vf_errors.SandboxError(str(error)) from error


def seal_of(task: CodeTask, settings: CodeSettings) -> code_monitor.Seal:
    return code_monitor.seal(task, tree_of(task, settings.trees), settings.monitor)


async def read_files(box: Box, start: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the regular files of a box's work folder. What is larger than the limits, or goes away, is left out.

    `start`: the files that the box began with. They come first, so that none of them seems to be deleted because of
    what else the agent wrote.
    """
    content: dict[str, bytes] = {}
    left = MAX_TREE_BYTES + sum(map(len, start.values()))
    for path, size in sorted((await box.list_files()).items(), key=lambda item: (item[0] not in start, item[0])):
        if size > MAX_READ_BYTES or size > left:
            continue
        with contextlib.suppress(OSError, ValueError):
            content[path] = await box.read_file(path, MAX_READ_BYTES)
            left -= size
    return content
