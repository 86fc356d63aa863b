"""A source's worker processes, as the orchestrator sees them.

WorkerPool      one source's workers
  run           the ready worker with the fewest rollouts --> its reply; none ready: wait at most start_timeout_s
  _supervise    one task a worker: start -> wait for its end -> back off -> start again
                max_restarts ends in a row without a finished rollout: the pool fails, and every `run` raises why

WorkerProcess   one worker
  start         --Start--> worker, then wait at most start_timeout_s for WorkerReady
  _read         passes replies to the futures that wait for them
  _watch        kills a worker that was silent for hang_timeout_s
  stop          closes the connection, gives the worker a while to clean up, then kills what is left of its session
  ended         resolves with the reason, after every request in flight has its error reply and the worker's scratch
                folder is removed; a killed worker cannot remove that itself
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import composer_prime.errors
from composer_prime.errors import ComposerError, ConfigError, DeadlineError, EnvironmentWorkerError, WireError
from composer_prime.run import process as processes
from composer_prime.run.process import child_options, exit_text, signal_session
from composer_prime.run.retry import backoff_s
from composer_prime.run.scratch import Scratch
from orchestrator.workers.protocol import (
    TRAIN,
    CancelRollout,
    Frames,
    FromWorker,
    Heartbeat,
    RolloutReply,
    RunRollout,
    SourceSpec,
    Start,
    StartFailed,
    WorkerReady,
    failed_reply,
)

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # One rollout is one small piece of work: its parallelism is that of the workers.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_LONGEST_BACKOFF_S = 30.0


class WorkerPool:
    """`async with WorkerPool(spec) as pool: reply = await pool.run(request)`."""

    def __init__(
        self,
        spec: SourceSpec,
        *,
        workers: int = 1,
        start_timeout_s: float = 180.0,
        hang_timeout_s: float = 60.0,
        max_restarts: int = 5,
        backoff_s: float = 0.5,
        log_dir: Path | None = None,
        stop_grace_s: float = 5.0,
    ) -> None:
        """`hang_timeout_s`: a worker that is silent for this long is killed; choose it longer than any one step of the
        environment may block. `backoff_s`: the wait before the first restart, doubled for each further one. `log_dir`:
        takes the workers' output, one file a worker. `stop_grace_s`: time for workers to clean up in `close`.
        """
        self.spec = spec
        self._workers = workers
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._log_dir = log_dir
        self._stop_grace_s = stop_grace_s
        self._children: dict[int, WorkerProcess] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._failure: ComposerError | None = None
        self._ready: WorkerReady | None = None
        """The first worker's report; None until it has loaded."""
        self.restarts = 0
        """Workers started again since `start`."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every worker and wait until all have loaded. Raises what `WorkerProcess.start` raises."""
        self._supervisors = [asyncio.create_task(self._supervise(number)) for number in range(self._workers)]
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._failure or len(self._children) == self._workers)
            if self._failure is not None:
                raise self._failure
        except BaseException:
            await self.close()
            raise

    def num_tasks(self, taskset: str = TRAIN) -> int | None:
        """Return the number of tasks, or None for a task set that never ends."""
        assert self._ready is not None, "start the pool first"
        return self._ready.num_tasks[taskset]

    def difficulty(self, taskset: str = TRAIN) -> list[float | None]:
        """Return estimates of the tasks' difficulty, in [0, 1]; an empty list for a task set without any."""
        assert self._ready is not None, "start the pool first"
        return self._ready.difficulty.get(taskset, [])

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children.values()]

    async def run(self, request: RunRollout) -> RolloutReply:
        """Play one rollout. Failures of environment, model or worker are in the reply.

        Cancelling the caller cancels the rollout. Raises EnvironmentWorkerError once the workers have failed for good,
        and DeadlineError when no worker is ready within start_timeout_s.
        """
        return await (await self._least_busy()).run(request)

    async def close(self) -> None:
        """End every worker; rollouts in flight get an error reply."""
        self._failure = self._failure or EnvironmentWorkerError(f"the workers of source {self.spec.name!r} are closed")
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(child.stop(self._stop_grace_s) for child in self._children.values()))
        self._children.clear()
        async with self._changed:
            self._changed.notify_all()

    async def _least_busy(self) -> WorkerProcess:
        if self._failure is None and not self._alive():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._start_timeout_s), self._changed:
                    await self._changed.wait_for(lambda: self._failure or self._alive())
        if self._failure is not None:
            raise self._failure
        alive = self._alive()
        if not alive:
            raise DeadlineError(
                f"source {self.spec.name!r}: no environment worker was ready within {self._start_timeout_s:g} s"
            )
        return min(alive, key=lambda child: child.running)

    def _alive(self) -> list[WorkerProcess]:
        return [child for child in self._children.values() if not child.gone]

    async def _supervise(self, number: int) -> None:
        """Keep worker `number` alive until the pool has failed. Whatever ends this ends the pool, with its reason."""
        try:
            await self._keep_alive(number)
        except Exception as error:
            logger.exception("worker %d of source %r cannot be supervised any more", number, self.spec.name)
            reason = f"source {self.spec.name!r}, worker {number}: {type(error).__name__}: {error}"
            await self._fail(EnvironmentWorkerError(reason))

    async def _keep_alive(self, number: int) -> None:
        restarts = 0
        while True:
            try:
                child = await WorkerProcess.start(
                    self.spec,
                    number,
                    start_timeout_s=self._start_timeout_s,
                    hang_timeout_s=self._hang_timeout_s,
                    log_dir=self._log_dir,
                )
            except (ComposerError, OSError) as error:
                if self._ready is None or isinstance(error, ConfigError):
                    ours = isinstance(error, ComposerError)
                    await self._fail(error if ours else EnvironmentWorkerError(f"source {self.spec.name!r}: {error}"))
                    return
                reason, last_words = str(error), ""
            else:
                self._children[number] = child  # Before anything is awaited: `close` must find it.
                self._ready = self._ready or child.ready
                async with self._changed:
                    self._changed.notify_all()
                reason = await asyncio.shield(child.ended)
                self._children.pop(number, None)
                last_words = child.last_words
                restarts = 0 if child.completed else restarts
            restarts += 1
            if restarts > self._max_restarts:
                message = (
                    f"source {self.spec.name!r}: {reason}. It was started {restarts} times without finishing a rollout "
                    f"(max_restarts = {self._max_restarts}).{last_words}"
                )
                await self._fail(EnvironmentWorkerError(message))
                return
            wait_s = backoff_s(restarts - 1, first_s=self._backoff_s, longest_s=_LONGEST_BACKOFF_S)
            logger.warning("%s; starting it again in %.1f s (restart %d)", reason, wait_s, restarts)
            self.restarts += 1
            await asyncio.sleep(wait_s)

    async def _fail(self, failure: ComposerError) -> None:
        async with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()


