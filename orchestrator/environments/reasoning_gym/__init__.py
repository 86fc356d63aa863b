"""reasoning_gym: procedurally generated reasoning tasks with verified answers, one model turn each.

`taskset.py` is the verifiers task set over reasoning-gym's datasets. The plugin class is imported on first use.
"""

from typing import Any

__all__ = ["ReasoningGym"]


def __getattr__(name: str) -> Any:
    if name == "ReasoningGym":
        from orchestrator.environments.reasoning_gym.taskset import ReasoningGym

        return ReasoningGym
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
