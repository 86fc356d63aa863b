"""The work of both trainers in one case, and its episodes.

A plan travels to the child processes as JSON. Everything in it is common to both sides. Each side
chooses what only it knows (threads, ranks, processes).
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from composer_prime.model_source import resolve_model
from orchestrator.environments.toolsmith.taskset import Episode, Split, generate
from orchestrator.rollouts.groups import derive_seed
from orchestrator.tasks import Shuffled

Case = Literal["single-turn", "multi-turn"]
CASES: tuple[Case, ...] = ("single-turn", "multi-turn")
SOURCE = "toolsmith"
"""Name of our run's one source; the order of its tasks depends on it."""
MODEL = "tiny"
BETAS, EPS, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 1.0
"""AdamW and gradient clipping, on both sides."""


@dataclass(frozen=True)
class Plan:
    """One case."""

    case: Case
    steps: int
    """Optimizer steps."""
    groups: int
    """Tasks a step."""
    group_size: int
    """Rollouts of one task."""
    max_tokens: int
    """Tokens of one assistant turn."""
    max_turns: int
    """Assistant turns of one rollout."""
    max_completion: int
    """Everything after the prompt together, tool replies included, in tokens; also dr_grpo's length divisor."""
    max_context: int
    """Longest conversation, prompt included, in tokens."""
    lr: float
    seed: int
    num_tasks: int
    """Training tasks to draw from."""
    max_difficulty: int
    """Most calls that a task needs, 1 to 3."""
    points: tuple[int, ...]
    """Steps whose weights are evaluated afterwards."""
    heldout: int
    """Held-out tasks of each evaluation."""
    cores: tuple[int, ...]
    """CPUs that a side may use."""

    @property
    def rollouts(self) -> int:
        """A step's rollouts."""
        return self.groups * self.group_size

    @cached_property
    def model(self) -> Path:
        return resolve_model(MODEL)

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @staticmethod
    def read(path: Path) -> Plan:
        values = json.loads(path.read_text())
        return Plan(**values | {"points": tuple(values["points"]), "cores": tuple(values["cores"])})


def training_order(plan: Plan) -> list[Episode]:
    """The episodes of all steps, in the order in which our curriculum draws them."""
    draws = Shuffled(num_tasks=plan.num_tasks, seed=derive_seed(plan.seed, "curriculum", SOURCE))
    return [episode_at(plan, draws.next_task(), "train") for _ in range(plan.steps * plan.groups)]


def heldout_episodes(plan: Plan) -> list[Episode]:
    """Questions of the split that neither side trains on."""
    return [episode_at(plan, index, "eval") for index in range(plan.heldout)]


def episode_at(plan: Plan, index: int, split: Split) -> Episode:
    """Task `index` of the toolsmith task set that `plan` means (orchestrator/environments/toolsmith/taskset.py)."""
    rng = random.Random(f"toolsmith/{plan.seed}/{index}")
    difficulty = rng.randint(1, plan.max_difficulty)
    return generate(seed=rng.getrandbits(53), difficulty=difficulty, split=split)
