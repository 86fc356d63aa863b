"""Overrides of one element of a list or one entry of a free table: `--orchestrator.source.0.taskset.num_tasks 64`.

pydantic_config replaces a list whole or not at all. So each such override is applied to the list as the files give it,
and the outcome is handed on as one JSON value.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from composer_prime.config.overlays import Overlay
from composer_prime.errors import ConfigError
from composer_prime.wording import counted


def fold_elements(words: list[str], overlays: list[Overlay]) -> list[str]:
    """`words` with every override through a list position replaced by one JSON override of the whole list."""
    kept: list[str] = []
    lists: dict[str, list[Any]] = {}
    index = 0
    while index < len(words):
        flag, equals, value = words[index].partition("=")
        position = _position(flag)
        if position is None:
            kept.append(words[index])
            index += 1
            continue
        if not equals:
            index += 1
            if index == len(words) or words[index].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            value = words[index]
        keys = flag[2:].replace("-", "_").split(".")
        name = ".".join(keys[:position])
        if name not in lists:
            lists[name] = _current(keys[:position], overlays, flag)
        _assign(lists[name], keys[position:], _literal(value), flag)
        index += 1
    for name, elements in lists.items():
        kept += [f"--{name.replace('_', '-')}", json.dumps(elements)]
    return kept


def _position(flag: str) -> int | None:
    """Where the first list position stands among the flag's segments."""
    if not flag.startswith("--"):
        return None
    segments = flag[2:].split(".")
    return next((index for index, segment in enumerate(segments) if index and segment.isdigit()), None)


def _current(keys: list[str], overlays: list[Overlay], flag: str) -> list[Any]:
    """A copy of the list at `keys` as the last file that sets it gives it."""
    for overlay in reversed(overlays):
        if overlay.holds(tuple(keys)):
            node: Any = overlay.values
            for key in keys:
                node = node[key]
            if isinstance(node, list):
                return copy.deepcopy(node)
            raise ConfigError(f"{flag}: {'.'.join(keys)} is no list in {overlay.origin}")
    raise ConfigError(f"{flag}: no configuration file sets the list {'.'.join(keys)}, so it has no element to override")


def _assign(elements: list[Any], keys: list[str], value: Any, flag: str) -> None:
    position = int(keys[0])
    if position >= len(elements):
        held = counted(len(elements), "element")
        raise ConfigError(f"{flag}: the list has {held}, counted from 0, so none at {position}")
    if len(keys) == 1:
        elements[position] = value
        return
    node = elements[position]
    for key in keys[1:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError(f"{flag} goes through a value that is no table")
    node[keys[-1]] = value


def _literal(text: str) -> Any:
    """A command-line word as the value TOML would make of it; anything else stays text."""
    if text == "None":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
