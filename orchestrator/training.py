"""Build what exists once the environments are loaded, from the parts that stand before: `build_training`.

evaluator     held-out tasks
dispatcher    groups of rollouts, with their hints
scheduler     which groups start, and which make a batch; it asks the evaluator whether a batch has to wait
watchdog      what the run waits for
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer_prime.run.ledger import left_out
from orchestrator.batching.dispatch import Dispatcher
from orchestrator.batching.open_run import OpenRun
from orchestrator.durability.journal import Entry, Journal
from orchestrator.durability.resume import OrchestratorState, resume
from orchestrator.evals import Evaluator
from orchestrator.hints.stage import build_hints
from orchestrator.preferences import build_mixer
from orchestrator.rollouts.failures import FailureLog
from orchestrator.rollouts.rollout import Permits, RequestFactory, RolloutRunner
from orchestrator.scheduler import BatchScheduler, GroupPlans
from orchestrator.step_server import StepServer
from orchestrator.tasks.sources import WHOLE, Sources
from orchestrator.watchdog import RunCompletion, RunWatchdog

if TYPE_CHECKING:
    from composer_prime.traces import OnlineReplay

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What exists once the environments are loaded."""

    scheduler: BatchScheduler
    evaluator: Evaluator
    watchdog: RunWatchdog


async def build_training(
    run: OpenRun,
    state: OrchestratorState | None,
    stack: AsyncExitStack,
    *,
    completion: RunCompletion,
    server: StepServer,
    replay: OnlineReplay | None,
) -> Training:
    """Build the parts in the order in which they need one another, and continue after `state`.

    `stack` closes what has to be closed.
    """
    config, gateway = run.config, run.gateway
    sources = _sources(run)
    journal, entries = await _open_journal(run, state)
    stack.push_async_callback(journal.close)
    permits = Permits(config.orchestrator.max_concurrent)
    runner = RolloutRunner(run.pools, gateway.records, permits, gateway.audits)
    requests = RequestFactory(config=config.orchestrator, gateway_url=f"{gateway.http_url}/v1", seed=config.run.seed)
    failures = FailureLog(path=run.run_dir.failed_rollouts)
    evaluator = Evaluator(run=run, runner=runner, requests=requests, failures=failures)
    scheduler = BatchScheduler(
        run=run,
        plans=GroupPlans(sources),
        journal=journal,
        dispatcher=await _build_dispatcher(run, runner, requests, failures, stack),
        evaluator=evaluator,
        pairs=await asyncio.to_thread(build_mixer, config, run.model_dir, run.run_dir.root),
    )
    watchdog = RunWatchdog(
        run=run,
        completion=completion,
        scheduler=scheduler,
        evaluator=evaluator,
        permits=permits,
        server=server,
        replay=replay,
    )
    if state is not None:
        resumed = resume(state, entries, sources, left_out(run.run_dir.ledger))
        scheduler.restore(state, resumed)
        evaluator.forget_after(state.step)
        logger.info(
            "resumed after step %d: %d batches formed, %d groups ready, %d dispatched again",
            state.step, len(resumed.batches), len(resumed.ready), len(resumed.in_flight),
        )  # fmt: skip
    return Training(scheduler=scheduler, evaluator=evaluator, watchdog=watchdog)


def _sources(run: OpenRun) -> Sources:
    return Sources(
        run.config.orchestrator,
        seed=run.config.run.seed,
        num_tasks={name: pool.num_tasks() for name, pool in run.pools.items()},
        shard=(run.config.diloco and run.config.diloco.task_shard) or WHOLE,
    )


async def _open_journal(run: OpenRun, state: OrchestratorState | None) -> tuple[Journal, list[Entry]]:
    """Return the journal, and its entries since `state`."""
    if state is None:
        return await asyncio.to_thread(Journal.create, run.run_dir.journal), []
    return await asyncio.to_thread(Journal.resume, run.run_dir.journal, min_seq=state.journal_seq)


async def _build_dispatcher(
    run: OpenRun, runner: RolloutRunner, requests: RequestFactory, failures: FailureLog, stack: AsyncExitStack
) -> Dispatcher:
    hints = await asyncio.to_thread(  # Its tokenizer takes a while to load.
        build_hints,
        run.config,
        chat_folder=run.model_dir,
        run_root=run.run_dir.root,
        distil=run.config.channels.sdpo.weight > 0,
    )
    if hints is not None:
        stack.push_async_callback(hints.close)
    dispatcher = Dispatcher(
        run=run,
        runner=runner,
        requests=requests,
        failures=failures,
        hints=hints,
    )
    stack.push_async_callback(dispatcher.close)
    return dispatcher
