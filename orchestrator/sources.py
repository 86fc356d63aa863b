"""Weighted sources of tasks: group number -> (source, task, seed).

The source of group i depends on i and run.seed alone: point i of a golden-ratio sequence falls into the source's share
of [0, 1), so that every stretch of groups holds the sources in proportion to their weights. The task is the
curriculum's choice; the seed is a hash of (run.seed, i).
"""

from __future__ import annotations

import bisect
import functools
import itertools
from typing import Any

from composer_prime.config.orchestrator import OrchestratorConfig, SourceConfig
from composer_prime.errors import EmptyTaskSetError
from orchestrator.curriculum import Curriculum, build_curriculum
from orchestrator.groups import FinishedGroup, GroupPlan, derive_seed
from orchestrator.task_shard import WHOLE, Shard
from orchestrator.workers.protocol import EVAL, TRAIN, SourceSpec

_GOLDEN = 0.6180339887498949


class Sources:
    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        seed: int,
        num_tasks: dict[str, int | None],
        shard: tuple[int, int] = WHOLE,
    ) -> None:
        """`num_tasks`: training tasks by source name, None for an endless set. `shard`: diloco.task_shard.

        Raises EmptyTaskSetError for a source without a task.
        """
        self._seed, self._group_size = seed, config.group_size
        self._names = [source.name for source in config.source]
        total = sum(source.weight for source in config.source)
        self._shares = list(itertools.accumulate(source.weight / total for source in config.source))
        self._offset = derive_seed(seed, "source") / (1 << 31)
        self.curricula: dict[str, Curriculum] = {}
        for name in self._names:
            if num_tasks[name] == 0:
                raise EmptyTaskSetError(
                    f"source {name!r} has an empty task set: check its taskset's settings in [[orchestrator.source]]"
                )
            make = functools.partial(build_curriculum, config.curriculum, seed=derive_seed(seed, "curriculum", name))
            self.curricula[name] = Shard(name, make, num_tasks[name], shard)

    def source_of(self, group: int) -> str:
        """The source that group number `group` draws its task from."""
        point = (self._offset + group * _GOLDEN) % 1.0
        return self._names[min(bisect.bisect_right(self._shares, point), len(self._names) - 1)]

    def plan(self, group: int) -> GroupPlan:
        """The plan of the next group; call it once for each number, in order."""
        source = self.source_of(group)
        return GroupPlan(
            group=group,
            source=source,
            task_index=self.curricula[source].next_task(),
            seed=derive_seed(self._seed, "group", group),
            size=self._group_size,
        )

    def observe(self, group: FinishedGroup) -> None:
        self.curricula[group.plan.source].observe(group)

    def state(self) -> dict[str, Any]:
        return {name: curriculum.state() for name, curriculum in self.curricula.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Sources that the checkpoint does not know start anew."""
        for name, curriculum in self.curricula.items():
            if name in state:
                curriculum.load_state(state[name])


def eval_sources(config: OrchestratorConfig) -> list[SourceConfig]:
    """Sources with held-out tasks, when evaluation is on at all."""
    return [source for source in config.source if source.eval_taskset] if config.eval.every_steps else []


def source_spec(source: SourceConfig, *, model_path: str, renderer: str | None, max_context: int) -> SourceSpec:
    """What the source's worker processes load: the training task set and, merged over it, the held-out one."""
    tasksets = {TRAIN: source.taskset}
    if source.eval_taskset:
        tasksets[EVAL] = {**source.taskset, **source.eval_taskset}
    return SourceSpec(
        name=source.name,
        tasksets=tasksets,
        harness=source.harness,
        model_path=model_path,
        renderer=renderer,
        max_total_tokens=max_context,
    )
