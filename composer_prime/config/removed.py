"""Keys that earlier releases had, and what holds now.

In a TOML file or a flag such a key is an error. In an older run's config.json it is left out with a warning.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

REMOVED: dict[str, str] = tomllib.loads(Path(__file__).with_name("removed_keys.toml").read_text())
"""By dotted key: what holds now."""
_SHOWN = 6
_OURS = "orchestrator.coding."
"""Begins the modules of task sets whose settings this file knows."""
_TASKSETS = (("orchestrator", "source", "taskset"), ("orchestrator", "source", "eval_taskset"))


def what_holds_now(location: Sequence[str | int]) -> str | None:
    """Return what holds in place of a removed key, or None.

    Settings of a shipped task set lie below its module; its table `runtime` has the keys of the source's.
    """
    names = [str(segment) for segment in location if not str(segment).isdecimal()]
    if ".".join(names).startswith(_OURS) and "runtime" in names:
        names = ["orchestrator", "source", *names[names.index("runtime") :]]
    prefixes = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((REMOVED[prefix] for prefix in prefixes if prefix in REMOVED), None)


def removed_settings(taskset: dict[str, Any], eval_taskset: dict[str, Any]) -> list[str]:
    """Return a sentence for each removed setting of a source's task sets."""
    dropped: dict[str, Any] = {}
    _kept({"taskset": taskset, "eval_taskset": eval_taskset}, _TASKSETS[0][:-1], dropped)
    return [f"{key} was removed: {what_holds_now(key.split('.'))}" for key in dropped]


def without_removed(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the tables of an older run's config.json without removed keys, and warn of set ones."""
    dropped: dict[str, Any] = {}
    kept = _kept(values, (), dropped)
    if were_set := [key for key, value in dropped.items() if value not in (None, False, 0, "", [], {})]:
        shown = [f"{key} ({what_holds_now(key.split('.'))})" for key in were_set[:_SHOWN]]
        more = f", and {len(were_set) - _SHOWN} more" if len(were_set) > _SHOWN else ""
        logger.warning("%s has settings that this release no longer has: %s%s", origin, ", ".join(shown), more)
    return kept


def _kept(node: Any, location: tuple[str, ...], dropped: dict[str, Any]) -> Any:
    """Return `node` without removed keys and names, which go to `dropped` with their values."""
    if isinstance(node, list):
        return _kept_elements(node, location, dropped)
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        where = (*location, key)
        if where in _TASKSETS:
            kept[key] = _kept_settings(node, value, dropped)
        elif what_holds_now(where) is None:
            kept[key] = _kept(value, where, dropped)
        else:
            dropped[".".join(where)] = value
    return kept


def _kept_elements(elements: list[Any], location: tuple[str, ...], dropped: dict[str, Any]) -> list[Any]:
    gone = [each for each in elements if isinstance(each, str) and what_holds_now((*location, each))]
    dropped |= {".".join((*location, each)): each for each in gone}
    return [_kept(each, location, dropped) for each in elements if each not in gone]


def _kept_settings(source: dict[str, Any], settings: Any, dropped: dict[str, Any]) -> Any:
    """Return the settings of a task set, a shipped one's without the removed."""
    tables = [table for table in (settings, source.get("taskset")) if isinstance(table, dict)]
    module = next((table["id"] for table in tables if isinstance(table.get("id"), str)), "")
    return _kept(settings, tuple(module.split(".")), dropped) if module.startswith(_OURS) else settings
