"""Episodes of one model outside a run, by which `composer try` looks at an environment.

play_episodes -> worker -> environment <-> gateway; the tokens are compiled as for training
trial_warnings -> what would make a run learn nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.console import pluralize
from composer_prime.errors import plain_errors
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import FinishedRollout, GroupPlan, derive_seed
from orchestrator.rollouts.rollout import Permits, RolloutRunner, finish_rollout
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
