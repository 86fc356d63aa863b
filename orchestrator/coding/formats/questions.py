"""Questions with a final answer, from any file: GSM8K's form and its like. One model turn each, no box.

    taskset = { id = "orchestrator.coding.formats.questions", file = "gsm8k/train.jsonl" }
    eval_taskset = { file = "gsm8k/test.jsonl" }

A record has a question and an answer. Of an answer with `####`, as GSM8K has it, what follows the last `####` counts.
Numbers are compared as numbers: "$1,200.00" is "1200". With one file for both, `eval_share` holds questions out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field

from composer_prime.errors import ConfigError, EmptyTaskSetError
from orchestrator.coding.formats.records import read_records
from orchestrator.environments.answers import (
    INSTRUCTIONS,
    AnswerPlace,
    Split,
    find_answer,
    same_answer,
    split_of,
)
from orchestrator.environments.task_row import OneAnswer, TaskRow

__all__ = ["Questions"]


class QuestionsConfig(vf.TasksetConfig):
    """Which file, and how its answers are asked for."""

    file: Path
    """A .jsonl, .jsonl.gz, .json or .parquet file with one record a task."""
    question_field: str = "question"
    """The field with the question."""
    answer_field: str = "answer"
    """The field with the answer: plain, or a solution that ends with `#### answer`."""
    split: Split = "train"
    """Training or held-out questions, where `eval_share` is above 0."""
    eval_share: float = Field(0.0, ge=0, lt=1)
    """Share of the questions that is held out; 0 plays all of the file in both."""
    num_tasks: int | None = Field(None, ge=1)
    """Play only this many tasks, the first ones; None plays all."""
    answer_in: AnswerPlace = "tag"
    """The answer's place in the reply: <answer> tags, after ####, the last line, the whole reply, its last number."""
    instruction: str | None = None
    """System prompt. None takes one that asks for `answer_in`; an empty one is left out."""
    max_answer_chars: int = Field(2000, ge=1)
    """A longer answer scores 0."""


class QuestionData(TaskRow):
    """The wire row of a task."""

    answer: str
    """The expected final answer."""


class QuestionTask(OneAnswer, vf.Task[QuestionData]):
    """Compares the reply's final answer with the expected one."""

    def __init__(self, data: QuestionData, settings: QuestionsConfig) -> None:
        super().__init__(data, settings.task)
        self._settings = settings
        self.answer_in = settings.answer_in

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        answer = self.answer(trace)
        if answer is None or len(answer) > self._settings.max_answer_chars:
            return 0.0
        return float(same_answer(answer, self.data.answer))


class Questions(vf.Taskset[QuestionTask, QuestionsConfig]):
    """Task i of a file and split is always the same question."""

    def load(self) -> Iterator[QuestionTask]:
        """Raises ConfigError for a file that cannot be read, EmptyTaskSetError for a split without a question."""
        config = self.config
        system = INSTRUCTIONS[config.answer_in] if config.instruction is None else config.instruction or None
        count = 0
        for record in read_records(config.file):
            question = record.text(config.question_field)
            if config.eval_share and split_of(question, config.eval_share) != config.split:
                continue
            answer = (find_answer(written := record.text(config.answer_field), "hashes") or written).strip()
            if not answer:
                raise ConfigError(f"{record.place}: {config.answer_field!r} is empty; every record needs an answer")
            name = f"{config.file.stem}-{record.place.rpartition(':')[2]}"
            yield QuestionTask(QuestionData(name=name, prompt=question, system_prompt=system, answer=answer), config)
            count += 1
            if count == config.num_tasks:
                return
        if not count:
            raise EmptyTaskSetError(
                f"{config.file}: no question of it is in split {config.split!r} with eval_share = "
                f"{config.eval_share:g}; change eval_share, or give the split a file of its own"
            )
