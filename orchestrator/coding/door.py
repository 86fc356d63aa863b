"""The one door of this room: what the rest of the product calls. Task sets are reached by import path instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_prime.config.orchestrator import SourceConfig
    from composer_prime.config.sandbox import RuntimeConfig
    from orchestrator.coding.factory.making import TaskMaker
    from orchestrator.tasks.sources import Sources


def runtime_settings(table: RuntimeConfig) -> Any:
    """Return verifiers' configuration of a runtime table. Raises ConfigError for settings that it does not have."""
    from orchestrator.coding.sandbox import runtime

    return runtime.runtime_settings(table)


async def make_images(settings: Iterable[Any]) -> None:
    """Copy the Python of bubblewrap runtimes before the first rollout needs it."""
    from orchestrator.coding.sandbox import runtime

    await runtime.make_images(settings)


def task_makers(configs: Sequence[SourceConfig], sources: Sources, run_dir: Path, *, whole: bool) -> list[TaskMaker]:
    """Return what makes harder tasks during a run, one for each source with a table `making`."""
    if not any(config.making for config in configs):
        return []
    from orchestrator.coding.factory import making

    return making.task_makers(configs, sources, run_dir, whole=whole)
