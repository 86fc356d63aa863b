"""A source's workers, as the orchestrator sees them.

run         the ready worker with the fewest rollouts --> its reply; none ready: wait at most start_timeout_s
_supervise  one task a process: start -> wait for its end -> back off -> start again
            max_restarts ends in a row without a finished rollout: the pool fails, and every `run` raises why
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from composer_prime.config.sandbox import SANDBOX_TYPES
from composer_prime.errors import ComposerError, ConfigError, DeadlineError, EnvironmentWorkerError
from composer_prime.plan.sandboxes import probe
from composer_prime.run.retry import backoff_s
from orchestrator.event_loop import Notifier
from orchestrator.workers.protocol import TRAIN, RolloutReply, RunRollout, SourceSpec, WorkerReady
from orchestrator.workers.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 30.0


class WorkerPool:
    """`async with WorkerPool(spec) as pool: reply = await pool.run(request)`."""

    def __init__(
        self,
        spec: SourceSpec,
        *,
        workers: int = 1,
        start_timeout_s: float = 600.0,
        hang_timeout_s: float = 60.0,
        max_restarts: int = 5,
        backoff_s: float = 0.5,
        log_dir: Path | None = None,
        stop_grace_s: float = 5.0,
    ) -> None:
        """`hang_timeout_s`: a worker that is silent for this long is killed; choose it longer than any one step of
        the environment may block. `backoff_s`: the wait
        before the first restart, doubled for each further one. `log_dir`: takes the workers' output, one file a worker.
        `stop_grace_s`: time for workers to clean up in `close`.
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
        self.changed = Notifier()
        """Notifies of workers that came or went."""
        self._failure: ComposerError | None = None
        self.ready: WorkerReady | None = None
        """The first worker's report; None until it has loaded."""
        self.restarts = 0
        """Workers started again since `start`."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every worker and wait until all have loaded.

        Raises what `WorkerProcess.start` and `check_runtimes` raise.
        """
        self._supervisors = [asyncio.create_task(self._supervise(number)) for number in range(self._workers)]
        loaded = lambda: self.ready is not None and len(self._children) == self._workers
        try:
            # A process that takes too long fails by itself.
            await self.changed.wait_for(lambda: self._failure is not None or loaded(), math.inf)
            if self._failure is not None:
                raise self._failure
            assert self.ready is not None
            await asyncio.to_thread(check_runtimes, self.spec.name, self.ready.runtimes)
            if self.ready.overlap is not None:
                logger.warning("source %s: %s", self.spec.name, self.ready.overlap)
        except BaseException:
            await self.close()
            raise

    def num_tasks(self, taskset: str = TRAIN) -> int:
        """Return the number of tasks."""
        assert self.ready is not None, "start the pool first"
        return self.ready.num_tasks[taskset]

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children.values()]

    @property
    def players(self) -> list[WorkerProcess]:
        """The workers that are ready."""
        return [worker for worker in self._children.values() if not worker.gone]

    async def run(self, request: RunRollout, on_begin: Callable[[], None] = lambda: None) -> RolloutReply:
        """Play one rollout. Failures of environment, model or worker are in the reply.

        Calls `on_begin` once a worker takes it. Cancelling the caller cancels the rollout. Raises
        EnvironmentWorkerError once the workers have failed for good, and DeadlineError when none is ready for
        start_timeout_s.
        """
        player = await self._place()
        on_begin()
        return await player.run(request)

    async def close(self) -> None:
        """End every worker; rollouts in flight get an error reply."""
        self._failure = self._failure or EnvironmentWorkerError(f"the workers of source {self.spec.name!r} are closed")
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(child.stop(self._stop_grace_s) for child in self._children.values()))
        self._children.clear()
        self.changed.notify()

    async def _place(self) -> WorkerProcess:
        """Wait for a ready worker, and return the one with the fewest rollouts."""
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

    async def _supervise(self, number: int) -> None:
        """Keep worker `number` alive until the pool has failed. Whatever ends this ends the pool, with its reason."""
        try:
            await self._keep_alive(number)
        except Exception as error:
            logger.exception("worker %d of source %r cannot be supervised any more", number, self.spec.name)
            reason = f"source {self.spec.name!r}, worker {number}: {type(error).__name__}: {error}"
            self._fail(EnvironmentWorkerError(reason))

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
                if self.ready is None or isinstance(error, ConfigError):
                    ours = isinstance(error, ComposerError)
                    self._fail(error if ours else EnvironmentWorkerError(f"source {self.spec.name!r}: {error}"))
                    return
                reason, last_words = str(error), ""
            else:
                reason, last_words = await self._until_end(number, child), child.last_words
                restarts = 0 if child.completed else restarts
            restarts += 1
            if restarts > self._max_restarts:
                message = (
                    f"source {self.spec.name!r}: {reason}. It was started {restarts} times without finishing a rollout "
                    f"(max_restarts = {self._max_restarts}).{last_words}"
                )
                self._fail(EnvironmentWorkerError(message))
                return
            wait_s = backoff_s(restarts - 1, first_s=self._backoff_s, longest_s=_LONGEST_BACKOFF_S)
            logger.warning("%s; restarting it in %.1f s (restart %d)", reason, wait_s, restarts)
            self.restarts += 1
            await asyncio.sleep(wait_s)

    async def _until_end(self, number: int, child: WorkerProcess) -> str:
        """Let a worker play until it is gone. Return why it ended."""
        self._children[number] = child  # Before anything is awaited: `close` must find it.
        self.ready = self.ready or child.ready
        self.changed.notify()
        reason = await asyncio.shield(child.ended)
        self._children.pop(number, None)
        return reason

    def _fail(self, failure: ComposerError) -> None:
        self._failure = self._failure or failure
        self.changed.notify()


def check_runtimes(source: str, types: Iterable[str]) -> None:
    """Raise ConfigError when a runtime in which `source` executes code does not work on this machine."""
    for kind in set(types) & set(SANDBOX_TYPES):
        if not (runtime_probe := probe(kind)).works:
            raise ConfigError(
                f"source {source!r} executes code in the runtime {kind!r}, which does not work here: "
                f"{runtime_probe.text}"
            )
