"""One cluster's part of a source's tasks: i, i + n, i + 2n, ... where diloco.task_shard is [i, n].

The curriculum inside knows its part alone, numbered from 0, so any curriculum can be cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from composer_prime.errors import EmptyTaskSetError
from orchestrator.curriculum import Curriculum
from orchestrator.groups import FinishedGroup

logger = logging.getLogger(__name__)
WHOLE = (0, 1)
_KEY = "task_shard"


class Shard:
    """A curriculum over one part (orchestrator/curriculum.py has the protocol); over all tasks where it is WHOLE."""

    def __init__(
        self, source: str, make: Callable[..., Curriculum], num_tasks: int | None, shard: tuple[int, int]
    ) -> None:
        """`make(num_tasks=...)` gives the curriculum of the part.

        Raises EmptyTaskSetError when the part has no task.
        """
        self._source, (self._first, self._every) = source, shard
        if num_tasks is not None and num_tasks <= self._first:
            raise EmptyTaskSetError(
                f"source {source!r} has {num_tasks} training task(s), so part {self._first} of {self._every} "
                f"(diloco.task_shard) has none: use task_shard = [i, n] with n <= {num_tasks}, or more tasks"
            )
        own = None if num_tasks is None else len(range(self._first, num_tasks, self._every))
        self._inner = make(num_tasks=own)

    def next_task(self) -> int:
        return self._first + self._every * self._inner.next_task()

    def observe(self, group: FinishedGroup) -> None:
        own = (group.plan.task_index - self._first) // self._every
        plan = msgspec.structs.replace(group.plan, task_index=own)
        self._inner.observe(msgspec.structs.replace(group, plan=plan))

    def state(self) -> dict[str, Any]:
        whole = (self._first, self._every) == WHOLE
        return self._inner.state() | ({} if whole else {_KEY: [self._first, self._every]})

    def load_state(self, state: dict[str, Any]) -> None:
        """The state of another part, as after a change of task_shard, is left: this part starts anew."""
        if tuple(state.get(_KEY, WHOLE)) != (self._first, self._every):
            logger.warning("source %s: diloco.task_shard has changed, its tasks start anew", self._source)
            return
        self._inner.load_state({name: value for name, value in state.items() if name != _KEY})