class WorkerProcess:
    """One running worker. Create it with `start`."""

    def __init__(
        self,
        label: str,
        process: asyncio.subprocess.Process,
        frames: Frames[FromWorker],
        scratch: Scratch,
        log: tuple[Path, int],
    ) -> None:
        """`scratch` holds the working folders of the worker's rollouts. `log`: its output, and where that begins."""
        self.label = label
        self.ready: WorkerReady | None = None
        self.completed = 0
        """Rollouts that came back with a reward."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason once the process is gone and no request waits any more."""
        self.last_words = ""
        """The process's last lines of output, for an error message; empty until it is gone."""
        self._process = process
        self._frames = frames
        self._scratch = scratch
        self._log = log
        self._rollouts: dict[str, asyncio.Future[RolloutReply]] = {}
        self._heard_at = time.monotonic()
        self._end_reason: str | None = None
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, spec: SourceSpec, number: int, *, start_timeout_s: float, hang_timeout_s: float, log_dir: Path | None
    ) -> WorkerProcess:
        """Return a worker that has loaded its environment. `number`: among the workers of the source.

        Raises the error that the worker reports (EnvironmentNotInstalledError, EmptyTaskSetError, ConfigError, ...),
        EnvironmentWorkerError when it ends first, DeadlineError when it takes longer than `start_timeout_s`.
        """
        worker = await cls._spawn(spec, number, log_dir)
        try:
            async with asyncio.timeout(start_timeout_s):
                first = await worker._frames.receive()
        except TimeoutError:
            await worker.kill("it did not load in time")
            raise DeadlineError(
                f"{worker.label} did not load its environment within start_timeout_s = {start_timeout_s:g} s; "
                f"raise it if the task set is large.{worker.last_words}"
            ) from None
        except BaseException:
            await worker.kill("start was given up")
            raise
        if isinstance(first, WorkerReady):
            worker.ready = first
            worker._heard_at = time.monotonic()
            worker._tasks = [asyncio.create_task(worker._read()), asyncio.create_task(worker._watch(hang_timeout_s))]
            return worker
        await worker.kill("it did not start")
        if isinstance(first, StartFailed):
            error = getattr(composer_prime.errors, first.error, EnvironmentWorkerError)
            raise (error if issubclass(error, ComposerError) else EnvironmentWorkerError)(first.message)
        status = exit_text(worker._process.returncode)
        raise EnvironmentWorkerError(f"{worker.label} {status} while it was loading.{worker.last_words}")

    @classmethod
    async def _spawn(cls, spec: SourceSpec, number: int, log_dir: Path | None) -> WorkerProcess:
        scratch = await asyncio.to_thread(Scratch, "worker")  # It removes what dead workers left.
        log = (log_dir or scratch.path) / f"worker_{spec.name}_{number}.log"
        label = f"worker {number} of source {spec.name!r}"
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        arguments = ["--socket-fd", str(theirs.fileno()), "--boxes", str(scratch.path)]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                log_offset = output.tell()
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "orchestrator.workers.worker", *arguments),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    **child_options(_ENVIRONMENT, pass_fds=[theirs.fileno()]),
                )
        except BaseException:
            writer.close()
            scratch.close()
            raise
        finally:
            theirs.close()
        worker = cls(label, process, Frames(reader, writer, FromWorker, label), scratch, (log, log_offset))
        worker._frames.send(Start(spec=spec))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether the process has ended, even if `ended` still waits for its folder to be removed."""
        return self.ended.done() or self._process.returncode is not None

    @property
    def running(self) -> int:
        """Rollouts in flight."""
        return len(self._rollouts)

    async def run(self, request: RunRollout) -> RolloutReply:
        """Run a rollout. Cancelling the caller cancels it. A worker that ends answers with a retryable error."""
        if request.rollout_id in self._rollouts:
            raise ValueError(f"rollout id {request.rollout_id!r} is in flight already: every attempt needs its own")
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
        """Let the worker abort its rollouts and clean up for `grace_s` seconds, then kill it."""
        self._end_reason = self._end_reason or "the pool was closed"
        self._stopping = True
        self._frames.close()
        await processes.stop(self._process, grace_s, request=False)
        await self._finish()

    async def kill(self, reason: str) -> None:
        """End the process and its session, and wait until they are gone."""
        self._end_reason = self._end_reason or reason
        signal_session(self._process.pid, signal.SIGKILL)
        await self._finish()

    async def _read(self) -> None:
        try:
            while (message := await self._frames.receive()) is not None:
                self._heard_at = time.monotonic()
                self._handle(message)
        except WireError as error:
            self._end_reason = str(error)
        if self._stopping:
            return  # We closed the connection ourselves: `stop` gives the worker its time.
        signal_session(self._process.pid, signal.SIGKILL)
        await self._finish()

    def _handle(self, message: FromWorker) -> None:
        match message:
            case RolloutReply():
                self.completed += message.error is None
                future = self._rollouts.get(message.rollout_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Heartbeat():
                pass  # `_read` has noted the time.
            case WorkerReady() | StartFailed():
                logger.warning("%s: unexpected %s", self.label, type(message).__name__)

    async def _watch(self, hang_timeout_s: float) -> None:
        step_s = hang_timeout_s / 10
        while True:
            before = time.monotonic()
            await asyncio.sleep(step_s)
            if time.monotonic() - before > 2 * step_s:
                continue  # This loop itself stood still: look again before judging the worker.
            silent_s = time.monotonic() - self._heard_at
            if silent_s > hang_timeout_s:
                self._end_reason = f"no heartbeat for {silent_s:.1f} s (hang_timeout_s = {hang_timeout_s:g})"
                signal_session(self._process.pid, signal.SIGKILL)
                return  # _read sees the end of the stream.

    async def _finish(self) -> None:
        await self._process.wait()
        if self.ended.done():
            return
        self.last_words = self.last_words or " Its last lines:\n" + processes.last_words(*self._log)
        await asyncio.to_thread(self._scratch.close)
        self._frames.close()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        if self.ended.done():
            return
        status = exit_text(self._process.returncode)
        self.ended.set_result(f"{self.label} " + (f"ended: {self._end_reason}" if self._end_reason else status))
        for rollout_id, future in self._rollouts.items():
            if not future.done():
                future.set_result(self._lost(rollout_id))

    def _lost(self, rollout_id: str) -> RolloutReply:
        return failed_reply(rollout_id, "", "worker", self.ended.result(), detail=self.last_words.strip())
