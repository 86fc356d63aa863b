"""micro_code: a coding environment small enough to learn on two CPU cores. Read `episode.py` first.

The plugin class is imported on first use, so the other modules import without verifiers.
"""

from importlib import import_module
from typing import Any

__all__ = ["MicroCodeTaskset"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.taskset"), name)
