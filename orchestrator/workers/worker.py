"""An environment worker: its messages, and its process.

    python -m orchestrator.workers.worker --socket-fd N --scratch DIR

    pool --SourceSpec--> worker     once
    pool --RunRollout--> task per rollout --> Environment.run --> gateway (HTTP)
                              |                    ^ deadline: RunRollout.timeout_s
    pool <--RolloutReply------+       CancelRollout aborts the task, and with it the open request
    pool <--WorkerReady-- every HEARTBEAT_S; the pool kills a worker that stays silent. One whose event loop stands
                          still for STALL_S writes its stack to its log

Messages are msgpack over a private socket pair. A reply carries text and numbers only: token ids, logprobs and version
spans are in the gateway's record of the rollout's session, so they cross one process boundary, not two.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import re
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.config.sandbox import SANDBOX_TYPES
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.monitor.events import join_events
from composer_prime.plan.sandboxes import probe
from composer_prime.run.process import end_with_parent
from composer_prime.wire.sockets import Frames

logger = logging.getLogger("orchestrator.worker")

TRAIN, EVAL = "train", "eval"
"""The usual names of a source's task sets (`SourceSpec.tasksets`)."""
HEARTBEAT_S = 2.0
"""A worker says this often that its event loop runs."""
STALL_S = 5.0
"""A worker whose event loop stands still for this long writes its stack to its log."""
_ABORT_S = 3.0
"""Time for aborted rollouts to end. The environments themselves close after that."""
_DETAIL_CHARS = 2000
_COMPARED = 512
"""Held-out prompts that are looked for among the training prompts."""
_STDLIB = sysconfig.get_paths()["stdlib"]


class SourceSpec(msgspec.Struct, frozen=True, kw_only=True, tag="source"):
    """The first message: the environment that a source's workers load. Plain data: it imports no verifiers."""

    name: str
    tasksets: dict[str, dict[str, Any]]
    """Task sets by name (`train`, `eval`); each has `id`, an importable module, and its own settings."""
    harness: dict[str, Any]
    """`id`, an importable module, and its own settings."""
    model_path: str
    """Folder with the policy's tokenizer and chat template."""
    runtime: dict[str, Any] = {}
    """[orchestrator.source.runtime], a RuntimeConfig; what is left out has its default."""
    renderer: str | dict[str, Any] | None = None
    """A renderer's name or configuration; None chooses by the model folder (chat_renderer.py)."""
    max_total_tokens: int | None = None
    """Prompt tokens of one rollout, each counted once, and sampled tokens."""
    import_from: list[str] = []
    """Folders with further modules, behind what is installed (`run.import_from`)."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The environment has loaded; repeated as a heartbeat. With an `error` it cannot be loaded, now or later."""

    num_tasks: dict[str, int] = {}
    """By task set."""
    overlap: str | None = None
    """A sentence where held-out prompts are training prompts too."""
    error: str = ""
    """Class name in composer_prime.errors."""
    message: str = ""


