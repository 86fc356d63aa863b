"""The orchestrator, wired: read this file first.

    sources ──plan──> dispatch ──> environment workers <──HTTP──> gateway <──ZMQ──> inference nodes
       ^                 │ (permits)                                │ records: token ids, logprobs, versions
       │ observe         v                                          v
    curriculum <── group ended <── advantages, filter <── compile (token ids -> samples)
                         v
    journal <── buffer ──> batch N ──> step server <──ZMQ── trainer ranks
                 (staleness)                └── StepDone(N): publish its version, evaluate, checkpoint

Who waits on whom: trainer ranks wait for a batch (batch_timeout_s); the batch for groups; a group for its rollouts
(source.timeout_s each); rollouts for a permit, a worker and a node (no_node_timeout_s); new groups for the trainer's
next version (trainer_timeout_s). One event loop; packing, compiling and all file work are in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from composer_prime.config import Config
from composer_prime.config.orchestrator import SourceConfig
from composer_prime.errors import CheckpointError, ComposerError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.packing.pack import model_flops
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, write_atomic
from composer_prime.run.weights import WeightStore
from composer_prime.traces.replay.online import OnlineReplay
from composer_prime.wire.step import StepDone
from orchestrator.batching.batches import Batches
from orchestrator.batching.scheduler import BatchScheduler
from orchestrator.chat_renderer import chat_folder
from orchestrator.durability import checkpoint
from orchestrator.durability.journal import Entry, Journal
from orchestrator.durability.resume import resume
from orchestrator.evals import Evaluator
from orchestrator.event_loop import Notifier
from orchestrator.gateway import Gateway
from orchestrator.gateway.gateway import TOKEN_VARIABLE
from orchestrator.hints.stage import HintStage, build_hints
from orchestrator.preferences.mixer import PairMixer, build_mixer
from orchestrator.rollouts.behaviour import Behaviour, build_behaviour
from orchestrator.rollouts.dispatch import Dispatcher
from orchestrator.rollouts.rollout import Permits, Pool, RequestFactory, RolloutRunner
from orchestrator.step_server import StepServer
from orchestrator.tasks.sources import WHOLE, Sources, eval_sources, source_spec
from orchestrator.watchdog import RunWatchdog, Workers
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import EVAL, TRAIN, SourceSpec

logger = logging.getLogger(__name__)

_TICK_S = 0.25
"""How often limits and node versions, which change without a beat, are looked at."""
_FAREWELL_S = 2.0
"""After a failure: how long ranks that ask are still told why."""


class SourcePool(Pool, Workers, Protocol):
    """A source's workers over their whole life (orchestrator/workers/pool.py)."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def num_tasks(self, taskset: str = TRAIN) -> int | None: ...


MakePool = Callable[[SourceConfig, SourceSpec], SourcePool]


class Method(NamedTuple):
    """What a group and a batch get beside rewards; None where it is not configured."""

    hints: HintStage | None
    behaviour: Behaviour | None
    pairs: PairMixer | None


