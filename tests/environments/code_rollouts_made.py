"""Rollouts of coding tasks in this process, with a scripted inference node on loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from orchestrator.workers.worker import RolloutReply, SourceSpec
from tests.scripted_node import POLICY, TOOL_LOOP, ScriptedNode, played


def source(folder: Path, **taskset: Any) -> SourceSpec:
    settings = {"id": "orchestrator.coding.code", "folder": str(folder), "split": "all"}
    settings["runtime"] = {"type": "subprocess"}
    harness = {"id": TOOL_LOOP, "max_turns": 12}
    return SourceSpec(name="code", tasksets={"train": settings | taskset}, harness=harness, model_path=POLICY)


def play(spec: SourceSpec, texts: list[str], **request: Any) -> tuple[RolloutReply, ScriptedNode]:
    """The first task's rollout with these model replies."""
    return asyncio.run(played(spec, lambda _: texts, **request))
