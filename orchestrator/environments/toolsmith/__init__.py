"""toolsmith: a multi-turn tool-use task set small enough to learn on two CPU cores. Read `episode.py` first.

The plugin class is imported on first use, so `episode.py` imports without verifiers.
"""

from orchestrator.environments import on_first_use

__all__ = ["ToolsmithTaskset"]

__getattr__ = on_first_use(__name__, "ToolsmithTaskset", "taskset")
