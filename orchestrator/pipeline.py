"""The orchestrator's wiring and its loop: read this file first.

    sources ──plan──> dispatch ──> environment workers <──HTTP──> gateway <──ZMQ──> inference nodes
       ^                 │ (permits)                                │ records: token ids, logprobs, versions
       │ observe         v                                          v
    curriculum <── group ended <── advantages, filter <── samples (token ids)
                         v
    journal <── buffer ──> batch N ──> step server <──ZMQ── trainer ranks
                 (staleness)                └── StepDone(N): publish its version, evaluate, checkpoint

Trainer ranks wait for a batch (batch_timeout_s), the batch for groups, a group for its rollouts (source.timeout_s),
rollouts for a permit, a worker and a node (no_node_timeout_s), new groups for the trainer's next version
(trainer_timeout_s). There is one event loop; packing, compiling and files are in threads.

A run has three stages. `__init__` builds what needs only the configuration. `_open` binds the addresses, so that nodes
and the trainer can connect. `_load` starts the environments and builds what depends on their tasks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_prime.address import reachable
from composer_prime.config import Config
from composer_prime.errors import CheckpointError, ComposerError, WireError
from composer_prime.event_loop import Notifier, end, watched
from composer_prime.monitor.events import event
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.keys import RunKeys
from composer_prime.run.ledger import left_out
from composer_prime.run.run_dir import RunDir, write_atomic
from composer_prime.run.weights import WeightStore
from composer_prime.traces import build_online_replay
from composer_prime.wire.sockets import bind_router
from composer_prime.wire.types import StepDone
from orchestrator.batching.batches import Batches, OpenRun, StepServer, flop_cost
from orchestrator.chat_template import chat_folder
from orchestrator.durability import Journal, load_state, resume
from orchestrator.evals import Evaluator
from orchestrator.file_rows import DemonstrationRows, build_demonstrations, build_mixer
from orchestrator.gateway import Gateway
from orchestrator.hints.redraws import build_redraws
from orchestrator.hints.stage import build_hints
from orchestrator.rollouts.rollout import Permits, RolloutRunner
from orchestrator.rollouts.rollout_log import FailureLog
from orchestrator.scheduler import BatchScheduler, Dispatcher
from orchestrator.tasks import Sources, worker_pools
from orchestrator.watchdog import RunWatchdog, describe_startup

if TYPE_CHECKING:
    from composer_prime.traces import OnlineReplay

logger = logging.getLogger(__name__)


TICK_S = 0.25
"""Between two looks at limits and node versions, which change without a notification."""
REPORT_S = 5.0
"""Between two status lines."""
FAREWELL_S = 2.0
"""After a failure, ranks still get the reason for so long."""


class Pipeline:
    def __init__(self, config: Config, run_dir: RunDir, run_id: str, model_dir: Path) -> None:
        """Needs a running event loop. Raises CheckpointError for the one to resume from, ConfigError for a template."""
        self.keys = RunKeys(run_dir.keys)
        self.store = WeightStore(run_dir.weights)
        self.state = load_state(run_dir, run_dir.newest_checkpoint(), run_id) if config.run.resume else None
        """To resume from."""
        loop = asyncio.get_running_loop()
        self._rows: asyncio.Future[DemonstrationRows] = loop.create_future()
        self._loaded: asyncio.Future[RunWatchdog] = loop.create_future()
        self._failure: asyncio.Future[None] = loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self.batches = Batches(run_id, config, flop_cost(model_dir), demonstrations=self._rows.result)
        if self.state is not None:
            versions = replace(self.state.versions, period=self.batches.versions.period)
            self.batches.restore(versions=versions, formed=self.state.step, batches=[])
        folder = chat_folder(model_dir, config.model.chat_template, run_dir.root)
        self.gateway = Gateway(config, self.keys, run_id, self.store, model_dir=folder, fail=self.fail)
        self.opened = OpenRun(
            config=config,
            run_dir=run_dir,
            run_id=run_id,
            model_dir=folder,
            gateway=self.gateway,
            pools=worker_pools(config, folder, run_dir.root / "logs"),
            batches=self.batches,
            metrics=MetricsFile(run_dir.metrics, "orchestrator"),
            changed=Notifier(),
            fail=self.fail,
        )
        self.replay = build_online_replay(config, run_dir, self.opened.metrics, lambda: self.batches.trained)
        """Teachers that replay traces during training."""

    @property
    def watchdog(self) -> RunWatchdog | None:
        return self._loaded.result() if self._loaded.done() else None

    async def run(self) -> None:
        """Run to the last evaluation. Raises what ended the run early."""
        # `outer` closes last: teachers may take a while.
        async with AsyncExitStack() as outer, AsyncExitStack() as stack:
            server = await self._open(stack)
            try:
                watchdog = await self._load(stack, server)
                await self._until_finished(watchdog, outer)
            except Exception as error:
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                logger.error("the run failed: %s", error)
                server.finish(f"the orchestrator failed: {error}", failed=True)
                if not self.batches.all_trained and server.last_heard is not None:
                    await asyncio.sleep(FAREWELL_S)
                raise error from None
            finally:
                await end(self._tasks)
            server.finish(f"all {self.batches.last_step} steps are done", failed=False)
            self._log_status()

    # -- stages --------------------------------------------------------------------------------------------------

    async def _open(self, stack: AsyncExitStack) -> StepServer:
        run, trainer = self.opened, self.keys.curve("trainer").public
        await self.gateway.start()
        stack.push_async_callback(self._close_gateway)
        server = StepServer(
            run,
            bind_router(run.config.orchestrator.step_address, self.keys.curve("server"), [trainer]),
            on_step_done=self._step_done,
            on_checkpoint=self._checkpoint,
            waiting_for=self._waiting_for_batch,
        )
        stack.push_async_callback(server.close)
        addresses = {
            "step": reachable(server.endpoint),
            "node": reachable(self.gateway.node_endpoint),
            "http": self.gateway.http_url,
        }
        write_atomic(run.run_dir.endpoints, json.dumps(addresses).encode() + b"\n")
        logger.info("run %s: %s", run.run_id, addresses)
        self._spawn(self._report())
        if self.state is not None:
            # Without a state the trainer publishes the first version when it attaches.
            await self._publish(self.batches.versions.newest, required=False)
        return server

    async def _load(self, stack: AsyncExitStack, server: StepServer) -> RunWatchdog:
        run = self.opened
        stack.push_async_callback(self._close_pools)
        await asyncio.gather(*(pool.start() for pool in run.pools.values()))
        blamed = frozenset(left_out(run.run_dir.ledger))
        self._rows.set_result(await asyncio.to_thread(build_demonstrations, run.config, run.model_dir, blamed))
        watchdog = await self._build(stack, server)
        self._loaded.set_result(watchdog)
        if watchdog.evaluator.due(self.batches.trained, self.batches.last_step):
            watchdog.evaluator.request(self.batches.trained, self.batches.versions.newest)
        self.opened.changed.notify()
        return watchdog

    async def _build(self, stack: AsyncExitStack, server: StepServer) -> RunWatchdog:
        run, config = self.opened, self.opened.config
        sources = Sources(
            config.orchestrator,
            seed=config.run.seed,
            num_tasks={name: pool.num_tasks() for name, pool in run.pools.items()},
        )
        opening = Journal.create if self.state is None else partial(Journal, min_seq=self.state.journal_seq)
        journal = await asyncio.to_thread(opening, run.run_dir.journal)
        stack.push_async_callback(journal.close)
        runner = RolloutRunner(
            config=config.orchestrator,
            gateway=self.gateway,
            pools=run.pools,
            permits=Permits(config.orchestrator.max_concurrent),
            seed=config.run.seed,
        )
        failures = FailureLog(path=run.run_dir.failed_rollouts)
        evaluator = Evaluator(run=run, runner=runner, failures=failures)
        hints = await asyncio.to_thread(build_hints, config, run.model_dir, run.run_dir.root)
        if hints is not None:
            stack.push_async_callback(hints.close)
        redraws = build_redraws(config, hints, runner, run.run_dir.licence, self.batches.trained)
        dispatcher = Dispatcher(run=run, runner=runner, failures=failures, hints=hints, redraws=redraws)
        stack.push_async_callback(dispatcher.close)
        scheduler = BatchScheduler(
            run=run,
            sources=sources,
            journal=journal,
            dispatcher=dispatcher,
            evaluator=evaluator,
            pairs=await asyncio.to_thread(build_mixer, config, run.model_dir, run.run_dir.root),
        )
        if self.state is not None:
            resumed = await asyncio.to_thread(resume, self.state, journal, sources, left_out(run.run_dir.ledger))
            scheduler.restore(self.state, resumed)
            evaluator.forget_after(self.state.step)
            logger.info(
                "resumed after step %d: %d batches formed, %d groups ready, %d dispatched again",
                self.state.step, len(resumed.batches), len(resumed.ready), len(resumed.in_flight),
            )  # fmt: skip
        return RunWatchdog(run=run, scheduler=scheduler, evaluator=evaluator, server=server, replay=self.replay)

    async def _until_finished(self, watchdog: RunWatchdog, outer: AsyncExitStack) -> None:
        self._spawn(watchdog.evaluator.serve())
        self._spawn(self._advance(watchdog.scheduler))
        if self.replay is not None:
            outer.push_async_callback(self._end_replay, self.replay, watched(self.replay.run(), self.fail))
        self._spawn(watchdog.watch())
        try:
            await self.opened.changed.wait_for(lambda: self._failure.done() or watchdog.finished, math.inf)
            if self._failure.done():
                self._failure.result()
        finally:
            if self.replay is not None:
                self.replay.stop()

    async def _close_gateway(self) -> None:
        await self.gateway.close(finished=self.batches.all_trained and not self._failure.done())

    async def _close_pools(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.opened.pools.values()))
        self.batches.close()

    async def _end_replay(self, replay: OnlineReplay, task: asyncio.Task[None]) -> None:
        """Wait for calls to teachers, which may be charged; not after a failure."""
        if not self._failure.done():
            await replay.end()
        await end([task])

    # -- loops ---------------------------------------------------------------------------------------------------

    async def _advance(self, scheduler: BatchScheduler) -> None:
        while True:
            await scheduler.advance()
            # Nodes with weights that no future batch accepts get no work. While a batch is formed ahead, these may be
            # all. Then the newest version serves, for evaluations.
            router = self.gateway.router
            oldest = min(scheduler.oldest_version, router.policy.newest)
            if router.policy.oldest != oldest:
                self.gateway.require_version(oldest)
            await self.opened.changed.wait(TICK_S)

    async def _report(self) -> None:
        """Log every few seconds, and at once when the environments are loaded."""
        while True:
            self._log_status()
            if self._loaded.done():
                await asyncio.sleep(REPORT_S)
            else:
                await asyncio.wait({self._loaded}, timeout=REPORT_S)

    def _log_status(self) -> None:
        figures: dict[str, float | str | None] = {
            **self.gateway.metrics(),
            "workers/restarts": sum(pool.restarts for pool in self.opened.pools.values()),
        }
        if self.watchdog is not None:
            figures |= self.watchdog.scheduler.metrics() | {"waiting_for": self.watchdog.waiting_for() or ""}
        else:
            startup = describe_startup(self.opened.config, self.gateway, self.opened.pools)
            figures["waiting_for"] = f"the environments: {startup}"
        self.opened.metrics.log(self.batches.trained, figures)

    def _waiting_for_batch(self, step: int) -> str:
        if self.watchdog is not None:
            return self.watchdog.waiting_for_batch(step)
        return f"batch {step}: {describe_startup(self.opened.config, self.gateway, self.opened.pools)}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(watched(work, self.fail))

    def fail(self, error: BaseException) -> None:
        """End the run with its first error."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self.opened.changed.notify()

    # -- messages from the trainer -------------------------------------------------------------------------------

    async def _step_done(self, message: StepDone) -> None:
        watchdog = await asyncio.shield(self._loaded)
        before = self.batches.trained
        await watchdog.scheduler.step_done(message)
        if message.step < before:
            watchdog.evaluator.forget_after(message.step)
        # An attaching trainer took no step, but may report that the run ends here.
        is_new = self.batches.trained > before or message.step == self.batches.last_step
        if is_new and watchdog.evaluator.due(message.step, self.batches.last_step):
            watchdog.evaluator.request(message.step, message.version)  # before any await: it may hold the next batch
        if not message.sample_ids or message.version != self.gateway.version:
            await self._publish(message.version)
        if self.batches.all_trained and message.step in self.opened.run_dir.complete_checkpoints():
            watchdog.note_checkpoint(message.step)
        self.opened.changed.notify()

    async def _publish(self, version: int, *, required: bool = True) -> None:
        """Raise CheckpointError when the store lacks `version`."""
        try:
            signed = await asyncio.to_thread(self.store.manifest, version)
        except FileNotFoundError:
            if not required:
                return
            raise CheckpointError(
                f"the trainer announced policy version {version}, but {self.store.root} has no manifest of it"
            ) from None
        try:
            self.gateway.publish(signed)
        except WireError as error:
            if required:
                raise
            logger.warning("weights v%d in %s are left to the trainer, which publishes them anew: %s",
                           version, self.store.root, error)  # fmt: skip

    async def _checkpoint(self, step: int) -> None:
        watchdog = await asyncio.shield(self._loaded)
        try:
            await watchdog.scheduler.checkpoint(step)
        except (ComposerError, OSError) as error:
            if self.batches.all_trained:
                self.fail(error)
            raise
        watchdog.note_checkpoint(step)
        logger.info("checkpoint of step %d is saved", step, extra=event("checkpoint"))
        self.opened.changed.notify()
