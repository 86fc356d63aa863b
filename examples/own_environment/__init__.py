"""A task set with one tool: the model must add two numbers by calling `plus`.

    uv run trainer @ examples/own_environment/own.toml

Task data with a `tool_executor()` gets the chat loop with tools; `is_tool_error` marks the answers that hints repair.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["SumsTaskset"]

WRONG_CALL = "Wrong call"
NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"left": NUMBER, "right": NUMBER}, "required": ["left", "right"]}
FUNCTION = {"name": "plus", "description": "Adds two numbers.", "parameters": PARAMETERS}


class Adder:
    """The tools of one rollout."""

    schemas: list[dict[str, Any]] = [{"type": "function", "function": FUNCTION}]  # noqa: RUF012

    async def call(self, name: str, arguments_json: str) -> str:
        try:
            arguments = json.loads(arguments_json)
            return str(arguments["left"] + arguments["right"]) if name == "plus" else WRONG_CALL
        except (ValueError, KeyError, TypeError):
            return WRONG_CALL


class SumData(vf.TaskData):
    answer: str

    def tool_executor(self) -> Adder:
        return Adder()

    def is_tool_error(self, text: str) -> bool:
        return text == WRONG_CALL


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    split: str = "train"
    num_tasks: int = Field(512, ge=1)


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        draw = random.Random(self.config.split)
        for _ in range(self.config.num_tasks):
            left, right = draw.randint(11, 99), draw.randint(2, 99)
            yield SumTask(SumData(prompt=f"Add {left} and {right}.", answer=str(left + right)), self.config.task)
