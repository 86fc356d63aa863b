"""Keys and modules that earlier releases had, and what holds now.

In a TOML file or a flag such a key is an error. In an older run's config.json it is left out with a warning.
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
"""By dotted key: what holds now."""
MOVED = {
    "orchestrator.environments.code": "orchestrator.coding.code",
    "orchestrator.environments.formats": "orchestrator.coding.formats",
    "orchestrator.environments.micro_code": "examples.micro_code",
    "orchestrator.coding.micro_code": "examples.micro_code",
}
"""Former name of a package -> its present name. What lies below it moved with it."""
_RENAMED = {
    "channels.own.import_path": "name",
    "channels.policy.import_path": "loss",
    "orchestrator.curriculum.import_path": "name",
    "orchestrator.curriculum.kwargs": "settings",
}
"""Removed key -> the key of the same table that has its value now, for an older run's config.json."""
_SHOWN = 6
_OURS = "orchestrator.coding."
"""Begins the modules of task sets whose settings this file knows."""
_TASKSETS = (("orchestrator", "source", "taskset"), ("orchestrator", "source", "eval_taskset"))


@functools.cache
def present_name(module: str) -> str:
    """Return the present name of a module. Warn once about a former one."""
    for former, present in MOVED.items():
        if module == former or module.startswith(f"{former}."):
            name = present + module.removeprefix(former)
            is_example = name.startswith("examples.")
            place = " (in the checkout; found only where run.import_from has its root)" if is_example else ""
            logger.warning("the module %s is %s now%s: write the new name", module, name, place)
            return name
    return module


REMOVED_VALUES = {
    ("channels.sdpo.teacher.kind", "trust_region"): "frozen",
    ("orchestrator.coding.code.monitor.policy", "penalize"): "zero",
    ("orchestrator.coding.code.monitor.policy", "quarantine"): "zero",
    ("orchestrator.hints.detect", "judge"): "tool_error",
    ("orchestrator.hints.layers", "introspection"): "raw_error",
    ("orchestrator.curriculum.import_path", "orchestrator.tasks.curriculum:Shuffled"): "shuffled",
    ("orchestrator.curriculum.import_path", "orchestrator.tasks.curriculum:Frontier"): "frontier",
}
"""(key, former value) -> what an older run's config.json means by it now."""


def what_holds_now(location: Sequence[str | int]) -> str | None:
    """Return what holds in place of a removed key, or None.

    Settings of a shipped task set lie below its module; its table `runtime` has the keys of the source's.
    """
    names = [str(segment) for segment in location if not str(segment).isdecimal()]
    if ".".join(names).startswith(_OURS) and "runtime" in names:
        names = ["orchestrator", "source", *names[names.index("runtime") :]]
    prefixes = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((REMOVED[prefix] for prefix in prefixes if prefix in REMOVED), None)


def value_now(key: str, value: Any) -> str:
    """Return the end of a sentence about a wrong value: what to write for a removed one."""
    present = REMOVED_VALUES.get((key, value)) if isinstance(value, str) else None
    return f"; {value!r} was removed, and {present!r} comes nearest" if present else ""


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
    """Return `node` without removed keys, which go to `dropped` with their values."""
    if isinstance(node, list):
        return _kept_elements(node, location, dropped)
    if isinstance(node, dict) and value_now(".".join(location), node.get("name")):
        node = node["name"]
    if isinstance(node, str):
        key = ".".join(location)
        if (present := REMOVED_VALUES.get((key, node))) is None:
            return node
        logger.warning("%s = %r is gone: it is %r now", key, node, present)
        return present
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        where = (*location, key)
        if now := _RENAMED.get(".".join(where)):
            kept[now] = _kept(value, where, dropped)
        elif where in _TASKSETS:
            kept[key] = _kept_settings(node, value, dropped)
        elif what_holds_now(where) is None:
            kept[key] = _kept(value, where, dropped)
        else:
            dropped[".".join(where)] = value
    return kept


def _kept_elements(elements: list[Any], location: tuple[str, ...], dropped: dict[str, Any]) -> list[Any]:
    """Return a list without removed elements, each once where a removed value became one of the others."""
    gone = [element for element in elements if isinstance(element, str) and what_holds_now((*location, element))]
    dropped |= {".".join((*location, element)): element for element in gone}
    kept = [_kept(element, location, dropped) for element in elements if element not in gone]
    return elements if kept == elements else [each for at, each in enumerate(kept) if each not in kept[:at]]


def _kept_settings(source: dict[str, Any], settings: Any, dropped: dict[str, Any]) -> Any:
    """Return the settings of a task set, a shipped one's without the removed."""
    tables = [table for table in (settings, source.get("taskset")) if isinstance(table, dict)]
    name = next((table["id"] for table in tables if isinstance(table.get("id"), str)), "")
    module = present_name(name)
    return _kept(settings, tuple(module.split(".")), dropped) if module.startswith(_OURS) else settings
