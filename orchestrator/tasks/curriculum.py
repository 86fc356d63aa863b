"""Which task of a source comes next: the hook, a default and an adaptive one.

`orchestrator.curriculum.import_path` names a curriculum: `shuffled`, `frontier` or `module:Class`. Each source gets
one, built as `Class(num_tasks=…, seed=…, **kwargs)`. Its state is part of every checkpoint. After a crash the journal
replays the calls since then in their order, so a curriculum without randomness of its own continues exactly.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from composer_prime.config.orchestrator import CurriculumConfig
from composer_prime.errors import ConfigError
from composer_prime.import_path import build_part
from orchestrator.rollouts.groups import FinishedGroup, derive_seed

CURRICULA = {
    "shuffled": "orchestrator.tasks.curriculum:Shuffled",
    "frontier": "orchestrator.tasks.curriculum:Frontier",
}
"""By short name."""


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
    """Every task once per epoch, each epoch in its own order.

    Only the draw number decides, so the state is one integer.
    """

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
        """Do nothing: a fixed order learns nothing from results."""

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        self._drawn = int(state["drawn"])


@dataclass(slots=True, kw_only=True, eq=False)
class Frontier:
    """Prefers tasks with an intermediate pass rate: p(1-p) is largest where a group carries most signal.

    A task's weight is 4 p (1 - p), with p the mean of its last `window` group pass rates; an unplayed task counts as
    p = 1/2.

    Of `candidates` tasks drawn uniformly the heaviest is played (ties: the first drawn). So a draw costs the
    same for ten tasks and ten million. With probability `explore` it is any task: what was hard may now be easy.
    """

    num_tasks: int
    seed: int
    window: int = 4
    candidates: int = 8
    explore: float = 0.05
    pass_threshold: float = 1.0
    _drawn: int = field(default=0, init=False)
    _rates: dict[int, deque[float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.candidates < 1 or self.window < 1 or not 0 <= self.explore <= 1:
            raise ConfigError(
                f"orchestrator.curriculum.kwargs: candidates = {self.candidates}, window = {self.window}, "
                f"explore = {self.explore}; candidates and window must be at least 1, explore between 0 and 1"
            )

    def next_task(self) -> int:
        rng = random.Random(derive_seed(self.seed, "frontier", self._drawn))
        self._drawn += 1
        candidates = [rng.randrange(self.num_tasks) for _ in range(self.candidates)]
        if rng.random() < self.explore:
            return candidates[0]
        return max(candidates, key=self._signal)

    def observe(self, group: FinishedGroup) -> None:
        rewards = group.rewards
        if rewards:
            rate = sum(reward >= self.pass_threshold for reward in rewards) / len(rewards)
            task = group.plan.task_index
            self._rates.setdefault(task, deque(maxlen=self.window)).append(rate)

    def _signal(self, task: int) -> float:
        rates = self._rates.get(task, ())
        rate = sum(rates) / len(rates) if rates else 0.5
        return 4 * rate * (1 - rate)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "rates": {str(task): list(rates) for task, rates in self._rates.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        self._rates = {int(task): deque(rates, maxlen=self.window) for task, rates in state["rates"].items()}


def build_curriculum(config: CurriculumConfig, *, num_tasks: int, seed: int) -> Curriculum:
    """Build the curriculum of one source.

    Raises ConfigError when `import_path` names no class, or the class does not take `kwargs`.
    """
    where = f"orchestrator.curriculum.import_path is {config.import_path!r}"
    given = {"num_tasks": num_tasks, "seed": seed}
    curriculum = build_part(config.import_path, config.kwargs, CURRICULA, "orchestrator.curriculum.import_path", given)
    missing = [name for name in ("next_task", "observe", "state", "load_state") if not hasattr(curriculum, name)]
    if missing:
        raise ConfigError(f"{where}; its class lacks {missing}: see orchestrator/tasks/curriculum.py for the protocol")
    return curriculum
