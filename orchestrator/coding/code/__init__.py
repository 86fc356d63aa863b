"""code: agents that edit a repository in a sandbox, with its tests as the reward.

`grading.py` decides. The plugin class is imported on first use, so grading imports without verifiers.
"""

from typing import Any

__all__ = ["CodeTaskset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestrator.coding.code import code_taskset

    return getattr(code_taskset, name)
