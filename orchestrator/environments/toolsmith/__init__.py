"""The door of toolsmith: it imports without verifiers, and its names on first use."""

from orchestrator.environments import on_first_use

__all__ = ["ToolsmithTaskset"]

__getattr__ = on_first_use(__name__, "taskset")
