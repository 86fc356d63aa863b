"""Conversations to record for fleet_routing: write a function, read what its tests say, write it again.

    composer tasks make toolz==1.2.0 funcy humanize inflection -o tasks/functions --kinds delete --limit 12 \\
      --packages hypothesis,attrs
    trainer @ benchmarks/fleet_routing_sides/repairs.toml
    python -m benchmarks.fleet_routing --traces outputs/repairs --groups 740 --quantum-s 0.02 --seeds 0 1 2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from orchestrator.coding.code.grading import grade
from orchestrator.coding.code.harness import sandbox_failures
from orchestrator.coding.formats.functions import with_reply
from orchestrator.coding.formats.programs import Programs, ProgramTask
from orchestrator.environments.tool_loop.harness import ToolExecutor, ToolLoop

__all__ = ["RepairLoop", "Repairs"]

_REPORT_CHARS = 600


class RepairTask(ProgramTask):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return False

    async def report(self, reply: str) -> str:
        """Return what the tests say about a reply; empty when it solves the task."""
        with sandbox_failures():
            result = await grade(
                self._task, self._settings.trees, with_reply(self._task, reply), self._settings.runtime
            )
        return "" if result.solved else result.report[-_REPORT_CHARS:] or "The tests fail."


_TASKS: dict[str, RepairTask] = {}
"""By name: a harness gets a task's data only."""


class Repairs(Programs):
    def load(self) -> Iterator[ProgramTask]:
        for task in super().load():
            repaired = _TASKS[task.data.name or ""] = RepairTask(task.data, task._settings, task._task)
            yield repaired


class RepairLoop(ToolLoop):
    async def _answers(
        self, trace: vf.Trace, executor: ToolExecutor | None, choice: dict[str, Any]
    ) -> list[dict[str, Any]]:
        report = await _TASKS[trace.task.data.name or ""].report(choice["message"].get("content") or "")
        again = f"The tests say:\n\n{report}\n\nWrite the complete function again."
        return [{"role": "user", "content": again}] if report else []
