"""Build what exists once the environments are loaded, from the parts that stand before: `build_training`.

evaluator     held-out tasks
dispatcher    groups of rollouts, with their hints
scheduler     which groups start, and which make a batch; it asks the evaluator whether a batch has to wait
watchdog      what the run waits for
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.config import Config
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.turns import GATEWAY_TOKEN_VARIABLE
from orchestrator.batching.batches import Batches
from orchestrator.batching.dispatch import Dispatcher
from orchestrator.durability.journal import Journal
from orchestrator.evals import Evaluator
from orchestrator.event_loop import Notifier
from orchestrator.gateway import Gateway
from orchestrator.hints.stage import build_hints
from orchestrator.preferences import build_mixer
from orchestrator.rollouts.behavior import BehaviorRewards
from orchestrator.rollouts.failures import FailureLog
from orchestrator.rollouts.rollout import Permits, RequestFactory, RolloutRunner
from orchestrator.scheduler import BatchScheduler
from orchestrator.step_server import StepServer
from orchestrator.tasks.sources import Sources, eval_sources
from orchestrator.watchdog import RunCompletion, RunWatchdog
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import EVAL

if TYPE_CHECKING:
    from composer_prime.traces import OnlineReplay


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """What a run has before its environments are loaded."""

    config: Config
    run_dir: RunDir
    run_id: str
    model_dir: Path
    """Folder with the policy's tokenizer and chat template."""
    gateway: Gateway
    pools: dict[str, WorkerPool]
    """Environment workers by source."""
    batches: Batches
    completion: RunCompletion
    metrics: MetricsFile
    changed: Notifier
    server: StepServer
    replay: OnlineReplay | None
    fail: Callable[[BaseException], None]
    """Ends the run with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What exists once the environments are loaded."""

    permits: Permits
    scheduler: BatchScheduler
    evaluator: Evaluator
    watchdog: RunWatchdog


async def build_training(run: OpenRun, sources: Sources, journal: Journal, stack: AsyncExitStack) -> Training:
    """Build the parts in the order in which they need one another. `stack` closes what has to be closed."""
    config, orchestrator, gateway = run.config, run.config.orchestrator, run.gateway
    permits = Permits(orchestrator.max_concurrent)
    runner = RolloutRunner(run.pools, gateway.records, permits, gateway.audits)
    requests = RequestFactory(config=orchestrator, gateway_url=f"{gateway.http_url}/v1", seed=config.run.seed)
    failures = FailureLog(path=run.run_dir.failed_rollouts)
    with_held_out = eval_sources(orchestrator)
    evaluator = Evaluator(
        config=orchestrator,
        sources=with_held_out,
        num_tasks={source.name: run.pools[source.name].num_tasks(EVAL) for source in with_held_out},
        runner=runner,
        permits=permits,
        requests=requests,
        run_dir=run.run_dir,
        metrics=run.metrics,
        failures=failures,
        served_versions=lambda: [node.version for node in gateway.router.serving()],
        changed=run.changed,
    )
    scheduler = BatchScheduler(
        config=orchestrator,
        run_id=run.run_id,
        seed=config.run.seed,
        run_dir=run.run_dir,
        sources=sources,
        batches=run.batches,
        journal=journal,
        dispatcher=await _build_dispatcher(run, runner, requests, failures, stack),
        changed=run.changed,
        gateway=gateway,
        evaluator=evaluator,
        on_error=run.fail,
        pairs=await asyncio.to_thread(build_mixer, config, run.model_dir, run.run_dir.root),
        log_tokens=config.monitor.tokens,
    )
    watchdog = RunWatchdog(
        config=config,
        gateway=gateway,
        completion=run.completion,
        batches=run.batches,
        scheduler=scheduler,
        evaluator=evaluator,
        permits=permits,
        server=run.server,
        replay=run.replay,
    )
    return Training(permits=permits, scheduler=scheduler, evaluator=evaluator, watchdog=watchdog)


async def _build_dispatcher(
    run: OpenRun, runner: RolloutRunner, requests: RequestFactory, failures: FailureLog, stack: AsyncExitStack
) -> Dispatcher:
    config, orchestrator = run.config, run.config.orchestrator
    distil = config.channels.sdpo.weight > 0
    hints = await asyncio.to_thread(  # Its tokenizer takes a while to load.
        build_hints,
        config,
        chat_folder=run.model_dir,
        gateway_url=f"{run.gateway.http_url}/v1",
        gateway_token=os.environ.get(GATEWAY_TOKEN_VARIABLE),
        run_root=run.run_dir.root,
        distil=distil,
    )
    if hints is not None:
        stack.push_async_callback(hints.close)
    dispatcher = Dispatcher(
        config=orchestrator,
        scaling=config.channels.policy.advantage_scaling,
        runner=runner,
        requests=requests,
        on_error=run.fail,
        failures=failures,
        batches=run.batches,
        behavior=BehaviorRewards(orchestrator.behavior) if orchestrator.behavior.active else None,
        hints=hints,
        distil=distil,
    )
    stack.push_async_callback(dispatcher.close)
    return dispatcher
