"""toolsmith as a verifiers task set: ids, splits, reward and metrics. Importing this module imports verifiers."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from orchestrator.environments import Split
from orchestrator.environments.answers import TaskRow
from orchestrator.environments.toolsmith import MAX_DIFFICULTY, MIN_DIFFICULTY, Episode, generate, is_error


class ToolsmithData(TaskRow):
    """The wire row of a task. The whole episode follows from three of its fields."""

    seed: int
    """Seed of the episode."""
    difficulty: int
    """Calls the answer needs, 1 to 3."""
    split: Split
    answer: str
    """The exact right answer."""

    def tool_executor(self) -> Episode:
        return generate(seed=self.seed, difficulty=self.difficulty, split=self.split)

    def is_tool_error(self, text: str) -> bool:
        """Tell whether a tool message reports a failed call."""
        return is_error(text)


class ToolsmithTask(vf.Task[ToolsmithData]):
    """Scores a rollout: 1.0 where the last reply is exactly the answer, else 0.0."""

    @property
    def key(self) -> str:
        return f"toolsmith/{self.data.split}/{self.data.difficulty}/{self.data.seed}"

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def tool_errors(self, trace: vf.Trace) -> float:
        return float(sum(is_error(str(message.content)) for message in trace.tool_messages))

    @vf.metric
    async def turns_used(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class ToolsmithConfig(vf.TasksetConfig):
    """Which episodes load."""

    split: Split = "train"
    """Training questions or held-out ones. The two share none."""
    num_tasks: int = Field(1024, ge=1)
    """Number of tasks."""
    min_difficulty: int = Field(MIN_DIFFICULTY, ge=MIN_DIFFICULTY, le=MAX_DIFFICULTY)
    """Fewest calls a task may need."""
    max_difficulty: int = Field(MAX_DIFFICULTY, ge=MIN_DIFFICULTY, le=MAX_DIFFICULTY)
    """Most calls a task may need."""
    seed: int = 0
    """Draws another set of episodes."""


class ToolsmithTaskset(vf.Taskset[ToolsmithTask, ToolsmithConfig]):
    """Task i of a configuration is always the same episode."""

    def load(self) -> Iterator[ToolsmithTask]:
        config = self.config
        for index in range(config.num_tasks):
            rng = random.Random(f"toolsmith/{config.seed}/{index}")
            difficulty = rng.randint(config.min_difficulty, config.max_difficulty)
            seed = rng.getrandbits(53)
            episode = generate(seed=seed, difficulty=difficulty, split=config.split)
            data = ToolsmithData(
                name=f"toolsmith-{config.split}-{index}",
                prompt=episode.question,
                seed=seed,
                difficulty=difficulty,
                split=config.split,
                answer=episode.answer,
            )
            yield ToolsmithTask(data, config.task)
