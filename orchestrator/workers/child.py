"""The orchestrator's handle on one worker process: start, requests in flight, silence, end.

Child.start --Start--> worker, waits at most start_timeout_s for Ready
_read   hands replies to the futures that wait for them
stop    closes the connection, gives the worker a while to clean up, then kills what is left of its process group
_watch  kills a worker that was silent for hang_timeout_s
ended   resolves with the reason; every request in flight has its error reply by then, and the folder in which the
        worker kept its rollouts' working folders is gone: the worker cannot see to that when it is killed
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import composer_prime.errors
from composer_prime.errors import ComposerError, DeadlineError, EnvironmentWorkerError, WireError
from composer_prime.run.scratch import Scratch
from orchestrator.workers.protocol import (
    CancelRollout,
    Frames,
    FromWorker,
    Heartbeat,
    RolloutFailure,
    RolloutReply,
    RunRollout,
    SourceSpec,
    Start,
    StartFailed,
    WorkerReady,
)

logger = logging.getLogger(__name__)

_STDERR_LINES = 40
_LINE_LIMIT = 1 << 20
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
    """One running worker. Make it with `start`."""

    def __init__(
        self,
        label: str,
        process: asyncio.subprocess.Process,
        frames: Frames[FromWorker],
        life: int,
        boxes: Scratch,
    ) -> None:
        """`life`: the write end of the pipe by which the worker knows that we live. `boxes`: its rollouts' folders."""
        self.label = label
        self.ready: WorkerReady | None = None
        self.heartbeat: Heartbeat | None = None
        self.completed = 0
        """Rollouts that came back with a reward."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason once the process is gone and no request waits any more."""
        self._process, self._frames, self._life, self._boxes = process, frames, life, boxes
        self._rollouts: dict[str, asyncio.Future[RolloutReply]] = {}
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._seen = time.monotonic()
        self._killed_for: str | None = None
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
        """A worker that has loaded its environment; `environment` adds to this process's variables.

        Raises the error it reports (EnvironmentNotInstalledError, EmptyTaskSetError, ConfigError, …),
        EnvironmentWorkerError when it ends first, DeadlineError when it takes longer than `start_timeout_s`.
        """
        child = await cls._spawn(spec, label, log, environment)
        try:
            async with asyncio.timeout(start_timeout_s):
                first = await child._frames.receive()
        except TimeoutError:
            await child.kill("it did not load in time")
            raise DeadlineError(
                f"{label} did not load its environment within start_timeout_s = {start_timeout_s:g} s; "
                f"raise it if the task set is large.{child.last_words()}"
            ) from None
        except BaseException:
            await child.kill("start was given up")
            raise
        if isinstance(first, WorkerReady):
            child.ready = first
            child._seen = time.monotonic()
            child._tasks += [asyncio.create_task(child._read()), asyncio.create_task(child._watch(hang_timeout_s))]
            return child
        await child.kill("it did not start")
        if isinstance(first, StartFailed):
            error = getattr(composer_prime.errors, first.error, EnvironmentWorkerError)
            raise (error if issubclass(error, ComposerError) else EnvironmentWorkerError)(first.message)
        raise EnvironmentWorkerError(f"{label} ended while it was loading ({child._exit()}).{child.last_words()}")

    @classmethod
    async def _spawn(
        cls, spec: SourceSpec, label: str, log: Path | None, environment: Mapping[str, str]
    ) -> WorkerProcess:
        boxes = await asyncio.to_thread(Scratch, "worker")  # it sweeps what dead ones left
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        life_read, life_write = os.pipe()
        arguments = ["--socket-fd", theirs.fileno(), "--life-fd", life_read, "--parent", os.getpid()]
        arguments += ["--boxes", boxes.path]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "orchestrator.workers.worker",
                *map(str, arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(), life_read),
                env={**os.environ, **_ENVIRONMENT, **environment},
                start_new_session=True,
                limit=_LINE_LIMIT,
            )
        except BaseException:
            writer.close()
            os.close(life_write)
            boxes.close()
            raise
        finally:
            theirs.close()
            os.close(life_read)
        child = cls(label, process, Frames(reader, writer, FromWorker, label), life_write, boxes)
        child._tasks.append(asyncio.create_task(child._collect_output(log)))
        child._frames.send(Start(spec=spec))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether the process has ended, even if `ended` waits for its folder to be removed."""
        return self.ended.done() or self._process.returncode is not None

    @property
    def running(self) -> int:
        return len(self._rollouts)

    @property
    def silent_s(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self._seen

    async def run(self, request: RunRollout) -> RolloutReply:
        """Cancelling the caller cancels the rollout. A worker that ends answers with a retryable error."""
        if request.rollout_id in self._rollouts:
            raise ValueError(f"rollout id {request.rollout_id!r} is in flight already: every attempt needs its own")
        if self.ended.done():
            return _lost(request.rollout_id, self._why_gone())
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
        """Whether that rollout is in flight here. Its reply will say `cancelled`."""
        if rollout_id not in self._rollouts:
            return False
        self._frames.send(CancelRollout(rollout_id=rollout_id))
        return True

    async def stop(self, grace_s: float) -> None:
        """Lets the worker abort its rollouts and clean up for `grace_s`, then kills it."""
        self._killed_for = self._killed_for or "the pool was closed"
        self._stopping = True
        self._frames.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        await self.kill("the pool was closed")

    async def kill(self, reason: str) -> None:
        """Ends the process and its group, and waits until they are gone."""
        self._killed_for = self._killed_for or reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._finish()

    def last_words(self) -> str:
        """The process's last lines of output, for an error message."""
        if not self._stderr:
            return " It wrote nothing."
        return " Its last lines:\n" + "\n".join(f"    {line}" for line in self._stderr)

    async def _read(self) -> None:
        try:
            while (message := await self._frames.receive()) is not None:
                self._seen = time.monotonic()
                self._handle(message)
        except WireError as error:
            self._killed_for = str(error)
        if self._stopping:
            return  # We closed the connection ourselves: `stop` says when the worker has had its time.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._finish()

    def _handle(self, message: FromWorker) -> None:
        match message:
            case RolloutReply():
                self.completed += message.error is None
                _resolve(self._rollouts, message.rollout_id, message)
            case Heartbeat():
                self.heartbeat = message
            case WorkerReady() | StartFailed():
                logger.warning("%s: unexpected %s", self.label, type(message).__name__)

    async def _watch(self, hang_timeout_s: float) -> None:
        step_s = hang_timeout_s / 10
        while True:
            before = time.monotonic()
            await asyncio.sleep(step_s)
            if time.monotonic() - before > 2 * step_s:
                continue  # It was this loop that stood still: look again before judging the worker.
            if self.silent_s > hang_timeout_s:
                self._killed_for = f"no heartbeat for {self.silent_s:.1f} s (hang_timeout_s = {hang_timeout_s:g})"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
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
                self._stderr.append(line.rstrip()[:2000])
                if file:
                    try:
                        file.write(line)
                        file.flush()
                    except OSError as error:  # A full disk must not stop the draining, or the worker blocks in write.
                        logger.warning("worker output is no longer logged to %s: %s", log, error)
                        file = None

    async def _finish(self) -> None:
        await self._process.wait()
        if self.ended.done():
            return
        await asyncio.wait(self._tasks[:1], timeout=2)  # The output's end, for `last_words`.
        await asyncio.to_thread(self._boxes.close)
        self._frames.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        reason = f"{self.label} ended: {self._killed_for or self._exit()}"
        if self.ended.done():
            return
        self.ended.set_result(reason)
        for rollout_id, future in self._rollouts.items():
            if not future.done():
                future.set_result(_lost(rollout_id, self._why_gone()))

    def _why_gone(self) -> RolloutFailure:
        return RolloutFailure(
            kind="worker", message=self.ended.result(), retryable=True, detail=self.last_words().strip()
        )

    def _exit(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


def _lost(rollout_id: str, failure: RolloutFailure) -> RolloutReply:
    return RolloutReply(rollout_id=rollout_id, task_id="", reward=None, error=failure)


def _resolve(waiting: dict[str, asyncio.Future], key: str, message: FromWorker) -> None:
    future = waiting.get(key)
    if future is not None and not future.done():
        future.set_result(message)


def _open_log(log: Path | None, stack: contextlib.ExitStack) -> IO[str] | None:
    if log is None:
        return None
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(log.open("a"))
    except OSError as error:
        logger.warning("worker output is not logged to %s: %s", log, error)
        return None
