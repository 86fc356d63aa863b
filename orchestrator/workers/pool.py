"""A source's workers, as the orchestrator sees them, and the messages between the two.

run         the ready worker with the fewest rollouts --> its reply; none ready: wait at most start_timeout_s
_keep_alive one task a process: start -> wait for its end -> back off -> start again
            max_restarts ends in a row without a finished rollout: the pool fails, and every `run` raises why

Messages are msgpack over a private socket pair. Token ids, logprobs and version spans are in the gateway's record of
the rollout's session instead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

import composer_prime.errors
from composer_prime.errors import ComposerError, ConfigError, DeadlineError, EnvironmentWorkerError, WireError
from composer_prime.event_loop import Notifier, end, watched
from composer_prime.import_path import frame_text
from composer_prime.monitor.events import OURS, event
from composer_prime.run import process as processes
from composer_prime.run.process import WORKER_ENVIRONMENT, child_options, exit_text, signal_session
from composer_prime.run.retry import backoff_s
from composer_prime.run.scratch import Scratch
from composer_prime.wire.sockets import Frames

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_LAST_LINES = 40
"""The stack of code that blocks has more than 20."""
_STACK_LINES = 200
DUMP = "Timeout (0:"
"""Begins the stacks that faulthandler and the worker's own thread write."""
_DUMPED = re.compile(r'^ +File "([^"<]+)", line (\d+) in (\S+)', re.MULTILINE)
"""A frame of faulthandler's, the innermost first."""
_NOT_OWN = (sysconfig.get_paths()["stdlib"] + "/", *(f"{Path(__file__).parents[2] / package}/" for package in OURS))
_STOP_GRACE_S = 5.0
TRAIN, EVAL = "train", "eval"
"""Usual names of a source's task sets."""
STALL_S = 5.0
"""A worker whose event loop stands still for so long writes its stack; one that loads, for twice that."""
BLOCKED_BY = "the event loop stands still in rollout "
"""Begins a line of a worker's log."""
_MAX_HANGS = 2
"""A task that blocked its worker so often is played no more."""


# -- messages --------------------------------------------------------------------------------------------------------


class SourceSpec(msgspec.Struct, frozen=True, kw_only=True, tag="source"):
    """The first message: what a source's workers load. Plain data: it imports no verifiers."""

    name: str
    tasksets: dict[str, dict[str, Any]]
    """By name; each has `id`, an importable module, and its own settings."""
    harness: dict[str, Any]
    """`id`, an importable module, and its own settings."""
    model_path: str
    """The policy's folder, with tokenizer and chat template."""
    runtime: dict[str, Any] = {}
    """[orchestrator.source.runtime]."""
    renderer: str | dict[str, Any] | None = None
    """Name or configuration; None chooses by the model folder."""
    max_total_tokens: int | None = None
    """Prompt tokens of a rollout, each counted once, and sampled ones."""
    import_from: list[str] = []
    """`run.import_from`: folders with modules, behind what is installed."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The environment has loaded; also a heartbeat. With an `error` it can never be loaded."""

    num_tasks: dict[str, int] = {}
    """By task set."""
    notes: list[str] = []
    """Weaknesses of the task sets."""
    error: str = ""
    """Class name in composer_prime.errors."""
    message: str = ""


