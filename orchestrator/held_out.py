"""Held-out rollouts of one model outside a run: `composer eval`. Each is on disk as it ends, so a stop loses none.

evaluate --every (source, task, sample)--> play_held_out --> rollouts/eval_000000.jsonl
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from composer_prime.config.orchestrator import OrchestratorConfig, SourceConfig
from composer_prime.errors import plain_errors
from composer_prime.run.run_dir import RunDir
from orchestrator.evals import play_held_out
from orchestrator.gateway import Gateway
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.failures import FailureLog
from orchestrator.rollouts.rollout import Permits, RequestFactory, RolloutRunner
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import EVAL


async def evaluate(
    config: OrchestratorConfig,
    pools: Mapping[str, WorkerPool],
    gateway: Gateway,
    run_dir: RunDir,
    *,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Play config.eval.tasks of each pool's source, and append the rollouts. `on_progress` gets how many of how many.

    Raises EnvironmentWorkerError when the workers of a source are gone.
    """
    runner = RolloutRunner(pools, gateway.records, Permits(config.max_concurrent, eval_share=1.0))
    requests = RequestFactory(config=config, gateway_url=f"{gateway.http_url}/v1", seed=seed)
    failures = FailureLog(path=run_dir.failed_rollouts)
    sources = [source for source in config.source if source.name in pools]
    places = [place for source in sources for place in _places(config, source, pools[source.name])]
    path, count, writing = run_dir.eval_rollouts(0), 0, asyncio.Lock()

    async def play(source: str, task_index: int, sample: int) -> None:
        nonlocal count
        rollout = await play_held_out(
            config, runner, requests, failures, source, step=0, version=0, task_index=task_index, sample=sample
        )
        line = rollout_log.rollout_line(0, source, rollout, "evaluated")
        async with writing:
            await asyncio.to_thread(rollout_log.append, path, line)
        count += 1
        on_progress(count, len(places))

    with plain_errors():
        async with asyncio.TaskGroup() as group:
            for place in places:
                group.create_task(play(*place))


def _places(config: OrchestratorConfig, source: SourceConfig, pool: WorkerPool) -> list[tuple[str, int, int]]:
    tasks = min(config.eval.tasks, pool.num_tasks(EVAL))
    return [(source.name, task, sample) for task in range(tasks) for sample in range(config.eval.samples)]
