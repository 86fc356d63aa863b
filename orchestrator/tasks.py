"""Which task comes next: group number -> (source, task, seed).

The source of group i depends on i and run.seed: point i of a golden-ratio sequence falls into its share of [0, 1).

Each source's curriculum chooses the task (`orchestrator.curriculum`), made as `Class(num_tasks=…, seed=…, **settings)`.
After a crash the journal replays its calls in their order.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from composer_prime.config import Config
from composer_prime.config.orchestrator import OrchestratorConfig, SourceConfig
from composer_prime.errors import ConfigError
from composer_prime.import_path import PartConfig, build_part
from composer_prime.stats.intervals import PASSED
from orchestrator.rollouts.groups import FinishedGroup, GroupPlan, derive_seed
from orchestrator.workers.pool import EVAL, TRAIN, SourceSpec, WorkerPool

logger = logging.getLogger(__name__)

CURRICULA = {"shuffled": "orchestrator.tasks:Shuffled", "frontier": "orchestrator.tasks:Frontier"}
"""Curricula by short name."""
_GOLDEN = 0.6180339887498949
_WINDOW, _CANDIDATES, _EXPLORE = 4, 8, 0.05
"""Of the frontier: pass rates that count, tasks that are compared, and the share of draws that take any."""


class Sources:
    """The weighted sources of training tasks."""

    def __init__(self, config: OrchestratorConfig, *, seed: int, num_tasks: dict[str, int]) -> None:
        """`num_tasks`: by source. Raises ConfigError for a source without a training task."""
        self._seed = seed
        self._group_size = config.group_size
        trained = [source for source in config.source if source.weight > 0]
        self._names = [source.name for source in trained]
        total = sum(source.weight for source in trained)
        self._shares = list(itertools.accumulate(source.weight / total for source in trained))
        self._offset = derive_seed(seed, "source") / (1 << 31)
        self.next_group = 0
        """Of the next new one."""
        self.again: list[GroupPlan] = []
        """That a crash cut short, to be dispatched again."""
        self.curricula: dict[str, Curriculum] = {}
        """By source."""
        for name in self._names:
            if num_tasks[name] == 0:
                raise ConfigError(f"source {name!r} has 0 training tasks: change its taskset, or set weight = 0")
            curriculum_seed = derive_seed(seed, "curriculum", name)
            self.curricula[name] = build_curriculum(config.curriculum, num_tasks=num_tasks[name], seed=curriculum_seed)

    def source_of(self, group: int) -> str:
        point = (self._offset + group * _GOLDEN) % 1.0
        return self._names[min(bisect.bisect_right(self._shares, point), len(self._names) - 1)]

    def next(self) -> tuple[GroupPlan, bool]:
        """Return the next group's plan, and whether it is new."""
        if self.again:
            return self.again.pop(0), False
        plan = self.plan(self.next_group)
        self.next_group += 1
        return plan, True

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

    def observe(self, group: FinishedGroup) -> None:
        self.curricula[group.plan.source].observe(group)

    def state(self) -> dict[str, Any]:
        """Return the curricula's states by source."""
        return {name: curriculum.state() for name, curriculum in self.curricula.items()}

    def load_state(self, states: dict[str, Any]) -> None:
        """Sources start over that the state lacks, or of which it has only a part's (the former diloco.task_shard)."""
        for name, state in states.items():
            if "task_shard" in state:
                logger.warning("source %s: diloco.task_shard was removed, so its tasks start over", name)
            elif name in self.curricula:
                self.curricula[name].load_state(state)


