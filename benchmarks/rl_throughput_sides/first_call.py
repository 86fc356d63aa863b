"""The single-turn case as a verifiers task set: toolsmith's prompts, and a reward for the first call only.

The model sees the same tools and questions as in toolsmith. A rollout ends after its first reply (the harness's
max_turns is 1). Importing this module imports verifiers.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from benchmarks.rl_throughput_sides.scoring import call_is_right
from orchestrator.environments.toolsmith.taskset import ToolsmithTask, ToolsmithTaskset

__all__ = ["FirstCallTaskset"]


class FirstCallTask(ToolsmithTask):
    """Scores the first reply: 1.0 where its first call gives the first step's result."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        replies = trace.assistant_messages
        calls = (replies[0].tool_calls if replies else None) or []
        return call_is_right(self.data.tool_executor(), (calls[0].name, calls[0].arguments) if calls else None)


class FirstCallTaskset(ToolsmithTaskset):
    def load(self) -> Iterator[FirstCallTask]:
        for task in super().load():
            yield FirstCallTask(task.data, self.config.task)
