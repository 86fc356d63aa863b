"""A small configuration for a gateway on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_prime.config import Config

MODEL = Path(__file__).parents[2] / "composer_prime" / "assets" / "tiny" / "policy"


def config_with(**sections: dict[str, Any]) -> Config:
    """A small configuration; `sections` are merged into its [inference], [orchestrator] and [model]."""
    values: dict[str, Any] = {
        "run": {"name": "gateway-test"},
        "model": {"path": str(MODEL), "max_context": 512},
        "inference": {"heartbeat_s": 0.1, "lost_after_s": 0.4},
        "orchestrator": {
            "source": [{"name": "s", "taskset": {"id": "orchestrator.environments.toolsmith"}, "timeout_s": 30.0}],
            "sampling": {"max_tokens": 64},
            "no_node_timeout_s": 30.0,
        },
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return Config.model_validate(values)
