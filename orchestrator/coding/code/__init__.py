"""code: agents that edit a repository in a sandbox, with its tests as the reward.

`task.py` is the format of tasks, `grading.py` decides. The plugin class is imported on first use, so both import
without verifiers.
"""

from orchestrator.environments import on_first_use

__all__ = ["CodeTaskset"]

__getattr__ = on_first_use(__name__, "CodeTaskset", "taskset")
