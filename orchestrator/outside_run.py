"""Rollouts of one model outside a run: `composer try` looks at an environment, `composer eval` at held-out tasks.

play_episodes -> worker -> environment <-> gateway; the tokens are compiled as for training
trial_warnings -> what would make a run learn nothing
evaluate --every (source, task, sample)--> play_held_out --> rollouts/eval_000000.jsonl, as each ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.console import pluralize
from composer_prime.errors import plain_errors
from composer_prime.run.run_dir import RunDir, append_line
from orchestrator.evals import HeldOutPlace, held_out_places, play_held_out
from orchestrator.gateway import Gateway
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import FinishedRollout, GroupPlan, derive_seed
from orchestrator.rollouts.rollout import Permits, RolloutRunner, finish_rollout
from orchestrator.rollouts.rollout_log import FailureLog
from orchestrator.workers.pool import TRAIN, WorkerPool


async def play_episodes(
    pool: WorkerPool,
    gateway: Gateway,
    config: OrchestratorConfig,
    *,
    seed: int,
    tasks: Sequence[int],
    taskset: str = TRAIN,
) -> list[FinishedRollout]:
    """Play an episode for each index in `tasks`, side by side."""
    source = pool.spec.name
    permits = Permits(config.max_concurrent, eval_share=1.0)
    runner = RolloutRunner(config=config, gateway=gateway, pools={source: pool}, permits=permits, seed=seed)

    async def play(number: int, task_index: int) -> FinishedRollout:
        plan = GroupPlan(
            group=number,
            source=source,
            task_index=task_index,
            seed=derive_seed(seed, "try", task_index, tasks[:number].count(task_index)),
            size=1,
        )
        request = msgspec.structs.replace(runner.training_request(plan, 0, 0), taskset=taskset)
        reply, records = await runner.run(source, request, order=number)
        return finish_rollout(plan, reply, records, seed=request.seed or 0)[0]

    with plain_errors():
        async with asyncio.TaskGroup() as group:
            started = [group.create_task(play(number, index)) for number, index in enumerate(tasks)]
    return [task.result() for task in started]


def trial_warnings(rollouts: Sequence[FinishedRollout], notes: Sequence[str] = ()) -> list[str]:
    """Return reasons why such episodes could teach nothing."""
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    rewards = {rollout.reward for rollout in scored}
    warnings = [*notes]
    if len(scored) > 1 and len(rewards) == 1:
        warnings.append(
            f"all {len(scored)} rewards are {rewards.pop():g}: a group of equal rewards has no advantage and trains "
            "nothing; play more episodes (-n), or make the tasks easier or harder for this model"
        )
    if silent := sum(rollout.sampled_tokens == 0 for rollout in scored):
        warnings.append(
            f"in {pluralize(silent, 'episode')} with a reward the model sampled no token: there is nothing to train "
            "on; does the environment ask the model?"
        )
    if cut := sum(rollout.truncated for rollout in scored):
        warnings.append(
            f"{pluralize(cut, 'episode')} ended at a limit of turns or tokens: raise model.max_context, "
            "orchestrator.sampling.max_tokens or the harness's max_turns if that cuts good answers"
        )
    return warnings


async def evaluate(
    config: OrchestratorConfig,
    pools: Mapping[str, WorkerPool],
    gateway: Gateway,
    run_dir: RunDir,
    *,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Play each pool's held-out tasks, and append the rollouts. `on_progress` gets counts."""
    permits = Permits(config.max_concurrent, eval_share=1.0)
    runner = RolloutRunner(config=config, gateway=gateway, pools=pools, permits=permits, seed=seed)
    failures = FailureLog(path=run_dir.failed_rollouts)
    places = held_out_places(config, pools)
    path, count, writing = run_dir.eval_rollouts(0), 0, asyncio.Lock()

    async def write(place: HeldOutPlace, rollout: FinishedRollout) -> None:
        nonlocal count
        async with writing:
            line = rollout_log.rollout_line(0, place[0], rollout, "evaluated")
            await asyncio.to_thread(append_line, path, msgspec.json.encode(line))
        count += 1
        on_progress(count, len(places))

    with plain_errors():
        await play_held_out(runner, failures, places, step=0, version=0, on_end=write)
