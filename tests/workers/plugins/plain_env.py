"""A task set without rewards, ids or names, finite or endless."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class PlainConfig(vf.TasksetConfig):
    endless: bool = False
    raise_at: int | None = None
    """The generator raises instead of making this task."""


class PlainTaskset(vf.Taskset[vf.Task, PlainConfig]):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self) -> Iterator[vf.Task]:
        for index in itertools.count() if self.config.endless else range(2):
            if index == self.config.raise_at:
                raise LookupError("no word list")
            yield vf.Task(vf.TaskData(prompt=f"plain {index}"), self.config.task)


__all__ = ["PlainTaskset"]
