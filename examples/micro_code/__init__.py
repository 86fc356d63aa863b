"""micro_code: a coding environment small enough to learn on two CPU cores. Read `episode.py` first.

The plugin class is imported on first use, so the other modules import without verifiers.
"""

from orchestrator.environments import on_first_use

__all__ = ["MicroCodeTaskset"]

__getattr__ = on_first_use(__name__, "taskset")
