"""tool_loop: the harness that plays a conversation in this process and runs the task's tools here.

The plugin class is imported on first use, so `renderer.py` imports without verifiers.
"""

from typing import Any

__all__ = ["ToolLoop"]


def __getattr__(name: str) -> Any:
    if name == "ToolLoop":
        from orchestrator.environments.tool_loop.harness import ToolLoop

        return ToolLoop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
