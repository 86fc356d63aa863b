"""The one door of this room: what the rest of the product calls. Task sets are reached by import path instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_prime.config.sandbox import RuntimeConfig


def runtime_settings(table: RuntimeConfig) -> Any:
    """Return verifiers' configuration of a runtime table. Raises ConfigError for settings that it does not have."""
    from orchestrator.coding.sandbox import runtime

    return runtime.runtime_settings(table)


async def make_images(settings: Iterable[Any]) -> None:
    """Copy the Python of bubblewrap runtimes before the first rollout needs it."""
    from orchestrator.coding.sandbox import runtime

    await runtime.make_images(settings)
