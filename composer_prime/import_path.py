"""Find a part by its short name or import path: the one way in which settings name code."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_prime.console import did_you_mean
from composer_prime.errors import ConfigError


def find_part(name: str, known: Mapping[str, str], setting: str) -> Any:
    """Return what `name` names: a key of `known`, whose value is an import path, or an import path itself.

    `setting`: the dotted key that holds the name. Raises ConfigError.
    """
    path = known.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        choices = ", ".join(known) or "none"
        expected = f"one of {choices}, or `module:name` of your own"
        raise ConfigError(f"{setting} is {name!r}; expected {expected}{did_you_mean(name, known)}")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{setting} is {name!r}, which cannot be imported: {error}; give `module:name`") from None


def build_part(
    name: str, settings: Mapping[str, Any], known: Mapping[str, str], setting: str, given: Mapping[str, Any]
) -> Any:
    """Return the part that `name` names, called with `settings` and those of `given` that it takes.

    Raises ConfigError, also for settings that the part does not take.
    """
    factory = find_part(name, known, setting)
    parameters = inspect.signature(factory).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {key: value for key, value in given.items() if takes_all or key in parameters} | dict(settings)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{setting} is {name!r}, which does not take {dict(settings)}: {error}") from None
    return factory(**arguments)


def build_awaited(name: str, settings: Mapping[str, Any], setting: str) -> Any:
    """Return a part that is called and awaited. Raises ConfigError as `build_part`."""
    part = build_part(name, settings, {}, setting, {})
    call = part if inspect.isroutine(part) or not callable(part) else part.__call__
    if not inspect.iscoroutinefunction(call):
        raise ConfigError(f"{setting} has {name!r}, which must be called as `async def __call__` ({place_of(call)})")
    return part


def place_of(function: Any) -> str:
    """Return `file:line, in function` of where a function is written."""
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    if code is None:
        return repr(function)
    return frame_text(code.co_filename, code.co_firstlineno, code.co_name)


def frame_text(file: str, line: str | int, function: str) -> str:
    path = Path(file)
    with suppress(OSError, ValueError):  # the current folder may be gone
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}, in {function}"
