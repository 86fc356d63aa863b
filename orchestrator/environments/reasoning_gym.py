"""reasoning-gym's datasets as a verifiers task set: generated reasoning tasks, one model turn each.

    taskset = { id = "orchestrator.environments.reasoning_gym", datasets = { chain_sum = { max_terms = 3 } } }

A generator often draws the same question twice, so neither another seed nor another range of indices separates two
sets: the question's own hash decides the split.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, field_validator

from composer_prime.console import did_you_mean
from composer_prime.errors import ConfigError
from orchestrator.environments import Split, split_of
from orchestrator.environments.answers import INSTRUCTIONS, AnswerPlace, OneAnswer, TaskRow

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # From a dependency's source, at its first import.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

__all__ = ["ReasoningGym"]

logger = logging.getLogger(__name__)

_TRIES_PER_TASK = 200
_ANSWER_CHARS = 2000
"""A longer answer scores 0: some scorers take long for what a model may write."""


class ReasoningGymConfig(vf.TasksetConfig):
    """Which tasks load."""

    datasets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """reasoning-gym datasets and their settings; the tasks alternate. A list of names or one name works too."""
    split: Split = "train"
    """Training or held-out questions. The two share none, whatever their seeds."""
    num_tasks: int = Field(1024, ge=1)
    """Number of tasks, over all datasets."""
    seed: int = 0
    """Seed of the generators."""
    eval_share: float = Field(0.1, gt=0, lt=1)
    """Share of all questions that is held out."""
    answer_in: AnswerPlace = "tag"
    """The answer's place in the reply: between <answer> tags, on the last line, the whole reply, or its last number."""
    instruction: str | None = None
    """System prompt. None takes one that asks for `answer_in`; an empty one is left out."""

    @field_validator("datasets", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        return {name: {} for name in value} if isinstance(value, list | tuple) else value

    @field_validator("datasets")
    @classmethod
    def _known(cls, datasets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in datasets:
            if name not in DATASETS:
                hint = did_you_mean(name, DATASETS) or f"; it has {', '.join(sorted(DATASETS))}"
                raise ValueError(f"reasoning_gym has no dataset {name!r}{hint}")
        return datasets


class ReasoningGymData(TaskRow):
    dataset: str
    answer: str | None
    """None where only the dataset's scorer can judge one."""


class ReasoningGymTask(OneAnswer, vf.Task[ReasoningGymData]):
    """Scores the reply with the dataset that made the question."""

    def __init__(
        self, data: ReasoningGymData, settings: ReasoningGymConfig, *, dataset: Any, entry: dict[str, Any]
    ) -> None:
        super().__init__(data, settings.task)
        self.answer_in = settings.answer_in
        self._dataset = dataset
        self._entry = entry

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        answer = self.answer(trace)
        if answer is not None and len(answer) > _ANSWER_CHARS:
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, self._entry))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError):
            # The entry is reasoning-gym's own, so this answer could not be parsed, and is wrong. Dropping it would
            # teach the policy how to avoid the loss.
            logger.info("%s: its scorer failed on %r", self.data.name, answer, exc_info=True)
            return 0.0


class ReasoningGym(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):
    """Task i of a configuration is always the same question."""

    def load(self) -> Iterator[ReasoningGymTask]:
        config = self.config
        names = list(config.datasets)
        counts = [len(range(place, config.num_tasks, len(names))) for place in range(len(names))]
        streams = [self._stream(name, count) for name, count in zip(names, counts, strict=True) if count]
        for index in range(config.num_tasks if names else 0):
            yield next(streams[index % len(streams)])

    def _stream(self, name: str, count: int) -> Iterator[ReasoningGymTask]:
        """Raise ConfigError when the dataset has too few questions of the split."""
        config = self.config
        try:
            dataset = reasoning_gym.create_dataset(name, **{"seed": config.seed, **config.datasets[name]})
        except (AssertionError, TypeError, ValueError) as error:
            settings = ", ".join(field.name for field in dataclasses.fields(DATASETS[name][1]))
            raise ConfigError(
                f"reasoning_gym: {name} does not take {config.datasets[name]}: {error}; its settings are {settings}"
            ) from error
        system = INSTRUCTIONS[config.answer_in] if config.instruction is None else config.instruction or None
        tries = count * _TRIES_PER_TASK
        entries = (dataset[index] for index in range(tries))
        of_split = (entry for entry in entries if split_of(entry["question"], config.eval_share) == config.split)
        index = -1
        for index, entry in enumerate(itertools.islice(of_split, count)):
            data = ReasoningGymData(
                name=f"{name}-{config.split}-{index}",
                prompt=entry["question"],
                system_prompt=system,
                dataset=name,
                answer=None if entry["answer"] is None else str(entry["answer"]),
            )
            yield ReasoningGymTask(data, config, dataset=dataset, entry=entry)
        if index + 1 < count:
            raise ConfigError(
                f"reasoning_gym: {name} gave {index + 1} of {count} {config.split} tasks in {tries} tries: it has too "
                "few different questions. Ask for fewer tasks, widen its settings, or change eval_share (now "
                f"{config.eval_share:g})"
            )
