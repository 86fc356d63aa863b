"""tool_loop: the harness that plays a conversation in this process and runs the task's tools here.

`calls.py` holds what a task must offer and how a reply is answered; `harness.py` the loop over the interception
endpoint; `renderer.py` the renderer that keeps broken tool calls visible. The plugin class is resolved on first use,
so that the first and the last of these import without verifiers.
"""

from typing import Any

__all__ = ["ToolLoop"]


def __getattr__(name: str) -> Any:
    if name == "ToolLoop":
        from orchestrator.environments.tool_loop.harness import ToolLoop

        return ToolLoop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
