"""code: agents that edit a repository in a sandbox, with its tests as the reward.

`task.py` is the format of tasks, `grading.py` decides. The plugin class is imported on first use, so both import
without verifiers.
"""

from typing import Any

__all__ = ["CodeTaskset"]


def __getattr__(name: str) -> Any:
    if name == "CodeTaskset":
        from orchestrator.environments.code.taskset import CodeTaskset

        return CodeTaskset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
