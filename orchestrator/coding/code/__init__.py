"""code: agents that edit a repository in a sandbox, with its tests as the reward.

`grading.py` decides. The plugin class is imported on first use, so grading imports without verifiers.
"""

from orchestrator.environments import on_first_use

__all__ = ["CodeTaskset"]

__getattr__ = on_first_use(__name__, "code_taskset")
