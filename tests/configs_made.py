"""The smallest configuration of a run, with changes."""

from typing import Any

from composer_prime.config import Config


def config_of(**sections: dict[str, Any]) -> Config:
    """Each section's keys replace or join those of the smallest configuration."""
    values: dict[str, Any] = {
        "run": {"name": "one", "max_steps": 4},
        "model": {"path": "tiny", "max_context": 512},
        "orchestrator": {"source": [{"name": "s", "taskset": {"id": "x"}}], "sampling": {"max_tokens": 64}},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.model_validate(values)
