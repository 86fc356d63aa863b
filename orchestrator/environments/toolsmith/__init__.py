"""toolsmith: a multi-turn tool-use task set small enough to learn on two CPU cores."""

from orchestrator.environments.toolsmith.taskset import ToolsmithTaskset

__all__ = ["ToolsmithTaskset"]
