"""Weighted sources of tasks: group number -> (source, task, seed).

The source of group i depends only on i and run.seed: point i of a golden-ratio sequence falls into the source's share
of [0, 1). So every stretch of groups holds the sources in proportion to their weights. The curriculum chooses the task;
the seed is a hash of (run.seed, i).

In a joint run each cluster plays its own part of a source's tasks: i, i + n, i + 2n, ... where diloco.task_shard is
[i, n]. The curriculum inside knows only its part, numbered from 0, so any curriculum can be sharded.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.config.orchestrator import OrchestratorConfig, SourceConfig
from composer_prime.errors import EmptyTaskSetError
from orchestrator.rollouts.groups import FinishedGroup, GroupPlan, derive_seed
from orchestrator.tasks.curriculum import Curriculum, build_curriculum
from orchestrator.workers.protocol import EVAL, TRAIN, SourceSpec

logger = logging.getLogger(__name__)

WHOLE = (0, 1)
"""The shard that holds all tasks."""
_SHARD_KEY = "task_shard"
_GOLDEN = 0.6180339887498949


class Sources:
    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        seed: int,
        num_tasks: dict[str, int],
        shard: tuple[int, int] = WHOLE,
    ) -> None:
        """`num_tasks`: training tasks by source name. `shard`: diloco.task_shard.

        Raises EmptyTaskSetError for a source without a task here.
        """
        self._seed = seed
        self._group_size = config.group_size
        self._num_tasks = num_tasks
        trained = [source for source in config.source if source.weight > 0]
        self._names = [source.name for source in trained]
        total = sum(source.weight for source in trained)
        self._shares = list(itertools.accumulate(source.weight / total for source in trained))
        self._offset = derive_seed(seed, "source") / (1 << 31)
        self.curricula: dict[str, TaskShard] = {}
        first, every = shard
        for name in self._names:
            available = num_tasks[name]
            if available == 0:
                raise EmptyTaskSetError(
                    f"source {name!r} has an empty task set: check its taskset's settings in [[orchestrator.source]]"
                )
            if available <= first:
                raise EmptyTaskSetError(
                    f"source {name!r} has {available} training task(s), so part {first} of {every} "
                    f"(diloco.task_shard) has none: use task_shard = [i, n] with n <= {available}, or more tasks"
                )
            part = len(range(first, available, every))
            curriculum_seed = derive_seed(seed, "curriculum", name)
            curriculum = build_curriculum(config.curriculum, num_tasks=part, seed=curriculum_seed)
            self.curricula[name] = TaskShard(name, curriculum, shard)

    def source_of(self, group: int) -> str:
        """Return the source that group number `group` draws its task from."""
        point = (self._offset + group * _GOLDEN) % 1.0
        return self._names[min(bisect.bisect_right(self._shares, point), len(self._names) - 1)]

    def plan(self, group: int) -> GroupPlan:
        """Return the plan of the next group. Call it once for each number, in order."""
        source = self.source_of(group)
        return GroupPlan(
            group=group,
            source=source,
            task_index=self.curricula[source].next_task(),
            seed=derive_seed(self._seed, "group", group),
            size=self._group_size,
        )

    def within(self, plan: GroupPlan) -> GroupPlan:
        """Return `plan` with a task that there is. A set that never ends had more tasks in earlier releases."""
        count = self._num_tasks[plan.source]
        if plan.task_index < count:
            return plan
        index = plan.task_index % count
        logger.warning(
            "group %d plays task %d of source %s in place of task %d: there are %d",
            plan.group, index, plan.source, plan.task_index, count,
        )  # fmt: skip
        return msgspec.structs.replace(plan, task_index=index)

    def observe(self, group: FinishedGroup) -> None:
        self.curricula[group.plan.source].observe(group)

    def state(self) -> dict[str, Any]:
        return {name: curriculum.state() for name, curriculum in self.curricula.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a checkpoint's state. Sources that it lacks start over."""
        for name, curriculum in self.curricula.items():
            if name in state:
                curriculum.load_state(state[name])


class TaskShard:
    """A curriculum over one part of the tasks, or over all of them with WHOLE. Has the methods of Curriculum."""

    def __init__(self, source: str, curriculum: Curriculum, shard: tuple[int, int]) -> None:
        """`curriculum`: knows the part's tasks only."""
        self._source = source
        self.inner = curriculum
        self._first, self._every = shard

    def next_task(self) -> int:
        return self._first + self._every * self.inner.next_task()

    def observe(self, group: FinishedGroup) -> None:
        index_in_part = (group.plan.task_index - self._first) // self._every
        plan = msgspec.structs.replace(group.plan, task_index=index_in_part)
        self.inner.observe(msgspec.structs.replace(group, plan=plan))

    def state(self) -> dict[str, Any]:
        is_whole = (self._first, self._every) == WHOLE
        return self.inner.state() | ({} if is_whole else {_SHARD_KEY: [self._first, self._every]})

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the part's state. The state of another part, after a change of task_shard, is ignored."""
        if tuple(state.get(_SHARD_KEY, WHOLE)) != (self._first, self._every):
            logger.warning("source %s: diloco.task_shard has changed, so its tasks start over", self._source)
            return
        self.inner.load_state({name: value for name, value in state.items() if name != _SHARD_KEY})


def eval_sources(config: OrchestratorConfig) -> list[SourceConfig]:
    """Return the sources with held-out tasks; none when evaluation is off."""
    return [source for source in config.source if source.eval_taskset] if config.eval.every_steps else []


def source_spec(
    source: SourceConfig,
    *,
    model_path: str,
    renderer: str | None,
    max_context: int,
    import_from: Sequence[Path] = (),
) -> SourceSpec:
    """Return what the source's worker processes load: the training task set and, merged over it, the held-out one."""
    tasksets = {TRAIN: source.taskset}
    if source.eval_taskset:
        tasksets[EVAL] = {**source.taskset, **source.eval_taskset}
    return SourceSpec(
        name=source.name,
        tasksets=tasksets,
        harness=source.harness,
        runtime=source.runtime.model_dump(mode="json", exclude_defaults=True),
        model_path=model_path,
        renderer=renderer,
        max_total_tokens=max_context,
        import_from=[str(folder) for folder in import_from],
    )
