"""Questions with a final answer, from any file: GSM8K's form and its like. One model turn each, no box.

    taskset = { id = "orchestrator.coding.formats.questions", file = "gsm8k/train.jsonl" }
    eval_taskset = { file = "gsm8k/test.jsonl" }

docs/how-to/task-formats.md says which answers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field

from composer_prime.errors import ConfigError
from orchestrator.coding.formats.conversion import Record, read_records
from orchestrator.environments import Split, split_of
from orchestrator.environments.answers import INSTRUCTIONS, AnswerPlace, OneAnswer, TaskRow, find_answer, same_answer

__all__ = ["Questions"]


class QuestionsConfig(vf.TasksetConfig):
    """Which file, which of its rows, and how its answers are asked for."""

    file: Path
    """A .jsonl or .parquet file with one record a task."""
    split: Split = "train"
    """Training or held-out rows, where `eval_share` is above 0."""
    eval_share: float = Field(0.0, ge=0, lt=1)
    """Share of the rows that is held out; 0 plays all in both."""
    question_field: str = "question"
    """The field with the question."""
    answer_field: str = "answer"
    """The field with the answer: plain, or a solution that ends with `#### answer`."""
    answer_in: AnswerPlace = "tag"
    """The answer's place in the reply: <answer> tags, after ####, the last line, the whole reply, its last number."""
    instruction: str | None = None
    """System prompt. None takes one that asks for `answer_in`; an empty one is left out."""

    def played(self) -> Iterator[Record]:
        is_empty = True
        for record in read_records(self.file):
            if not self.eval_share or split_of(record.text(self.question_field), self.eval_share) == self.split:
                is_empty = False
                yield record
        if is_empty:
            raise ConfigError(
                f"{self.file}: nothing of it is in split {self.split!r} with eval_share = {self.eval_share:g}; change "
                "eval_share, or give the split a file of its own"
            )


class QuestionData(TaskRow):
    """The wire row of a task."""

    answer: str


class QuestionTask(OneAnswer, vf.Task[QuestionData]):
    """Compares the reply's final answer with the expected one."""

    def __init__(self, data: QuestionData, settings: QuestionsConfig) -> None:
        super().__init__(data, settings.task)
        self.answer_in = settings.answer_in

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        answer = self.answer(trace)
        return float(answer is not None and same_answer(answer, self.data.answer))


class Questions(vf.Taskset[QuestionTask, QuestionsConfig]):
    """Task i of a file and split is always the same question."""

    def load(self) -> Iterator[QuestionTask]:
        config = self.config
        system = INSTRUCTIONS[config.answer_in] if config.instruction is None else config.instruction or None
        for record in config.played():
            answer = (find_answer(written := record.text(config.answer_field), "hashes") or written).strip()
            if not answer:
                raise ConfigError(f"{record.place}: {config.answer_field!r} is empty; every record needs an answer")
            question, name = record.text(config.question_field), f"{config.file.stem}-{record.place.rpartition(':')[2]}"
            yield QuestionTask(QuestionData(name=name, prompt=question, system_prompt=system, answer=answer), config)