class Curriculum(Protocol):
    """Called from the event loop: each call must be quick."""

    def next_task(self) -> int:
        """Return the index of the task that the next group plays, in [0, num_tasks)."""
        ...

    def observe(self, group: FinishedGroup) -> None:
        """Take in a group of this source that ended, with any outcome; `group.plan.task_index` is its task."""

    def state(self) -> dict[str, Any]:
        """Return everything that `load_state` needs, as plain JSON values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Shuffled:
    """Every task once an epoch, each in its own order."""

    num_tasks: int
    seed: int
    _drawn: int = field(default=0, init=False)
    _epoch: int = field(default=-1, init=False)
    _order: list[int] = field(default_factory=list, init=False)

    def next_task(self) -> int:
        draw = self._drawn
        self._drawn += 1
        epoch, position = divmod(draw, self.num_tasks)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(self.num_tasks))
            random.Random(derive_seed(self.seed, "epoch", epoch)).shuffle(self._order)
        return self._order[position]

    def observe(self, group: FinishedGroup) -> None:
        """A fixed order learns nothing."""

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        self._drawn = int(state["drawn"])


@dataclass(slots=True, kw_only=True, eq=False)
class Frontier:
    """Prefers tasks with an intermediate pass rate: p(1-p) is largest where a group carries most signal.

    p is the mean of a task's last group pass rates, 1/2 for an unplayed one. Of some tasks drawn uniformly the one with
    the largest 4p(1-p) is played; with probability _EXPLORE it is any.
    """

    num_tasks: int
    seed: int
    _drawn: int = field(default=0, init=False)
    _rates: dict[int, deque[float]] = field(default_factory=dict, init=False)

    def next_task(self) -> int:
        rng = random.Random(derive_seed(self.seed, "frontier", self._drawn))
        self._drawn += 1
        candidates = [rng.randrange(self.num_tasks) for _ in range(_CANDIDATES)]
        return candidates[0] if rng.random() < _EXPLORE else max(candidates, key=self._signal)

    def observe(self, group: FinishedGroup) -> None:
        rewards = group.rewards
        if rewards:
            rate = sum(reward >= PASSED for reward in rewards) / len(rewards)
            task = group.plan.task_index
            self._rates.setdefault(task, deque(maxlen=_WINDOW)).append(rate)

    def _signal(self, task: int) -> float:
        rates = self._rates.get(task, ())
        rate = sum(rates) / len(rates) if rates else 0.5
        return 4 * rate * (1 - rate)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "rates": {str(task): list(rates) for task, rates in self._rates.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        self._rates = {int(task): deque(rates, maxlen=_WINDOW) for task, rates in state["rates"].items()}


def build_curriculum(part: PartConfig, *, num_tasks: int, seed: int) -> Curriculum:
    """Build a source's curriculum. Raises ConfigError for a class that does not fit."""
    key, given = "orchestrator.curriculum", {"num_tasks": num_tasks, "seed": seed}
    curriculum = build_part(part.name, part.settings, CURRICULA, key, given)
    missing = [name for name in ("next_task", "observe", "state", "load_state") if not hasattr(curriculum, name)]
    if missing:
        raise ConfigError(
            f"{key} is {part.name!r}; its class lacks {missing}: see orchestrator/tasks.py for the protocol"
        )
    return curriculum


def worker_pools(config: Config, model_dir: Path, logs: Path) -> dict[str, WorkerPool]:
    """Return the workers of each source, not started."""
    return {
        source.name: WorkerPool(
            source_spec(source, config, model_dir),
            workers=source.workers,
            hang_timeout_s=source.longest_stall_s,
            log_dir=logs,
        )
        for source in config.orchestrator.source
    }


def source_spec(source: SourceConfig, config: Config, model_dir: Path) -> SourceSpec:
    """Return what the source's worker processes load."""
    tasksets = {TRAIN: source.taskset}
    if source.eval_taskset:
        tasksets[EVAL] = {**source.taskset, **source.eval_taskset}
    return SourceSpec(
        name=source.name,
        tasksets=tasksets,
        harness=source.harness,
        runtime=source.runtime.model_dump(mode="json", exclude_defaults=True),
        model_path=str(model_dir),
        renderer=config.model.renderer,
        max_total_tokens=config.model.max_context,
        import_from=[str(folder) for folder in config.run.import_from],
    )
