"""A source's worker processes, as the orchestrator sees them.

run --> the ready worker with the fewest rollouts --> its reply
            none ready: wait at most start_timeout_s
_supervise, one task a worker: start -> wait for its end -> back off -> start again
            max_restarts ends in a row without a finished rollout: the pool fails, and every `run` raises why
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from composer_prime.errors import ComposerError, ConfigError, DeadlineError, EnvironmentWorkerError
from composer_prime.run.retry import backoff_s
from orchestrator.workers.child import WorkerProcess
from orchestrator.workers.protocol import TRAIN, RolloutReply, RunRollout, SourceSpec, WorkerReady

logger = logging.getLogger(__name__)


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
        max_backoff_s: float = 30.0,
        log_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stop_grace_s: float = 5.0,
    ) -> None:
        """`hang_timeout_s`: a worker that is silent for this long is killed; choose it longer than any one step of the
        environment may block. `backoff_s`: the wait before the first restart, doubled for each further one. `log_dir`:
        takes the workers' output, one file a worker. `environment`: further variables for the workers, such as the
        gateway's token. `stop_grace_s`: time for workers to clean up in `close`.
        """
        self.spec = spec
        self._workers = workers
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._log_dir = log_dir
        self._environment = dict(environment or {})
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
        except BaseException:
            await self.close()
            raise
        if self._failure is not None:
            await self.close()
            raise self._failure

    def num_tasks(self, taskset: str = TRAIN) -> int | None:
        """Return the number of tasks, or None for a task set that never ends."""
        assert self._ready is not None, "start the pool first"
        return self._ready.num_tasks[taskset]

    @property
    def running(self) -> int:
        """Rollouts in flight."""
        return sum(child.running for child in self._children.values())

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children.values()]

    async def run(self, request: RunRollout) -> RolloutReply:
        """Play one rollout. Failures of environment, model or worker are in the reply.

        Cancelling the caller cancels the rollout. Raises EnvironmentWorkerError once the workers have failed for good,
        and DeadlineError when no worker is ready within start_timeout_s.
        """
        return await (await self._least_busy()).run(request)

    def cancel(self, rollout_id: str) -> bool:
        """Abort a rollout and its inference; its `run` then returns an error of kind `cancelled`."""
        return any(child.cancel(rollout_id) for child in self._children.values())

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
        """Keep worker `number` alive until the pool has failed."""
        restarts = 0
        while True:
            try:
                child = await self._start_child(number)
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
                last_words = child.last_words()
                restarts = 0 if child.completed else restarts
            restarts += 1
            if restarts > self._max_restarts:
                message = (
                    f"source {self.spec.name!r}: {reason}. It was started {restarts} times without finishing a rollout "
                    f"(max_restarts = {self._max_restarts}).{last_words}"
                )
                await self._fail(EnvironmentWorkerError(message))
                return
            wait_s = backoff_s(restarts - 1, first_s=self._backoff_s, longest_s=self._max_backoff_s)
            logger.warning("%s; starting it again in %.1f s (restart %d)", reason, wait_s, restarts)
            self.restarts += 1
            await asyncio.sleep(wait_s)

    async def _start_child(self, number: int) -> WorkerProcess:
        return await WorkerProcess.start(
            self.spec,
            f"worker {number} of source {self.spec.name!r}",
            start_timeout_s=self._start_timeout_s,
            hang_timeout_s=self._hang_timeout_s,
            log=self._log_dir / f"worker_{self.spec.name}_{number}.log" if self._log_dir else None,
            environment=self._environment,
        )

    async def _fail(self, failure: ComposerError) -> None:
        async with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
