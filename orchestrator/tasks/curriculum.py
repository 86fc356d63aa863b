"""Which task of a source comes next: the hook, a default and an adaptive one.

`orchestrator.curriculum.import_path` names a curriculum: `shuffled`, `frontier` or `module:Class`. Each source gets
one, built as `Class(num_tasks=…, seed=…, **kwargs)`, with `difficulty=…` where it takes that. Its state is part of
every checkpoint. After a crash the journal replays the calls since then in their order, so a curriculum
without randomness of its own continues exactly.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from composer_prime.config.orchestrator import CurriculumConfig
from composer_prime.errors import ConfigError
from composer_prime.import_path import build_part
from orchestrator.rollouts.groups import FinishedGroup, derive_seed
from orchestrator.tasks.difficulty import DifficultyModel

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

    Only the draw number decides, so the state is one integer. An endless task set (`num_tasks` None) goes in order.
    """

    num_tasks: int | None
    seed: int
    _drawn: int = field(default=0, init=False)
    _epoch: int = field(default=-1, init=False)
    _order: list[int] = field(default_factory=list, init=False)

    def next_task(self) -> int:
        draw = self._drawn
        self._drawn += 1
        if self.num_tasks is None:
            return draw
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
    p = 1/2. For a task with an estimate of its difficulty, the rate that is expected of it (`difficulty.py`) counts as
    one more group. So harder tasks come in as easier ones become sure, and wait while those fail.

    Of `candidates` tasks drawn uniformly the heaviest is played (ties: the first drawn). So a draw costs the
    same for ten tasks and ten million. With probability `explore` it is any task: what was hard may now be easy.
    """

    num_tasks: int | None
    seed: int
    window: int = 4
    candidates: int = 8
    explore: float = 0.05
    pass_threshold: float = 1.0
    difficulty: Sequence[float | None] = ()
    """Estimates in [0, 1] by task. None for a task without one; empty if no task has one."""
    _drawn: int = field(default=0, init=False)
    _rates: dict[int, deque[float]] = field(default_factory=dict, init=False)
    _expected: DifficultyModel = field(default_factory=DifficultyModel, init=False)

    def __post_init__(self) -> None:
        if self.num_tasks is None:
            raise ConfigError(
                "orchestrator.curriculum is Frontier, which returns to tasks, but the task set never ends: "
                "limit the task set or use shuffled"
            )
        if self.candidates < 1 or self.window < 1 or not 0 <= self.explore <= 1:
            raise ConfigError(
                f"orchestrator.curriculum.kwargs: candidates = {self.candidates}, window = {self.window}, "
                f"explore = {self.explore}; candidates and window must be at least 1, explore between 0 and 1"
            )

    def next_task(self) -> int:
        rng = random.Random(derive_seed(self.seed, "frontier", self._drawn))
        self._drawn += 1
        assert self.num_tasks is not None
        candidates = [rng.randrange(self.num_tasks) for _ in range(self.candidates)]
        if rng.random() < self.explore:
            return candidates[0]
        return max(candidates, key=self._signal)

    def observe(self, group: FinishedGroup) -> None:
        rewards = group.task_rewards
        if rewards:
            rate = sum(reward >= self.pass_threshold for reward in rewards) / len(rewards)
            task = group.plan.task_index
            self._rates.setdefault(task, deque(maxlen=self.window)).append(rate)
            if (difficulty := self._difficulty_of(task)) is not None:
                self._expected.observe(difficulty, rate)

    @property
    def _count(self) -> int:
        assert self.num_tasks is not None  # An endless set is refused.
        return self.num_tasks

    def _difficulty_of(self, task: int) -> float | None:
        return self.difficulty[task] if task < len(self.difficulty) else None

    def _signal(self, task: int) -> float:
        rate = self._rate(task)
        return 4 * rate * (1 - rate)

    def _rate(self, task: int) -> float:
        """Return the pass rate of a task, played or expected; 1/2 where nothing is known."""
        rates = list(self._rates.get(task, ()))
        difficulty = self._difficulty_of(task)
        if difficulty is not None:
            rates.append(self._expected.pass_rate(difficulty))
        return sum(rates) / len(rates) if rates else 0.5

    def state(self) -> dict[str, Any]:
        state = {"drawn": self._drawn, "rates": {str(task): list(rates) for task, rates in self._rates.items()}}
        return state | {"expected": [self._expected.played, self._expected.passed]}

    def load_state(self, state: dict[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        self._rates = {int(task): deque(rates, maxlen=self.window) for task, rates in state["rates"].items()}
        self._expected = DifficultyModel(*state["expected"])


def build_curriculum(
    config: CurriculumConfig, *, num_tasks: int | None, seed: int, difficulty: Sequence[float | None] = ()
) -> Curriculum:
    """Build the curriculum of one source. `difficulty`: estimates by task, for a class that takes them.

    Raises ConfigError when `import_path` names no class, or the class does not take `kwargs`.
    """
    where = f"orchestrator.curriculum.import_path is {config.import_path!r}"
    given = {"num_tasks": num_tasks, "seed": seed, "difficulty": difficulty}
    curriculum = build_part(config.import_path, config.kwargs, CURRICULA, "orchestrator.curriculum.import_path", given)
    missing = [name for name in ("next_task", "observe", "state", "load_state") if not hasattr(curriculum, name)]
    if missing:
        raise ConfigError(f"{where}; its class lacks {missing}: see orchestrator/tasks/curriculum.py for the protocol")
    return curriculum
