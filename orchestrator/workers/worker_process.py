"""One worker process, seen from the orchestrator.

start    --Start--> worker, then wait at most start_timeout_s for WorkerReady
_read    passes replies to the futures that wait for them
_watch   names the code that blocks a silent worker, and kills one that was silent for hang_timeout_s
stop     closes the connection, gives the worker a while to clean up, then kills what is left of its session
ended    resolves with the reason, after every request in flight has its error reply and the worker's scratch folder is
         removed; a killed worker cannot remove that itself
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import composer_prime.errors
from composer_prime.errors import ComposerError, DeadlineError, EnvironmentWorkerError, WireError
from composer_prime.monitor.events import event
from composer_prime.run import process as processes
from composer_prime.run.process import WORKER_ENVIRONMENT, child_options, exit_text, signal_session
from composer_prime.run.scratch import Scratch
from composer_prime.wire.frames import Frames
from orchestrator.workers.protocol import (
    STACK_FILE,
    STALL_S,
    CancelRollout,
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
from orchestrator.workers.tracebacks import blocked_at

logger = logging.getLogger(__name__)


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
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason once it is gone and no request waits any more."""
        self.last_words = ""
        """Its last lines of output, for an error message; empty until it is gone."""
        self._rollouts: dict[str, asyncio.Future[RolloutReply]] = {}
        self.ready: WorkerReady | None = None
        self.completed = 0
        """Rollouts that came back with a reward."""
        self._process = process
        self._frames = frames
        self._scratch = scratch
        self._log = log
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
                f"{worker.label} did not load its environment within {start_timeout_s:g} s: load less in "
                f"its constructor, or use a machine that is less busy.{worker.last_words}"
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
        arguments = ["--socket-fd", str(theirs.fileno()), "--scratch", str(scratch.path)]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                log_offset = output.tell()
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "orchestrator.workers.worker", *arguments),
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
        worker._frames.send(Start(spec=spec))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Tell whether the process has ended, even if `ended` still waits for its folder to be removed."""
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
                self.completed += message.failure is None
                future = self._rollouts.get(message.rollout_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Heartbeat():
                pass  # `_read` has noted the time.
            case WorkerReady() | StartFailed():
                logger.warning("%s: unexpected %s", self.label, type(message).__name__)

    async def _watch(self, hang_timeout_s: float) -> None:
        step_s, blamed = min(1.0, hang_timeout_s / 10), None
        while True:
            before = time.monotonic()
            await asyncio.sleep(step_s)
            if time.monotonic() - before > 2 * step_s:
                continue  # This loop itself stood still: look again before judging the worker.
            silent_s = time.monotonic() - self._heard_at
            if silent_s > STALL_S and blamed != self._heard_at and (place := self._blocked_at()) is not None:
                blamed = self._heard_at
                logger.warning(
                    "%s: the environment blocks its event loop, for %.0f s now, at %s: no rollout of this worker goes "
                    "on meanwhile; make it async, or call it with asyncio.to_thread",
                    self.label, silent_s, place, extra=event("warning", where=place, same_as=f"blocked at {place}"),
                )  # fmt: skip
            if silent_s > hang_timeout_s:
                place = self._blocked_at()
                self._end_reason = (
                    f"no heartbeat for {silent_s:.1f} s (at most {hang_timeout_s:g})"
                    f"{f'; it stood at {place}' if place else ''}"
                )
                signal_session(self._process.pid, signal.SIGKILL)
                return  # _read sees the end of the stream.

    def _blocked_at(self) -> str | None:
        try:
            return blocked_at((self._scratch.path / STACK_FILE).read_text(errors="replace"))
        except OSError:
            return None

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
