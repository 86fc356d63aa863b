"""The orchestrator's handle on one worker process: start it, send it rollouts, notice its silence and its end.

WorkerProcess.start --Start--> worker, then wait at most start_timeout_s for WorkerReady
_read    passes replies to the futures that wait for them
_watch   kills a worker that was silent for hang_timeout_s
stop     closes the connection, gives the worker a while to clean up, then kills what is left of its session
ended    resolves with the reason, after every request in flight has its error reply and the worker's scratch folder is
         removed; a killed worker cannot remove that itself
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import composer_prime.errors
from composer_prime.errors import ComposerError, DeadlineError, EnvironmentWorkerError, WireError
from composer_prime.run import process as processes
from composer_prime.run.process import child_options, exit_text, indented, signal_session
from composer_prime.run.scratch import Scratch
from orchestrator.workers.protocol import (
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

_OUTPUT_LINES = 40
"""Lines of a worker's output that are kept for error messages."""
_LINE_LIMIT_BYTES = 1 << 20
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # One rollout is one small piece of work: its parallelism is that of the workers.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class WorkerProcess:
    """One running worker. Create it with `start`."""

    def __init__(
        self, label: str, process: asyncio.subprocess.Process, frames: Frames[FromWorker], scratch: Scratch
    ) -> None:
        """`scratch` holds the working folders of the worker's rollouts."""
        self.label = label
        self.ready: WorkerReady | None = None
        self.completed = 0
        """Rollouts that came back with a reward."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason once the process is gone and no request waits any more."""
        self._process = process
        self._frames = frames
        self._scratch = scratch
        self._rollouts: dict[str, asyncio.Future[RolloutReply]] = {}
        self._output: collections.deque[str] = collections.deque(maxlen=_OUTPUT_LINES)
        self._heard_at = time.monotonic()
        self._end_reason: str | None = None
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        spec: SourceSpec,
        label: str,
        *,
        start_timeout_s: float,
        hang_timeout_s: float,
        log: Path | None,
        environment: Mapping[str, str],
    ) -> WorkerProcess:
        """Return a worker that has loaded its environment; `environment` adds to this process's variables.

        Raises the error that the worker reports (EnvironmentNotInstalledError, EmptyTaskSetError, ConfigError, ...),
        EnvironmentWorkerError when it ends first, DeadlineError when it takes longer than `start_timeout_s`.
        """
        worker = await cls._spawn(spec, label, log, environment)
        try:
            async with asyncio.timeout(start_timeout_s):
                first = await worker._frames.receive()
        except TimeoutError:
            await worker.kill("it did not load in time")
            raise DeadlineError(
                f"{label} did not load its environment within start_timeout_s = {start_timeout_s:g} s; "
                f"raise it if the task set is large.{worker.last_words()}"
            ) from None
        except BaseException:
            await worker.kill("start was given up")
            raise
        if isinstance(first, WorkerReady):
            worker.ready = first
            worker._heard_at = time.monotonic()
            worker._tasks += [asyncio.create_task(worker._read()), asyncio.create_task(worker._watch(hang_timeout_s))]
            return worker
        await worker.kill("it did not start")
        if isinstance(first, StartFailed):
            error = getattr(composer_prime.errors, first.error, EnvironmentWorkerError)
            raise (error if issubclass(error, ComposerError) else EnvironmentWorkerError)(first.message)
        status = exit_text(worker._process.returncode)
        raise EnvironmentWorkerError(f"{label} {status} while it was loading.{worker.last_words()}")

    @classmethod
    async def _spawn(
        cls, spec: SourceSpec, label: str, log: Path | None, environment: Mapping[str, str]
    ) -> WorkerProcess:
        scratch = await asyncio.to_thread(Scratch, "worker")  # It removes what dead workers left.
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        arguments = ["--socket-fd", str(theirs.fileno()), "--boxes", str(scratch.path)]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orchestrator.workers.worker", *arguments),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_LINE_LIMIT_BYTES,
                **child_options({**_ENVIRONMENT, **environment}, pass_fds=[theirs.fileno()]),
            )
        except BaseException:
            writer.close()
            scratch.close()
            raise
        finally:
            theirs.close()
        worker = cls(label, process, Frames(reader, writer, FromWorker, label), scratch)
        worker._tasks.append(asyncio.create_task(worker._collect_output(log)))
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
            self.cancel(request.rollout_id)
            raise
        finally:
            self._rollouts.pop(request.rollout_id, None)

    def cancel(self, rollout_id: str) -> bool:
        """Abort a rollout; its reply has an error of kind `cancelled`. Returns False when it is not in flight here."""
        if rollout_id not in self._rollouts:
            return False
        self._frames.send(CancelRollout(rollout_id=rollout_id))
        return True

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

    def last_words(self) -> str:
        """Return the process's last lines of output, for an error message."""
        return " Its last lines:\n" + indented(self._output)

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

    async def _collect_output(self, log: Path | None) -> None:
        stream = self._process.stdout
        assert stream is not None
        with contextlib.ExitStack() as stack:
            file = _open_log(log, stack)
            while True:
                try:
                    line = (await stream.readline()).decode(errors="replace")
                except ValueError:  # A line beyond the limit; asyncio has dropped it.
                    line = "(a line of more than 1 MiB)\n"
                if not line:
                    return
                self._output.append(line.rstrip()[:2000])
                if file:
                    try:
                        file.write(line)
                        file.flush()
                    except OSError as error:  # Keep reading when the disk is full, or the worker blocks in write.
                        logger.warning("worker output is no longer logged to %s: %s", log, error)
                        file = None

    async def _finish(self) -> None:
        await self._process.wait()
        if self.ended.done():
            return
        await asyncio.wait(self._tasks[:1], timeout=2)  # The rest of the output, for `last_words`.
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
        return failed_reply(rollout_id, "", "worker", self.ended.result(), detail=self.last_words().strip())


def _open_log(log: Path | None, stack: contextlib.ExitStack) -> IO[str] | None:
    if log is None:
        return None
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(log.open("a"))
    except OSError as error:
        logger.warning("worker output is not logged to %s: %s", log, error)
        return None
