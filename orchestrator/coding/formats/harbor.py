"""Harbor task folders played in a sandbox, for tasks that do not need their Dockerfile.

    NAME/task.toml  instruction.md  environment/  solution/solve.sh  tests/test.sh -> /logs/verifier/reward.txt | .json

    taskset = { id = "orchestrator.coding.formats.harbor", folder = "harbor-tasks" }

Grading takes the agent's files into a fresh sandbox, adds tests/ and runs tests/test.sh.
"""

from __future__ import annotations

import contextlib
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import verifiers.v1 as vf
from pydantic import Field

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError
from orchestrator.coding.code.code_taskset import CodeData, CodeSettings, CodeState, sandbox_failures
from orchestrator.coding.monitor.verdict import HackMonitorConfig
from orchestrator.coding.sandbox.box import WORK, open_box, read_tree
from orchestrator.coding.task import CodeTask

__all__ = ["Harbor"]

HIDDEN = ".harbor"
"""Folder below the work folder with tests and logs, in the grading sandbox only."""
_NEEDS_BUILD = ("Dockerfile", "docker-compose.yaml")
_PATHS = re.compile(r"(?<![\w./-])/(app|tests|logs/verifier)(?![\w-])")
_MAX_REWARD_BYTES = 2**20


class HarborConfig(vf.TasksetConfig):
    """Which task folders, and how they are played."""

    folder: Path
    """Folder with task folders, at any depth: those that hold a task.toml."""
    ignore_dockerfile: bool = False
    """Play tasks with a Dockerfile or an image in the plain sandbox, which then must have all that they need."""
    instruction: str = "You work in a shell in the current folder. Do what the user asks for. Answer when it is done."
    """System prompt; an empty one is left out."""
    verifier_timeout_s: float = Field(600.0, gt=0)
    """Longest run of tests/test.sh, where task.toml does not say less."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """The sandboxes. Left out, the source's own table [orchestrator.source.runtime] counts."""


class HarborData(CodeData):
    """The wire row of a task."""

    task_folder: Path
    verifier_timeout_s: float

    def code_task(self) -> CodeTask:
        environment = self.task_folder / "environment"
        files = read_tree(environment) if environment.is_dir() else {}
        start = {
            path: content.decode("utf-8", "replace") for path, content in files.items() if path not in _NEEDS_BUILD
        }
        return CodeTask(
            id=str(self.name),
            kind="harbor",
            repository=str(self.name),
            prompt=self.prompt_text,
            start=start,
            editable=["**"],
            fail_to_pass=[],
            pass_to_pass=[],
        )


class HarborTask(vf.Task[HarborData, CodeState]):
    """Runs the verifier of the task folder on what the agent left."""

    @property
    def key(self) -> str:
        return f"harbor/{self.data.name}"

    async def finalize(self, trace: vf.Trace[HarborData, CodeState], runtime: vf.Runtime) -> None:
        """Run tests/test.sh in a fresh sandbox. No reward file is a reward of 0."""
        left = trace.state.files
        if left is None:
            left = {path: text.encode() for path, text in self.data.code_task().start.items()}
        files = {path: content for path, content in left.items() if not path.startswith(f"{HIDDEN}/")}
        for path, content in read_tree(self.data.task_folder / "tests").items():
            files[f"{HIDDEN}/tests/{path}"] = in_work_folder(content)
        files[f"{HIDDEN}/logs/verifier/.keep"] = b""
        scores: dict[str, float] = {}
        with sandbox_failures():
            async with await open_box(self.data.settings.runtime, files=files) as box:
                await box.run(["bash", f"{HIDDEN}/tests/test.sh"], timeout_s=self.data.verifier_timeout_s)
                for name in ("reward.txt", "reward.json"):  # The latter counts where there are both.
                    with contextlib.suppress(FileNotFoundError, ValueError):
                        path = f"{HIDDEN}/logs/verifier/{name}"
                        scores = read_scores(await box.read_file(path, _MAX_REWARD_BYTES))
        has_file = bool(scores)
        trace.record_reward("solved", scores.pop("reward", 0.0))
        trace.record_metrics({"has_reward_file": float(has_file), **scores})


class Harbor(vf.Taskset[HarborTask, HarborConfig]):  # pyright: ignore[reportInvalidTypeArguments]
    """The task folders in the order of their paths."""

    def load(self) -> Iterator[HarborTask]:
        config = self.config
        folders = sorted(path.parent for path in config.folder.rglob("task.toml"))
        if not folders:
            raise ConfigError(f"{config.folder} has no Harbor task folder: none holds a task.toml")
        settings = CodeSettings(
            folder=config.folder, runtime=config.runtime, monitor=HackMonitorConfig(policy="none", lures=False)
        )
        for folder in folders:
            yield HarborTask(_read_folder(folder, config, settings), config.task)


def _read_folder(folder: Path, config: HarborConfig, settings: CodeSettings) -> HarborData:
    for required in ("instruction.md", "tests/test.sh"):
        if not (folder / required).is_file():
            raise ConfigError(f"Harbor task {folder}: no {required}; every task folder needs one")
    try:
        table: dict[str, Any] = tomllib.loads((folder / "task.toml").read_text())
        instruction = (folder / "instruction.md").read_text()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Harbor task {folder}: cannot be read: {error}") from error
    built = [name for name in _NEEDS_BUILD if (folder / "environment" / name).is_file()]
    if table.get("environment", {}).get("docker_image"):
        built.append("environment.docker_image")
    if built and not config.ignore_dockerfile:
        raise ConfigError(
            f"Harbor task {folder}: it has {' and '.join(built)}, which a plain sandbox does not build. Set "
            "taskset.ignore_dockerfile = true if the sandbox has what the task needs, or play it in a container"
        )
    limit_s = table.get("verifier", {}).get("timeout_sec", config.verifier_timeout_s)
    return HarborData(
        name=folder.name,
        prompt=in_work_folder(instruction.encode()).decode(),
        system_prompt=config.instruction or None,
        task_folder=folder.resolve(),
        verifier_timeout_s=min(float(limit_s), config.verifier_timeout_s),
        settings=settings,
    )


def in_work_folder(content: bytes) -> bytes:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    places = {"app": WORK, "tests": f"{WORK}/{HIDDEN}/tests", "logs/verifier": f"{WORK}/{HIDDEN}/logs/verifier"}
    return _PATHS.sub(lambda match: places[match[1]], text).encode()


def read_scores(content: bytes) -> dict[str, float]:
    try:
        scores = msgspec.json.decode(content, type=dict[str, float] | float)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if not isinstance(scores, dict):
        scores = {"reward": float(scores)}
    return scores if all(map(math.isfinite, scores.values())) else {}
