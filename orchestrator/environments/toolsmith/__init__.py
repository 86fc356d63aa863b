"""toolsmith: a multi-turn tool-use task set small enough to learn on two CPU cores. Read `episode.py` first.

The plugin class is imported on first use, so `episode.py` imports without verifiers.
"""

from typing import Any

__all__ = ["ToolsmithTaskset"]


def __getattr__(name: str) -> Any:
    if name == "ToolsmithTaskset":
        from orchestrator.environments.toolsmith.taskset import ToolsmithTaskset

        return ToolsmithTaskset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
