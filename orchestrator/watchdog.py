"""Who waits for what, and since when: in words for people, as deadlines for the run.

report   every few seconds a line in metrics.jsonl: queues, gateway, loop lag, what is waited for
watch    deadlines that no single wait owns: a batch that doesn't fill, a trainer that falls silent
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from composer_prime.config import Config
from composer_prime.console import pluralize
from composer_prime.errors import DeadlineError
from composer_prime.monitor.metrics_file import MetricsFile
from orchestrator.batching.batches import Batches
from orchestrator.batching.scheduler import BatchScheduler
from orchestrator.evals import Evaluator
from orchestrator.event_loop import Notifier
from orchestrator.gateway import Gateway
from orchestrator.rollouts.rollout import Lane, Permits
from orchestrator.step_server import StepServer

_WATCH_S = 0.25
_REPORT_S = 5.0


class Workers(Protocol):
    """What is shown of a source's pool."""

    restarts: int

    @property
    def pids(self) -> list[int]:
        """Workers that are ready."""
        ...


class RunWatchdog:
    def __init__(
        self,
        *,
        config: Config,
        batches: Batches,
        gateway: Gateway,
        pools: Mapping[str, Workers],
        metrics: MetricsFile,
    ) -> None:
        self._config, self._batches, self._gateway = config, batches, gateway
        self._pools, self._metrics = pools, metrics
        self._scheduler: BatchScheduler | None = None
        self._evaluator: Evaluator | None = None
        self._permits: Permits | None = None
        self._news = Notifier()
        self.ending: Callable[[], str | None] = lambda: None
        """What the end of the run waits for."""
        self.final_checkpoint = config.run.max_steps == 0
        """Whether the last checkpoint is written (or none is to be expected)."""

    def loaded(self, scheduler: BatchScheduler, evaluator: Evaluator, permits: Permits) -> None:
        """From now on there is more to tell than that the environments are loading."""
        self._scheduler, self._evaluator, self._permits = scheduler, evaluator, permits
        self._news.notify()

    @property
    def all_trained(self) -> bool:
        return self._batches.trained >= self._config.run.max_steps

    @property
    def finished(self) -> bool:
        """All steps are trained, the last checkpoint is saved and the last evaluation is written."""
        done = self.all_trained and self.final_checkpoint
        return bool(done and self._evaluator is not None and self._evaluator.idle)

    # -- in words ------------------------------------------------------------------------------------------------

    def waiting_for(self, step: int) -> str:
        """Why batch `step` is not there yet."""
        if self._scheduler is None:
            return f"batch {step}: {'; '.join([self._environments(), self._nodes()])}"
        evaluation = self._evaluator.waiting_for() if self._evaluator else None
        return "; ".join([self._scheduler.waiting_for(step), self._nodes(), *([evaluation] if evaluation else [])])

    def _environments(self) -> str:
        loading = [name for name, pool in self._pools.items() if not pool.pids]
        if loading:
            return f"the environment workers of {', '.join(loading)} are loading"
        return "tasks and tokenizers are loading" if self._pools else "the orchestrator is starting"

    def _nodes(self) -> str:
        router = self._gateway.router
        if serving := len(router.serving()):
            return f"served by {pluralize(serving, 'node')}"
        if self._config.inference.nodes and not list(router.nodes):
            return "no inference node has connected yet: it loads its model first (logs/node-*.log)"
        return f"no node serves: {router.why_no_node()}"

    def _trainer_owes(self) -> str:
        if self.all_trained:
            return f"ask for checkpoint {self._batches.trained}"
        return f"train step {self._batches.trained + 1}"

    def _now(self) -> str | None:
        """What the orchestrator itself waits for at this moment, `subject: how far that is`; None while all work."""
        if (ending := self.ending()) is not None:
            return ending
        if self._scheduler is None or self._evaluator is None:
            return f"the environments: {self._environments()}; {self._nodes()}"
        batches, evaluation = self._batches, self._evaluator.waiting_for()
        if evaluation is not None and (self.all_trained or self._evaluator.step == 0):  # training waits for step 0's
            return f"{evaluation}; {self._nodes()}"
        if batches.formed == batches.trained and not self.all_trained:
            return self.waiting_for(batches.formed + 1)
        if not self._scheduler.dispatcher.flights and not (self.all_trained and self.final_checkpoint):
            return f"the trainer to {self._trainer_owes()}"
        return None

    # -- as lines ------------------------------------------------------------------------------------------------

    async def report(self, server: StepServer) -> None:
        """A line every few seconds, and at once when the environments are loaded; until cancelled."""
        while True:
            self.log(server)
            await self._news.wait(_REPORT_S)

    def log(self, server: StepServer) -> None:
        figures: dict[str, float | str | None] = {
            "waiting_for": self._now() or "",
            "step_server/garbage": server.garbage,
            "step_server/refused": server.refused,
            "workers/restarts": sum(pool.restarts for pool in self._pools.values()),
        }
        if self._scheduler and self._permits and self._evaluator:
            figures |= self._scheduler.metrics()
            figures["queue/rollouts_waiting"] = self._permits.waiting(Lane.TRAIN)
            figures["eval/skipped"] = self._evaluator.skipped or None
        self._metrics.log(self._batches.trained, {**self._gateway.metrics(), **figures})

    # -- as deadlines --------------------------------------------------------------------------------------------

    async def watch(self, server: StepServer) -> None:
        """Until cancelled. Raises DeadlineError when the run can't be expected to go on."""
        settings, scheduler = self._config.orchestrator, self._scheduler
        assert scheduler is not None, "loaded() comes first"
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            starved_since = None if self.all_trained else scheduler.starved_since
            if starved_since is not None and now - starved_since > settings.batch_timeout_s:
                raise DeadlineError(
                    f"waited {settings.batch_timeout_s:.0f} s (orchestrator.batch_timeout_s) for "
                    f"{self.waiting_for(self._batches.formed + 1)}"
                )
            silent_s = now - max(server.last_heard or 0.0, scheduler.last_supplied)
            owed = starved_since is None and not (self.all_trained and self.final_checkpoint)
            if owed and silent_s > settings.trainer_timeout_s:
                raise DeadlineError(
                    f"no word from the trainer for {silent_s:.0f} s (orchestrator.trainer_timeout_s), which should "
                    f"{self._trainer_owes()}"
                )
