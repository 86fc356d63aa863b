"""A policy that says what a script says, so that a test can play a source's tasks through verifiers over loopback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.workers.pool import RolloutReply, SourceSpec
from tests.scripted_node import POLICY, RENDERER, TOOL_LOOP, played

ONE_TURN = {"id": TOOL_LOOP, "max_turns": 1}


def source_spec_of(taskset: dict[str, Any], harness: dict[str, Any] = ONE_TURN, **more: Any) -> SourceSpec:
    return SourceSpec(
        name="tasks", tasksets={"train": taskset}, harness=harness, model_path=POLICY, renderer=RENDERER, **more
    )


async def play(spec: SourceSpec, script: Callable[[str], Sequence[str]], *, task_index: int = 0) -> RolloutReply:
    """Play one task. `script` makes the policy's replies from the task's id."""
    return (await played(spec, script, task_index=task_index))[0]
