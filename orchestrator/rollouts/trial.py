"""Episodes played outside a run, to look at an environment: `composer try`.

play_episodes -> worker -> environment <-> gateway; the tokens are compiled as for training
trial_warnings -> what would make a run learn nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from composer_prime.console import pluralize
from composer_prime.errors import plain_errors
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import FinishedRollout, GroupPlan, derive_seed
from orchestrator.rollouts.rollout import Permits, RequestFactory, RolloutRunner
from orchestrator.rollouts.samples import finish_rollout
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import TRAIN


async def play_episodes(
    *,
    pool: WorkerPool,
    gateway: Gateway,
    requests: RequestFactory,
    tasks: Sequence[int],
    taskset: str = TRAIN,
) -> list[FinishedRollout]:
    """Play one episode for each index in `tasks`, side by side; an index may come more than once.

    Failures are in the result. Raises EnvironmentWorkerError when no worker is left.
    """
    source = pool.spec.name
    permits = Permits(requests.config.max_concurrent, eval_share=1.0)
    runner = RolloutRunner({source: pool}, gateway.records, permits)

    async def play(number: int, task_index: int) -> FinishedRollout:
        plan = GroupPlan(
            group=number,
            source=source,
            task_index=task_index,
            seed=derive_seed(requests.seed, "try", task_index, tasks[:number].count(task_index)),
            size=1,
        )
        request = msgspec.structs.replace(requests.training(plan, 0, 0), taskset=taskset)
        result = await runner.run(source, request, order=number)
        return finish_rollout(plan, result, seed=request.seed or 0)[0]

    with plain_errors():
        async with asyncio.TaskGroup() as group:
            started = [group.create_task(play(number, index)) for number, index in enumerate(tasks)]
    return [task.result() for task in started]


def trial_warnings(rollouts: Sequence[FinishedRollout], overlap: str | None = None) -> list[str]:
    """Return one sentence for each reason why training on such episodes could learn nothing, or the wrong thing.

    `overlap`: the worker's sentence on held-out tasks that are training tasks.
    """
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    rewards = {rollout.reward for rollout in scored}
    warnings = [overlap] if overlap else []
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