class RunRollout(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    rollout_id: str
    """The X-Session-ID of its requests. Unique for each attempt: a retry takes a new one."""
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
    """0: off."""
    max_tokens: int | None = None
    """Per assistant turn; None: the context is the limit."""

    def failed(self, kind: str, message: str, **details: Any) -> RolloutReply:
        """Return the reply where the task is not known."""
        failure = RolloutFailure(kind=kind, message=message, **details)
        return RolloutReply(rollout_id=self.rollout_id, task_id=f"task-{self.task_index}", failure=failure)


class CancelRollout(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Its reply has an error of kind `cancelled`."""

    rollout_id: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    arguments: str
    """As the model wrote it."""


class PlayedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a rollout, in the order in which they were made."""

    role: str
    text: str
    error: str | None = None
    """The first line of a tool message that reports a failed call."""
    num_tokens: int | None = None
    """Tokens this message added to the context (for an assistant turn: those sampled)."""
    call: int | None = None
    """Sampled turns: number among the session's answered requests, in order of start."""
    record_id: str = ""
    """Sampled turns: the gateway's record of its tokens (Answer.record_id)."""
    asked_s: float | None = None
    answered_s: float | None = None
    """Sampled turns: asked and answered, in seconds from the session's start. From then to the next is tools' time."""
    session: int = 0
    """Index into RolloutReply.sessions."""
    parent: int | None = None
    """Index of the preceding message in `turns`; None for the first. Two turns with one parent are a branch."""
    tool_calls: list[ToolCall] = []
    reasoning: str | None = None


class MessageRecord(PlayedMessage, frozen=True, kw_only=True):
    """A message, and what its session and the orchestrator add to sampled turns."""

    turn: int | None = None
    """Its number in TurnSpan and HintedTurn."""
    finish_reason: str | None = None
    """stop | length"""
    surprisal: float | None = None
    """Mean of -log p of its tokens, in nats: an unbiased estimate of the sampling distribution's entropy a token."""
    tokens: list[tuple[int, float]] = []
    """With orchestrator.record_tokens: those sampled, with log-probabilities, too old ones included."""
    on_side: bool = False
    """Sampled turns: a call on the side, such as for a title; the documentation of native agents has the rule."""
    hint: str | None = None
    """SDPO's before a turn that went wrong; `error` then is the kind of error."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's conversation. `session_id`: its name at the gateway."""

    session_id: str
    agent: str
    trainable: bool
    reward: float | None
    tools: list[dict[str, Any]] = []
    """As OpenAI function definitions."""
    expected: str | None = None
    """The `answer` of the task's data; for people."""


class RolloutFailure(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """provider | context_overflow | unreadable | render | interception | harness | toolset | sandbox | task | env |
    no_reward | timeout | cancelled | worker | hang | displaced | request | internal"""
    message: str
    retryable: bool = True
    detail: str | None = None
    """End of the traceback, where there is one."""
    where: str | None = None
    """`file:line, in function` of the code that raised, where it is known."""

    def text(self) -> str:
        return f"{self.kind}: {self.message}{f' ({self.where})' if self.where else ''}"

    @property
    def cause(self) -> tuple[str, str]:
        """Equal for the same line of code, or the same message but for its numbers."""
        return self.kind, self.where or re.sub(r"\d+", "#", self.message)


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The outcome of one rollout: a reward or a failure, which is data, never a zero reward."""

    rollout_id: str
    task_id: str = ""
    reward: float | None = None
    """Weighted sum of the reward functions; None exactly when `failure` is set."""
    parts: dict[str, float] = {}
    """Score of each reward function, before its weight."""
    metrics: dict[str, float] = {}
    turns: list[MessageRecord] = []
    sessions: list[SessionRecord] = []
    stop_reason: str | None = None
    """agent_completed, a limit, a stop hook's name, or <stage>_timeout."""
    truncated: bool = False
    """A limit cut it short."""
    failure: RolloutFailure | None = None
    verdict: dict[str, Any] = {}
    """The hack monitor's verdict (`HackVerdict.record`); empty without a monitor."""
    wall_s: float | None = None


ToWorker = SourceSpec | RunRollout | CancelRollout
FromWorker = WorkerReady | RolloutReply


# -- the pool --------------------------------------------------------------------------------------------------------


class WorkerPool:
    def __init__(
        self,
        spec: SourceSpec,
        *,
        workers: int = 1,
        start_timeout_s: float = 600.0,
        hang_timeout_s: float = 60.0,
        max_restarts: int = 5,
        log_dir: Path | None = None,
    ) -> None:
        """`hang_timeout_s`: of a silent worker; longer than any step of the environment may block."""
        self.spec = spec
        self._workers = workers
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._start_worker = partial(
            WorkerProcess.start, spec, start_timeout_s=start_timeout_s, hang_timeout_s=hang_timeout_s, log_dir=log_dir
        )
        self._children: dict[int, WorkerProcess] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self.changed = Notifier()
        self._failure: ComposerError | None = None
        self.ready: WorkerReady | None = None
        """The first worker's report."""
        self._hangs: Counter[tuple[str, int]] = Counter()
        """Of workers, by task set and index."""
        self.restarts = 0
        """Since `start`."""

    async def start(self) -> None:
        """Start every worker and wait until all have loaded. Raises what `WorkerProcess.start` raises."""
        self._supervisors = [watched(self._keep_alive(number), self._fail) for number in range(self._workers)]
        loaded = lambda: self.ready is not None and len(self._children) == self._workers
        try:
            # A process that takes too long fails by itself.
            await self.changed.wait_for(lambda: self._failure is not None or loaded(), math.inf)
            if self._failure is not None:
                raise self._failure
            assert self.ready is not None
            for note in self.ready.notes:
                logger.warning("source %s: %s", self.spec.name, note)
        except BaseException:
            await self.close()
            raise

    def num_tasks(self, taskset: str = TRAIN) -> int:
        assert self.ready is not None, "start the pool first"
        return self.ready.num_tasks[taskset]

    @property
    def players(self) -> list[WorkerProcess]:
        return [worker for worker in self._children.values() if not worker.gone]

    async def run(self, request: RunRollout, on_begin: Callable[[], None] = lambda: None) -> RolloutReply:
        """Play one rollout. Failures of environment, model or worker are in the reply.

        Calls `on_begin` once a worker takes it. Raises EnvironmentWorkerError once the workers have failed for good,
        and DeadlineError when none is ready in time.
        """
        task = request.taskset, request.task_index
        if self._hangs[task] >= _MAX_HANGS:
            message = f"it blocked its worker {self._hangs[task]} times, for hang_timeout_s each, and is left out"
            return request.failed("hang", message, retryable=False)
        player = await self._place()
        on_begin()
        reply = await player.run(request)
        if reply.failure is not None and reply.failure.kind == "hang":
            self._hangs[task] += 1
        return reply

    async def close(self) -> None:
        """Rollouts in flight get an error reply."""
        self._failure = self._failure or EnvironmentWorkerError(f"the workers of source {self.spec.name!r} are closed")
        await end(self._supervisors)
        await asyncio.gather(*(child.stop(_STOP_GRACE_S) for child in self._children.values()))
        self._children.clear()
        self.changed.notify()

    async def _place(self) -> WorkerProcess:
        found = await self.changed.wait_for(
            lambda: self._failure is not None or bool(self.players), self._start_timeout_s
        )
        if self._failure is not None:
            raise self._failure
        if not found:
            raise DeadlineError(
                f"source {self.spec.name!r}: no environment worker was ready within {self._start_timeout_s:g} s"
                ": the log tells why workers ended"
            )
        return min(self.players, key=lambda worker: worker.running)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, ComposerError):
            logger.error("a worker of source %r cannot be supervised any more", self.spec.name, exc_info=error)
            error = EnvironmentWorkerError(f"source {self.spec.name!r}: {type(error).__name__}: {error}")
        self._failure = self._failure or error
        self.changed.notify()

    async def _keep_alive(self, number: int) -> None:
        restarts = 0
        while True:
            try:
                child, ready = await self._start_worker(number)
            except (ComposerError, OSError) as error:
                if self.ready is None or isinstance(error, ConfigError):
                    raise
                reason, last_words = str(error), ""
            else:
                self._children[number] = child  # Before anything is awaited: `close` must find it.
                self.ready = self.ready or ready
                self.changed.notify()
                reason, last_words = await asyncio.shield(child.ended), child.last_words
                self._children.pop(number, None)
                restarts = 0 if child.completed else restarts
            restarts += 1
            if restarts > self._max_restarts:
                raise EnvironmentWorkerError(
                    f"source {self.spec.name!r}: {reason}. It was started {restarts} times without finishing a rollout "
                    f"(max_restarts = {self._max_restarts}).{last_words}"
                )
            wait_s = backoff_s(restarts - 1, first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S)
            logger.warning("%s; restarting it in %.1f s (restart %d)", reason, wait_s, restarts)
            self.restarts += 1
            await asyncio.sleep(wait_s)


class WorkerProcess:
    """Create it with `start`."""

    def __init__(
        self,
        label: str,
        process: asyncio.subprocess.Process,
        frames: Frames[FromWorker],
        scratch: Scratch,
        log: tuple[Path, int],
    ) -> None:
        """`log`: path, and where the worker's output begins."""
        self.label = label
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it is gone, once no request waits and its scratch folder is removed."""
        self.last_words = ""
        """Of output, once it is gone."""
        self._rollouts: dict[str, asyncio.Future[RolloutReply]] = {}
        self.completed = 0
        """Rollouts that came back with a reward."""
        self._process = process
        self._frames = frames
        self._scratch = scratch
        self._log = log
        self._heard_at = time.monotonic()
        self._end_reason: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, spec: SourceSpec, number: int, *, start_timeout_s: float, hang_timeout_s: float, log_dir: Path | None
    ) -> tuple[WorkerProcess, WorkerReady]:
        """Return a loaded worker and its report. Raises what it reports, EnvironmentWorkerError and DeadlineError."""
        worker = await cls._spawn(spec, number, log_dir)
        naming = asyncio.create_task(worker._name_loading())
        try:
            async with asyncio.timeout(start_timeout_s):
                first = await worker._frames.receive()
        except TimeoutError:
            await worker.kill("it did not load in time")
            raise DeadlineError(
                f"{worker.label} did not load its environment within {start_timeout_s:g} s: load less in "
                f"its constructor, or use a machine that is less busy.{worker.last_words}"
            ) from None
        except BaseException:
            await worker.kill("start was given up")
            raise
        finally:
            naming.cancel()
        if isinstance(first, WorkerReady) and not first.error:
            worker._heard_at = time.monotonic()
            worker._tasks = [asyncio.create_task(worker._read()), asyncio.create_task(worker._watch(hang_timeout_s))]
            return worker, first
        await worker.kill("it did not start")
        if isinstance(first, WorkerReady):
            raise getattr(composer_prime.errors, first.error, EnvironmentWorkerError)(first.message)
        status = exit_text(worker._process.returncode)
        raise EnvironmentWorkerError(f"{worker.label} {status} while it was loading.{worker.last_words}")

    @classmethod
    async def _spawn(cls, spec: SourceSpec, number: int, log_dir: Path | None) -> WorkerProcess:
        scratch = await asyncio.to_thread(Scratch, "worker")  # It removes what dead workers left.
        log = (log_dir or scratch.path) / f"worker_{spec.name}_{number}.log"
        label = f"worker {number} of source {spec.name!r}"
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        arguments = ["--socket-fd", str(theirs.fileno()), "--scratch", str(scratch.path)]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                log_offset = output.tell()
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "orchestrator.workers.worker", *arguments),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    **child_options(WORKER_ENVIRONMENT, pass_fds=[theirs.fileno()]),
                )
        except BaseException:
            writer.close()
            scratch.close()
            raise
        finally:
            theirs.close()
        worker = cls(label, process, Frames(reader, writer, FromWorker, label), scratch, (log, log_offset))
        worker._frames.send(spec)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Tell whether the process has ended or must; `ended` may still wait for its folder."""
        return self.ended.done() or self._end_reason is not None or self._process.returncode is not None

    @property
    def running(self) -> int:
        return len(self._rollouts)

    async def run(self, request: RunRollout) -> RolloutReply:
        """Run a rollout. A worker that ends answers with a retryable error."""
        if self.ended.done():
            return self._lost(request.rollout_id)
        future = self._rollouts[request.rollout_id] = asyncio.get_running_loop().create_future()
        self._frames.send(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._frames.send(CancelRollout(rollout_id=request.rollout_id))
            raise
        finally:
            self._rollouts.pop(request.rollout_id, None)

    async def stop(self, grace_s: float) -> None:
        """Give the worker `grace_s` seconds to clean up, then kill it."""
        self._end_reason = self._end_reason or "the pool was closed"
        self._cancel_tasks()  # The end of the stream would have `_read` kill the worker at once.
        self._frames.close()
        await processes.stop(self._process, grace_s, request=False)
        await self._finish()

    async def kill(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        signal_session(self._process.pid, signal.SIGKILL)
        await self._finish()

    async def _read(self) -> None:
        try:
            while (message := await self._frames.receive()) is not None:
                self._heard_at = time.monotonic()
                if isinstance(message, RolloutReply):
                    self.completed += message.failure is None
                    self._answer(message)
        except WireError as error:
            self._end_reason = str(error)
        await processes.stop(self._process, _STOP_GRACE_S, request=False)  # It may yet write why it ends.
        await self._finish()

    def _answer(self, reply: RolloutReply) -> None:
        future = self._rollouts.get(reply.rollout_id)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _name_loading(self) -> None:
        """Say where the environment's code stands while it loads."""
        while True:
            await asyncio.sleep(2 * STALL_S + 1)
            if place := blocked_at(self._output()):
                told = event("warning", where=place, same_as=f"loads {place.rpartition(' ')[2]}")
                text = "%s loads and stands at %s: load less, or set INFINITE = True in a task set that never ends"
                logger.warning(text, self.label, place, extra=told)

    async def _watch(self, hang_timeout_s: float) -> None:
        """Name the code that blocks a silent worker, and kill the worker at last."""
        step_s, blamed = min(1.0, hang_timeout_s / 10), None
        while True:
            before = time.monotonic()
            await asyncio.sleep(step_s)
            if time.monotonic() - before > 2 * step_s:
                continue  # This loop itself stood still: look again before judging the worker.
            silent_s = time.monotonic() - self._heard_at
            if silent_s > STALL_S and blamed != self._heard_at and (place := blocked_at(self._output(), silent_s)):
                blamed = self._heard_at
                logger.warning(
                    "%s: the environment blocks its event loop, for %.0f s now, at %s: no rollout of this worker goes "
                    "on meanwhile; make it async, or call it with asyncio.to_thread",
                    self.label, silent_s, place, extra=event("warning", where=place, same_as=f"blocked at {place}"),
                )  # fmt: skip
            if silent_s > hang_timeout_s:
                place = blocked_at(self._output(), silent_s)
                self._end_reason = (
                    f"no heartbeat for {silent_s:.1f} s (hang_timeout_s of the source is {hang_timeout_s:g})"
                    f"{f'; it stood at {place}' if place else ''}"
                )
                signal_session(self._process.pid, signal.SIGKILL)
                await self._process.wait()  # Else what is played again might come to this worker.
                self._blame(place)
                return  # _read sees the end of the stream.

    def _output(self) -> str:
        return processes.last_words(*self._log, _STACK_LINES)

    def _blame(self, place: str | None) -> None:
        """Answer the rollout that blocked the worker as hanging, others as displaced."""
        output = self._output()
        if (blocker := blamed(output)) is None:
            return
        message = f"rollout {blocker} blocked {self.label}: {self._end_reason}"
        for rollout_id in self._rollouts:
            kind = "hang" if rollout_id == blocker else "displaced"
            failure = RolloutFailure(kind=kind, message=message, where=place, detail=output)
            self._answer(RolloutReply(rollout_id=rollout_id, failure=failure))

    async def _finish(self) -> None:
        await self._process.wait()
        if self.ended.done():
            return
        self.last_words = self.last_words or " Its last lines:\n" + processes.last_words(*self._log, _LAST_LINES)
        await asyncio.to_thread(self._scratch.close)
        self._frames.close()
        self._cancel_tasks()
        if self.ended.done():
            return
        crash = self._output().partition("Fatal Python error")[2]
        words = blocked_at(crash, math.inf) or self.last_words.splitlines()[-1].strip()
        status = f"{exit_text(self._process.returncode)}: {words}"
        self.ended.set_result(f"{self.label} " + (f"ended: {self._end_reason}" if self._end_reason else status))
        for rollout_id in self._rollouts:
            self._answer(self._lost(rollout_id))

    def _cancel_tasks(self) -> None:
        """Cancel reading and watching, but not the one that runs this."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _lost(self, rollout_id: str) -> RolloutReply:
        detail = self.last_words.strip()
        failure = RolloutFailure(kind="worker", message=self.ended.result(), detail=detail)
        return RolloutReply(rollout_id=rollout_id, failure=failure)


def blamed(words: str) -> str | None:
    """Return the rollout in the last standstill; those that blocked before, and went on, are not named."""
    named = re.search(rf"^ *{BLOCKED_BY}(.+)$", words.rpartition(DUMP)[2], re.MULTILINE)
    return named and named[1]


def blocked_at(words: str, silent_s: float = 0.0) -> str | None:
    """Return where the main thread stood: in the user's files, after long in any. None without a stack, or idle."""
    threads = [block for block in words.split("\n    \n") if "workers/worker.py" in block]
    frames = _DUMPED.findall(threads[-1]) if threads else []
    if [function for _, _, function in frames[:2]] == ["select", "_run_once"]:  # It waits: the machine is slow.
        return None
    own = [frame for frame in frames if is_own(frame[0])]
    return next((frame_text(*frame) for frame in own or frames * (silent_s > 2 * STALL_S)), None)


@lru_cache(maxsize=4096)
def is_own(file: str) -> bool:
    """Tell whether a file is the user's: not of this product, Python or an installed package."""
    path = Path(file)
    return not {"site-packages", "dist-packages"} & set(path.parts) and not file.startswith(_NOT_OWN)