class Pipeline:
    def __init__(
        self, config: Config, run_dir: RunDir, run_id: str, model_dir: Path, make_pool: MakePool | None = None
    ) -> None:
        """`make_pool` gives a source its workers; processes of their own by default.

        Raises CheckpointError when the checkpoint to resume is unusable.
        """
        self.config, self.run_dir, self.run_id, self.model_dir = config, run_dir, run_id, model_dir
        self._make_pool = make_pool or self._worker_pool
        self.changed = Notifier()
        self.metrics = MetricsFile(run_dir.metrics, "orchestrator")
        self.keys = RunKeys(run_dir.keys)
        self.store = WeightStore(run_dir.weights)
        self.state: checkpoint.OrchestratorState | None = None
        if config.run.resume:
            self.state = checkpoint.load_state(run_dir, run_dir.newest_checkpoint(), run_id)
        per_token, per_pair = _flops(model_dir)
        self.batches = Batches(
            run_id,
            flops_per_token=per_token,
            flops_per_pair=per_pair,
            distils=lambda step: config.channels.sdpo.weight_at(step) > 0,
            steps_per_version=config.diloco.sync_every if config.diloco else 1,
        )
        if self.state is not None:
            versions = self.batches.versions.at(self.state.step, self.state.versions)
            self.batches.restore(versions=versions, formed=self.state.step, batches=[])
        self.scheduler: BatchScheduler | None = None
        """None until the environments are loaded."""
        self.evaluator: Evaluator | None = None
        self.pools: dict[str, SourcePool] = {}
        self._replay: OnlineReplay | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = contextlib.AsyncExitStack()

    async def run(self) -> None:
        """From the first bind to the last evaluation. Raises what ended the run early."""
        async with self._stack:
            await self._open()
            try:
                await self._load()
                await self._until_finished()
            except Exception as error:
                error = root_cause(error)
                logger.error("the run failed: %s", error)
                self.server.finish(f"the orchestrator failed: {error}", failed=True)
                if self.batches.trained < self.config.run.max_steps and self.server.last_heard is not None:
                    await asyncio.sleep(_FAREWELL_S)
                raise error from None
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
            self.server.finish(f"all {self.config.run.max_steps} steps are done", failed=False)
            self.watchdog.log(self.server)

    # -- life ----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Bind every address and publish them."""
        config = self.config
        self._stack.push_async_callback(self._end_replay)  # the last to end: answers may take their time
        folder = await asyncio.to_thread(chat_folder, self.model_dir, config.model.chat_template, self.run_dir.root)
        self.gateway = Gateway(config, self.keys, self.run_id, self.store, model_dir=folder)
        self.watchdog = RunWatchdog(
            config=config, batches=self.batches, gateway=self.gateway, pools=self.pools, metrics=self.metrics
        )
        await self.gateway.start()
        self._stack.push_async_callback(self._close_gateway)
        self.server = StepServer(
            run_id=self.run_id,
            batches=self.batches,
            changed=self.changed,
            waiting_for=self.watchdog.waiting_for,
            on_step_done=self._step_done,
            on_checkpoint=self._checkpoint,
            on_error=self.fail,
            max_steps=config.run.max_steps,
        )
        endpoint = self.server.bind(config.orchestrator.step_address, self.keys)
        self._stack.push_async_callback(self.server.close)
        addresses = {
            "step": reachable(endpoint),
            "node": reachable(self.gateway.node_endpoint),
            "http": self.gateway.http_url,
        }
        write_atomic(self.run_dir.endpoints, json.dumps(addresses).encode() + b"\n")
        logger.info("run %s: %s", self.run_id, addresses)
        self._spawn(self.gateway.watch())
        self._spawn(self.watchdog.report(self.server))
        if self.state is not None:
            # Without a state the trainer publishes the first version when it attaches.
            await self._publish(self.batches.versions.newest, required=False)
        self._folder = folder

    async def _close_gateway(self) -> None:
        finished = self.watchdog.all_trained and not self._failure.done()
        await self.gateway.close(finished=finished)

    async def _load(self) -> None:
        """Start the environments, then everything that needs to know their tasks."""
        config, orchestrator = self.config, self.config.orchestrator
        self._stack.push_async_callback(self._close_pools)
        for source in orchestrator.source:
            spec = source_spec(
                source,
                model_path=str(self._folder),
                renderer=config.model.renderer,
                max_context=config.model.max_context,
            )
            self.pools[source.name] = self._make_pool(source, spec)
        await asyncio.gather(*(pool.start() for pool in self.pools.values()))
        num_tasks = {name: pool.num_tasks() for name, pool in self.pools.items()}
        shard = (config.diloco and config.diloco.task_shard) or WHOLE
        sources = Sources(orchestrator, seed=config.run.seed, num_tasks=num_tasks, shard=shard)
        journal, entries = await asyncio.to_thread(self._journal)
        self._stack.push_async_callback(journal.close)
        self._wire(sources, journal, await self._method())
        if self.state is not None:
            resumed = resume(self.state, entries, sources)
            self.scheduler.restore(self.state, resumed)
            self.evaluator.forget_after(self.state.step)
            logger.info(
                "resumed after step %d: %d batches formed, %d groups ready, %d dispatched again",
                self.state.step, len(resumed.batches), len(resumed.ready), len(resumed.in_flight),
            )  # fmt: skip
        self.watchdog.loaded(self.scheduler, self.evaluator, self.permits)
        self._loaded.set()
        if self.evaluator.due(self.batches.trained, config.run.max_steps):
            self.evaluator.request(self.batches.trained, self.batches.versions.newest)
        self.changed.notify()

    def _worker_pool(self, source: SourceConfig, spec: SourceSpec) -> WorkerPool:
        return WorkerPool(
            spec,
            workers=source.workers,
            start_timeout_s=self.config.orchestrator.worker_start_timeout_s,
            log_dir=self.run_dir.root / "logs",
        )

    def _journal(self) -> tuple[Journal, list[Entry]]:
        if self.state is None:
            return Journal.create(self.run_dir.journal), []
        return continued(self.run_dir.journal, self.state.journal_seq)

    async def _method(self) -> Method:
        """What the second and third channel and behaviour rewards need; their tokenizers load in threads."""
        config = self.config
        hints = await asyncio.to_thread(
            build_hints,
            config,
            chat_folder=self._folder,
            gateway_url=f"{self.gateway.http_url}/v1",
            gateway_token=os.environ.get(TOKEN_VARIABLE),
            run_root=self.run_dir.root,
            distil=config.channels.sdpo.weight > 0,
        )
        if hints is not None:
            self._stack.push_async_callback(hints.close)
        behaviour = await asyncio.to_thread(build_behaviour, config.orchestrator.behaviour, self._folder)
        return Method(hints, behaviour, await asyncio.to_thread(build_mixer, config, self._folder, self.run_dir.root))

    def _wire(self, sources: Sources, journal: Journal, method: Method) -> None:
        config, orchestrator = self.config, self.config.orchestrator
        self.permits = Permits(self.gateway.adaptive.limit, orchestrator.eval.share)
        runner = RolloutRunner(self.pools, self.gateway.records, self.permits)
        requests = RequestFactory(config=orchestrator, gateway_url=f"{self.gateway.http_url}/v1", seed=config.run.seed)
        self.scheduler = BatchScheduler(
            config=orchestrator,
            run_id=self.run_id,
            seed=config.run.seed,
            max_steps=config.run.max_steps,
            run_dir=self.run_dir,
            sources=sources,
            batches=self.batches,
            journal=journal,
            changed=self.changed,
            serving_version=self._serving_version,
            on_error=self.fail,
            pairs=method.pairs,
        )
        self.scheduler.dispatcher = Dispatcher(
            config=orchestrator,
            scaling=config.channels.policy.advantage_scaling,
            runner=runner,
            requests=requests,
            serving_version=self._serving_version,
            on_end=self.scheduler.group_ended,
            on_error=self.fail,
            behaviour=method.behaviour,
            hints=method.hints,
            wants_hints=self.scheduler.distils_soon if config.channels.sdpo.weight > 0 else lambda: True,
        )
        self._stack.push_async_callback(self.scheduler.dispatcher.close)
        evaluated = eval_sources(orchestrator)
        self.evaluator = Evaluator(
            config=orchestrator,
            sources=evaluated,
            num_tasks={source.name: self.pools[source.name].num_tasks(EVAL) for source in evaluated},
            runner=runner,
            permits=self.permits,
            requests=requests,
            run_dir=self.run_dir,
            metrics=self.metrics,
            serving_version=self._evaluated_version,
            changed=self.changed,
        )

    async def _close_pools(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        self.batches.close()

    async def _until_finished(self) -> None:
        self._spawn(self.evaluator.run())
        self._spawn(self._advance())
        if self.config.teachers.online:
            self._replay = OnlineReplay(self.config, self.run_dir, self.metrics, lambda: self.batches.trained)
            self.watchdog.ending = self._replay.waiting_for
            self._replaying = self._watched(self._replay.run())
        self._spawn(self.watchdog.watch(self.server))
        finished = asyncio.create_task(self._finished())
        try:
            await asyncio.wait({finished, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
        finally:
            finished.cancel()
            if self._replay is not None:
                self._replay.stop()

    async def _end_replay(self) -> None:
        """Calls to teachers may be charged: they are waited for, but not while others wait to hear of a failure."""
        if self._replay is None or self._replaying is None:
            return
        if not self._failure.done():
            await self._replay.end()
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)

    async def _finished(self) -> None:
        while not self.watchdog.finished:
            await self.changed.wait(3600)

    def _spawn(self, work) -> None:
        """Do `work` until the run ends."""
        self._tasks.append(self._watched(work))

    def _watched(self, work) -> asyncio.Task[None]:
        """`work`, whose failure is the run's."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda done: done.cancelled() or (done.exception() and self.fail(done.exception())))
        return task

    def fail(self, error: BaseException) -> None:
        """The run can't go on. Only the first error counts."""
        if not self._failure.done():
            self._failure.set_exception(error)

    # -- loops ---------------------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        while True:
            self.permits.grant()
            await self.scheduler.advance()
            self._require_version()
            await self.changed.wait(_TICK_S)

    def _require_version(self) -> None:
        """Nodes whose weights no future batch accepts get no more work until they have caught up."""
        router = self.gateway.router
        if router.oldest_version != min(self.scheduler.oldest_version, router.newest_version):
            self.gateway.require_version(self.scheduler.oldest_version)

    # -- what the trainer says -----------------------------------------------------------------------------------

    async def _step_done(self, message: StepDone) -> None:
        await self._loaded.wait()
        went_back = message.step < self.batches.trained
        await self.scheduler.step_done(message.step, message.version, message.sample_ids)
        if went_back:
            self.evaluator.forget_after(message.step)
        if not message.sample_ids or message.version != self.gateway.version:
            await self._publish(message.version)
        if message.sample_ids and self.evaluator.due(message.step, self.config.run.max_steps):
            self.evaluator.request(message.step, message.version)
        if self.watchdog.all_trained and message.step in self.run_dir.complete_checkpoints():
            self.watchdog.final_checkpoint = True
        self.changed.notify()

    async def _publish(self, version: int, *, required: bool = True) -> None:
        """Pass policy version `version` on to the nodes. Raises CheckpointError when `required` and not there."""
        try:
            signed = await asyncio.to_thread(self.store.manifest, version)
        except FileNotFoundError:
            if not required:
                return
            raise CheckpointError(
                f"the trainer announced policy version {version}, but {self.store.root} has no manifest of it"
            ) from None
        self.gateway.publish(signed)

    async def _checkpoint(self, step: int) -> None:
        await self._loaded.wait()
        try:
            await self.scheduler.checkpoint(step)
        except (ComposerError, OSError) as error:
            if self.watchdog.all_trained:
                self.fail(error)
            raise
        if step >= self.config.run.max_steps:
            self.watchdog.final_checkpoint = True
        self.changed.notify()

    # -- versions ------------------------------------------------------------------------------------------------

    def _serving_version(self) -> int:
        """Oldest policy version that a rollout begun now can be sampled with."""
        required = self.gateway.router.oldest_version
        return min((node.version for node in self.gateway.router.serving()), default=required)

    def _evaluated_version(self) -> int | None:
        return min((node.version for node in self.gateway.router.serving()), default=None)


def _flops(model_dir: Path) -> tuple[float, float]:
    """What packing balances by; every token alike where the model's shape is not described in the usual words."""
    values = json.loads((model_dir / "config.json").read_text())
    try:
        return model_flops(values.get("text_config") or values)
    except KeyError as error:
        logger.warning("%s/config.json has no %s: packing balances tokens, not FLOPs", model_dir, error)
        return 1.0, 0.0


def reachable(endpoint: str) -> str:
    """`endpoint` as a process on this machine can connect to it, also when it is bound to every interface."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def root_cause(error: BaseException) -> BaseException:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def continued(folder: Path, journal_seq: int) -> tuple[Journal, list[Entry]]:
    """The journal that a checkpoint of entry number `journal_seq` left, and its entries.

    Compaction may have emptied it; numbers go on from the checkpoint's, or new entries would count as old ones.
    """
    journal, entries = Journal.resume(folder)
    journal.seq = max(journal.seq, journal_seq)
    return journal, entries
