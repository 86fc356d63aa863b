"""reasoning_gym: procedurally generated reasoning tasks with verified answers, one model turn each."""

from typing import Any

__all__ = ["ReasoningGym"]


def __getattr__(name: str) -> Any:
    if name == "ReasoningGym":
        from orchestrator.environments.reasoning_gym.taskset import ReasoningGym

        return ReasoningGym
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
