"""Which settings a resumed run may change, and which would make it another run."""

from __future__ import annotations

from typing import Any

from composer_prime.config import Config
from composer_prime.errors import ConfigError

BINDING = (
    "model.path",
    "model.max_context",
    "model.chat_template",
    "model.renderer",
    "run.seed",
    "orchestrator.source",
    "orchestrator.group_size",
    "orchestrator.groups_per_step",
    "orchestrator.curriculum",
    "channels.policy.objective",
    "trainer.optim.type",
    "trainer.lora",
)
"""Saved state (cursor, journal, optimizer moments) is only meaningful under the same value of these keys."""

NOT_LOWER = ("orchestrator.max_staleness", "trainer.micro_batch_tokens")
"""Batches that were formed before the crash are served again as they were, and must still be allowed."""

_FREE_IN_SOURCES = ("workers", "timeout_s", "eval_taskset")
_SILENT = ("run.resume", "run.overwrite", "run.output_dir")


def check_continuation(before: Config, now: Config) -> list[str]:
    """One note for each allowed change. Raises ConfigError naming both values of every change that is not allowed."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    broken = []
    for key in BINDING:
        was, is_now = _bare(_value(old, key)), _bare(_value(new, key))
        if was != is_now:
            broken += _differences(key, was, is_now)
    for key in NOT_LOWER:
        was, is_now = _value(old, key), _value(new, key)
        if is_now < was:
            broken += [f"{line} (batches formed under it must still fit)" for line in _differences(key, was, is_now)]
    if broken:
        listed = "\n".join(f"  {line}" for line in broken)
        raise ConfigError(
            "--resume cannot continue this run, because its saved state was made under other settings:\n"
            f"{listed}\n"
            f"set {'it' if len(broken) == 1 else 'them'} back, or start a new run under another run.name"
        )
    return [f"changed {line}" for line in _differences("", old, new) if not line.startswith(_SILENT)]


def _value(values: dict[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _bare(value: Any) -> Any:
    """Sources without the settings that may change between starts."""
    if isinstance(value, list):
        return [
            {name: part for name, part in item.items() if name not in _FREE_IN_SOURCES}
            if isinstance(item, dict)
            else item
            for item in value
        ]
    return value


def _differences(key: str, was: Any, is_now: Any) -> list[str]:
    """`setting: was X, now Y` for each setting at or below `key` that is not the same."""
    if was == is_now:
        return []
    if isinstance(was, dict) and isinstance(is_now, dict):
        lines = []
        for name in sorted(was.keys() | is_now.keys()):
            lines += _differences(f"{key}.{name}" if key else name, was.get(name), is_now.get(name))
        return lines
    if isinstance(was, list) and isinstance(is_now, list) and len(was) == len(is_now):
        lines = []
        for index, (one, other) in enumerate(zip(was, is_now, strict=True)):
            lines += _differences(f"{key}.{index}", one, other)
        return lines
    return [f"{key}: was {was!r}, now {is_now!r}"]