class RunRollout(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Play one rollout."""

    rollout_id: str
    """Sent as X-Session-ID with every generate request. Unique for each attempt: a retry takes a new one."""
    task_index: int
    model: str
    gateway_url: str
    """http://host:port/v1"""
    timeout_s: float
    """Wall-clock limit of the whole rollout, including its scoring."""
    taskset: str = TRAIN
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches top-k off."""
    max_tokens: int | None = None
    """Per assistant turn; None lets the context be the limit."""

    def failed(self, kind: str, message: str, **details: Any) -> RolloutReply:
        """Return the reply to this request where its task is not known. Arguments as of RolloutFailure."""
        failure = RolloutFailure(kind=kind, message=message, **details)
        return RolloutReply(rollout_id=self.rollout_id, task_id=f"task-{self.task_index}", failure=failure)


class CancelRollout(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Abort a rollout; its reply has an error of kind `cancelled`."""

    rollout_id: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    arguments: str
    """Raw JSON, exactly as the model wrote it."""


class PlayedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the rollout, as the worker has it. Messages are in the order in which they were made."""

    role: str
    text: str
    error: str | None = None
    """On a tool message that reports a failed call: its first line."""
    num_tokens: int | None = None
    """Tokens this message added to the context (for an assistant turn: those sampled)."""
    call: int | None = None
    """Sampled turns: number of its request among the session's successful generate requests, in order of start."""
    record_id: str = ""
    """Sampled turns: the gateway's record of its tokens (Answer.record_id)."""
    asked_s: float | None = None
    answered_s: float | None = None
    """Sampled turns: when its request was sent and when its answer came, in seconds from the session's start. What
    lies between an answer and the next request is the tools' time."""
    session: int = 0
    """Index into RolloutReply.sessions."""
    parent: int | None = None
    """Index of the preceding message in `turns`; None for the first. Two turns with one parent are a branch."""
    tool_calls: list[ToolCall] = []
    reasoning: str | None = None


class MessageRecord(PlayedMessage, frozen=True, kw_only=True):
    """A message, and what the orchestrator adds to sampled turns."""

    turn: int | None = None
    """The turn's number in TurnSpan and HintedTurn."""
    finish_reason: str | None = None
    """stop | length"""
    surprisal: float | None = None
    """Mean of -log p of its tokens, in nats, under the sampling distribution. This is an unbiased estimate of that
    distribution's entropy per token."""
    hint: str | None = None
    """The hint that SDPO put before a turn that went wrong (orchestrator/hints); `error` then is the kind of error."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's conversation. `session_id` is its name at the gateway."""

    session_id: str
    agent: str
    trainable: bool
    reward: float | None
    tools: list[dict[str, Any]] = []
    """The tools on offer, as OpenAI function definitions."""


class RolloutFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a rollout has no reward."""

    kind: str
    """provider | context_overflow | render | interception | harness | toolset | sandbox | task | env | no_reward |
    quarantine | timeout | cancelled | worker | request | internal"""
    message: str
    retryable: bool = True
    detail: str | None = None
    """End of the traceback, where there is one."""
    where: str | None = None
    """`file:line, in function` of the code that raised, where it is known."""

    def text(self) -> str:
        """Return kind, message and place in one line."""
        return f"{self.kind}: {self.message}{f' ({self.where})' if self.where else ''}"

    @property
    def cause(self) -> tuple[str, str]:
        """Equal for failures of one cause: the same line of code, or the same message but for its numbers."""
        return self.kind, self.where or re.sub(r"\d+", "#", self.message)


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The outcome of one rollout: a reward or a failure, which is data, never a zero reward."""

    rollout_id: str
    task_id: str
    reward: float | None = None
    """Weighted sum of the reward functions; None exactly when `failure` is set."""
    parts: dict[str, float] = {}
    """Score of each reward function, before its weight."""
    metrics: dict[str, float] = {}
    turns: list[MessageRecord] = []
    sessions: list[SessionRecord] = []
    stop_reason: str | None = None
    """agent_completed, a limit (max_turns, …), a stop hook's name, or <stage>_timeout."""
    truncated: bool = False
    """A limit or the token budget cut the rollout short."""
    failure: RolloutFailure | None = None
    verdict: dict[str, Any] = {}
    """The hack monitor's verdict (`HackVerdict.record`); empty without a monitor."""
    wall_s: float | None = None


ToWorker = SourceSpec | RunRollout | CancelRollout
FromWorker = WorkerReady | RolloutReply


# -- the process -----------------------------------------------------------------------------------------------------


class Worker:
    """Serves the environments of one source on this process's event loop."""

    def __init__(self, spec: SourceSpec, frames: Frames, scratch: Path) -> None:
        """Import verifiers and load everything. `scratch`: for the rollouts' working folders. Raises ConfigError."""
        from orchestrator.chat_renderer import build_renderer
        from orchestrator.workers.verifiers_adapter import Environment, install_renderer, keep_folders_in

        sys.path += [folder for folder in spec.import_from if folder not in sys.path]
        keep_folders_in(scratch)
        self._frames = frames
        config, renderer = build_renderer(spec.model_path, spec.renderer)
        install_renderer(spec.model_path, config, renderer)
        self._environments = {name: Environment(spec, name, config) for name in spec.tasksets}
        for environment in self._environments.values():
            check_runtimes(environment)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serve until the parent closes the connection, then abort every rollout."""
        async with AsyncExitStack() as stack:
            for environment in self._environments.values():
                await stack.enter_async_context(environment.serving())
            num_tasks = {name: environment.num_tasks for name, environment in self._environments.items()}
            ready = WorkerReady(num_tasks=num_tasks, overlap=overlap(self._environments))
            heartbeats = asyncio.create_task(self._heartbeats(ready))
            try:
                while (message := await self._frames.receive()) is not None:
                    self._handle(message)
            finally:
                tasks = [heartbeats, *self._running.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=_ABORT_S)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case RunRollout():
                self._running[message.rollout_id] = asyncio.create_task(self._rollout(message))
            case CancelRollout():
                if task := self._running.get(message.rollout_id):
                    task.cancel()

    async def _rollout(self, request: RunRollout) -> None:
        started = time.monotonic()
        try:
            reply = await self._environments[request.taskset].run(request)
        except asyncio.CancelledError:
            reply = request.failed("cancelled", "cancelled by the orchestrator", retryable=False)
        except Exception as error:
            detail = traceback.format_exc()[-_DETAIL_CHARS:]
            reply = request.failed("internal", f"{type(error).__name__}: {error}", detail=detail)
        finally:
            self._running.pop(request.rollout_id, None)
        try:
            self._frames.send(msgspec.structs.replace(reply, wall_s=time.monotonic() - started))
        except (ValueError, TypeError, OverflowError) as error:
            # A text is not valid Unicode, or a metric is not a number. The rollout must still end.
            self._frames.send(request.failed("internal", f"its reply cannot be encoded: {error}"))

    async def _heartbeats(self, ready: WorkerReady) -> None:
        """Say that the loop runs. faulthandler's thread needs no GIL, so it also sees code that holds it."""
        try:
            while True:
                self._frames.send(ready)
                faulthandler.dump_traceback_later(STALL_S)
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            faulthandler.cancel_dump_traceback_later()


def overlap(environments: Mapping[str, Any]) -> str | None:
    """Return a sentence where held-out prompts, the first _COMPARED of them, are training prompts too."""
    train, held_out = environments.get(TRAIN), environments.get(EVAL)
    if train is None or held_out is None:
        return None
    training_prompts = {train.describe(index)[1] for index in range(train.num_tasks)} - {"", None}
    count = min(held_out.num_tasks, _COMPARED)
    both = sum(held_out.describe(index)[1] in training_prompts for index in range(count))
    if both == 0:
        return None
    return (
        f"{both} of {count} held-out tasks have the prompt of a training task, so their reward may only show what was "
        "memorized: let eval_taskset have a split that shares no task with taskset"
    )


def check_runtimes(environment: Any) -> None:
    """Raise ConfigError when a runtime of an Environment's agents or tasks does not work on this machine."""
    from verifiers.v1.configs.agent import agent_config_fields

    config = environment._env.config
    types = {agent.runtime.type for agent in agent_config_fields(config).values()}
    if (taskset_runtime := getattr(config.taskset, "runtime", None)) is not None:
        kind = getattr(taskset_runtime, "type", taskset_runtime)
        types.add("bubblewrap" if kind == "auto" else kind)
    for kind in sorted(types & set(SANDBOX_TYPES)):
        if not (runtime_probe := probe(kind)).works:
            raise ConfigError(
                f"source {environment.spec.name!r} executes code in the runtime {kind!r}, which does not work here: "
                f"{runtime_probe.text}"
            )


async def serve_worker(connection: socket.socket, scratch: Path) -> None:
    """Read the SourceSpec, answer WorkerReady, then serve."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    frames: Frames[ToWorker] = Frames(reader, writer, ToWorker, "pool")
    spec = await frames.receive()
    if not isinstance(spec, SourceSpec):
        return
    try:
        worker = Worker(spec, frames, scratch)
    except ComposerError as error:
        frames.send(WorkerReady(error=type(error).__name__, message=str(error)))
        frames.close()
        await writer.wait_closed()
        return
    await worker.serve()


# -- where an environment's code stood ------------------------------------------------------------------------------


def is_own(file: str) -> bool:
    """Tell whether a file belongs neither to Python nor to an installed package."""
    path = Path(file)
    return not {"site-packages", "dist-packages"} & set(path.parts) and not path.is_relative_to(_STDLIB)


def frame_text(file: str, line: str, function: str) -> str:
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}, in {function}"


def main() -> None:
    parser = argparse.ArgumentParser(description="An environment worker; the orchestrator starts it.")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    end_with_parent(signal.SIGKILL)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    join_events("environment")
    asyncio.run(serve_worker(socket.socket(fileno=args.socket_fd), args.scratch))


if __name__ == "__main__":
    from orchestrator.workers import worker  # Its classes of messages are those that other modules import.

    worker.main()
