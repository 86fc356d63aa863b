"""A task set with a tool: the model must look up the price of an item.

    uv run trainer @ examples/own_environment/own.toml

Task data with a `tool_executor()` gets the chat loop with tools; `is_tool_error` marks the answers that hints repair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["PricesTaskset"]

UNKNOWN = "No such item"


class PriceList:
    """The tools of one rollout."""

    def __init__(self, prices: dict[str, int]) -> None:
        self._prices = prices
        parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
        function = {"name": "price", "description": "Returns the price of an item.", "parameters": parameters}
        self.schemas: list[dict[str, Any]] = [{"type": "function", "function": function}]

    async def call(self, name: str, arguments_json: str) -> str:
        found = [price for item, price in self._prices.items() if f'"{item}"' in arguments_json]
        return str(found[0]) if name == "price" and found else UNKNOWN


class PriceData(vf.TaskData):
    prices: dict[str, int]
    answer: str

    def tool_executor(self) -> PriceList:
        return PriceList(self.prices)

    def is_tool_error(self, text: str) -> bool:
        return text == UNKNOWN


class PriceTask(vf.Task[PriceData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class PricesConfig(vf.TasksetConfig):
    split: str = "train"
    num_tasks: int = Field(512, ge=1)


class PricesTaskset(vf.Taskset[PriceTask, PricesConfig]):
    def load(self) -> Iterator[PriceTask]:
        draw = random.Random(self.config.split)
        for _ in range(self.config.num_tasks):
            prices = {str(item): draw.randint(11, 99) for item in draw.sample(range(11, 99), 3)}
            item, price = draw.choice(list(prices.items()))
            data = PriceData(prompt=f"What does {item} cost?", prices=prices, answer=str(price))
            yield PriceTask(data, self.config.task)
