"""What the run waits for, in words, and deadlines that no single wait owns: an unfilled batch, a silent trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer_prime.config import Config
from composer_prime.console import pluralize
from composer_prime.errors import DeadlineError
from orchestrator.batching.batches import OpenRun, StepServer
from orchestrator.evals import Evaluator
from orchestrator.gateway import Gateway
from orchestrator.scheduler import BatchScheduler
from orchestrator.workers.pool import WorkerPool

if TYPE_CHECKING:
    from composer_prime.traces import OnlineReplay

_WATCH_S = 0.25


def describe_startup(config: Config, gateway: Gateway, pools: Mapping[str, WorkerPool]) -> str:
    """Return what a starting run waits for."""
    loading = [name for name, pool in pools.items() if not pool.players]
    part = f"the environment workers of {', '.join(loading)}" if loading else "tasks and tokenizers"
    return f"{part} are loading; {describe_nodes(config, gateway)}"


def describe_nodes(config: Config, gateway: Gateway) -> str:
    """Return how many nodes serve, or why none does."""
    if not config.orchestrator.source:
        return "there is no source to play"
    router = gateway.router
    if serving := len(router.serving()):
        return f"served by {pluralize(serving, 'node')}"
    if config.inference.nodes and not router.nodes:
        return "no inference node has connected yet: it loads its model first (logs/node-*.log)"
    return f"no node serves: {gateway.waits.why_no_node()}"


@dataclass(slots=True, kw_only=True, eq=False)
class RunWatchdog:
    run: OpenRun
    scheduler: BatchScheduler
    evaluator: Evaluator
    server: StepServer
    replay: OnlineReplay | None
    _last_checkpoint: int = field(default=0, init=False)

    def note_checkpoint(self, step: int) -> None:
        self._last_checkpoint = max(self._last_checkpoint, step)

    @property
    def trainer_is_done(self) -> bool:
        """Tell whether all steps are trained, and the last checkpoint is not due any more."""
        return self.run.batches.all_trained and self._last_checkpoint >= self.run.batches.last_step

    def next_order(self) -> str:
        batches = self.run.batches
        return f"ask for checkpoint {batches.trained}" if batches.all_trained else f"train step {batches.trained + 1}"

    @property
    def finished(self) -> bool:
        return self.trainer_is_done and self.evaluator.step is None

    def waiting_for_batch(self, step: int) -> str:
        """Say why batch `step` is not there yet."""
        reasons = [
            self.scheduler.waiting_for(step),
            describe_nodes(self.run.config, self.run.gateway),
            self.evaluator.waiting_for(),
        ]
        return "; ".join(reason for reason in reasons if reason)

    def waiting_for(self) -> str | None:
        """Return what the orchestrator waits for; None while everything works."""
        if self.replay is not None and (replay := self.replay.waiting_for()) is not None:
            return replay
        all_trained = self.run.batches.all_trained
        evaluation = self.evaluator.waiting_for()
        if evaluation is not None and (all_trained or self.evaluator.step == 0):  # Training waits for that of step 0.
            return f"{evaluation}; {describe_nodes(self.run.config, self.run.gateway)}"
        if self.run.batches.formed == self.run.batches.trained and not all_trained:
            return self.waiting_for_batch(self.run.batches.formed + 1)
        if not self.scheduler.dispatcher.in_flight and not self.trainer_is_done:
            return f"the trainer to {self.next_order()}"
        return None

    async def watch(self) -> None:
        """Watch until cancelled. Raises DeadlineError when the run is stuck."""
        settings = self.run.settings
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            starved_since = None if self.run.batches.all_trained else self.scheduler.starved_since
            if starved_since is not None and now - starved_since > settings.batch_timeout_s:
                raise DeadlineError(
                    f"waited {settings.batch_timeout_s:.0f} s (orchestrator.batch_timeout_s) for "
                    f"{self.waiting_for_batch(self.run.batches.formed + 1)}"
                )
            silent_s = now - max(self.server.last_heard or 0.0, self.scheduler.changed_at)
            if starved_since is None and not self.trainer_is_done and silent_s > settings.trainer_timeout_s:
                raise DeadlineError(
                    f"no message from the trainer for {silent_s:.0f} s (orchestrator.trainer_timeout_s), which should "
                    f"{self.next_order()}"
                )
