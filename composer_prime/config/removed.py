"""Keys and modules that earlier releases had, and what holds now.

In a TOML file or a flag such a key is an error that names what holds now. In the config.json of an older run it is left
out with a warning, so that the run can be read, shown and resumed.
"""

from __future__ import annotations

import functools
import logging
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

REMOVED: dict[str, str] = tomllib.loads(Path(__file__).with_name("removed_keys.toml").read_text())
"""By dotted key: what holds now. An entry that is added here is a line of removed_keys.toml."""
MOVED = {
    "orchestrator.environments.code": "orchestrator.coding.code",
    "orchestrator.environments.formats": "orchestrator.coding.formats",
    "orchestrator.environments.micro_code": "examples.micro_code",
    "orchestrator.coding.micro_code": "examples.micro_code",
}
"""Former name of a package that configurations name -> its present name. What lies below it moved with it."""
_SHOWN = 6


@functools.cache
def present_name(module: str) -> str:
    """Return the present name of a module. Warn once about a former one."""
    for former, present in MOVED.items():
        if module == former or module.startswith(f"{former}."):
            name = present + module.removeprefix(former)
            logger.warning("the module %s is %s now: write the new name", module, name)
            return name
    return module


REMOVED_VALUES = {
    ("channels.sdpo.teacher.kind", "trust_region"): "frozen",
    ("orchestrator.hints.detect", "judge"): "tool_error",
    ("orchestrator.hints.layers", "introspection"): "raw_error",
}
"""(key, value that earlier releases had) -> what an older run's config.json means by it now."""


def what_holds_now(location: Sequence[str | int]) -> str | None:
    """Return what holds in place of the key at `location`; None where it was not removed."""
    names = [str(segment) for segment in location if not str(segment).isdecimal()]
    prefixes = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((REMOVED[prefix] for prefix in prefixes if prefix in REMOVED), None)


def without_removed(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the tables of an older run's config.json without removed keys. Warn of those that had a value."""
    dropped: dict[str, None] = {}
    kept = _kept(values, (), dropped)
    if dropped:
        shown = [f"{key} ({what_holds_now(key.split('.'))})" for key in list(dropped)[:_SHOWN]]
        more = f", and {len(dropped) - _SHOWN} more" if len(dropped) > _SHOWN else ""
        logger.warning("%s has settings that this release no longer has: %s%s", origin, ", ".join(shown), more)
    return kept


def _kept(node: Any, location: tuple[str, ...], dropped: dict[str, None]) -> Any:
    if isinstance(node, list):
        return _without_repeats(node, [_kept(element, location, dropped) for element in node])
    if isinstance(node, str):
        return _present_value(".".join(location), node)
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        where = (*location, key)
        if what_holds_now(where) is None:
            kept[key] = _kept(value, where, dropped)
        elif value not in (None, False, 0, "", [], {}):
            dropped[".".join(where)] = None
    return kept


def _without_repeats(before: list[Any], elements: list[Any]) -> list[Any]:
    """Return `elements`, each once where a removed value became one of the others."""
    if elements == before:
        return elements
    return [element for at, element in enumerate(elements) if element not in elements[:at]]


def _present_value(key: str, value: str) -> str:
    present = REMOVED_VALUES.get((key, value))
    if present is None:
        return value
    logger.warning("%s = %r is gone: it is %r now", key, value, present)
    return present
