"""A part that users may replace: its short name, or the import path of their own, with settings.

curriculum = "frontier"
curriculum = { name = "my_module:MyCurriculum", settings = { window = 4 } }
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import AfterValidator, Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.console import did_you_mean
from composer_prime.errors import ConfigError


class PartConfig(BaseConfig):
    """A short name or `module:Class`, with settings. A plain text is a name without settings."""

    name: str
    """A short name, or `module:Class` of your own."""
    settings: dict[str, Any] = Field(default={})
    """Keyword arguments of the class."""

    @model_validator(mode="before")
    @classmethod
    def _plain_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

    @property
    def is_own(self) -> bool:
        return ":" in self.name


def as_parts(entries: Iterable[str | PartConfig]) -> list[PartConfig]:
    """Return the entries of a list in their full form."""
    return [entry if isinstance(entry, PartConfig) else PartConfig(name=entry) for entry in entries]


def check_unique(names: list[str], setting: str) -> None:
    """Raise ValueError for a repeated name of a table of `setting`."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{setting} names {repeated} are used more than once: rename one of them")


def one_of(setting: str, *known: str) -> AfterValidator:
    """Return the check of an optional part, or of a list: each has a name of `known`, or is the user's own."""

    def check(given: Any) -> Any:
        parts = given if isinstance(given, list) else [given]
        check_names([] if given is None else parts, known, setting)
        return given

    return AfterValidator(check)


def check_names(entries: Iterable[str | PartConfig], known: Sequence[str], setting: str) -> None:
    """Raise ValueError for an unknown short name, and for settings of a known one."""
    for part in as_parts(entries):
        if part.is_own:
            continue
        if part.name not in known:
            hint = did_you_mean(part.name, known)
            expected = ", ".join([*known, "`module:Class` of your own"])
            raise ValueError(f"{setting} has {part.name!r}; expected {expected}{hint}")
        if part.settings:
            raise ValueError(f"{setting} has settings {sorted(part.settings)} for {part.name!r}, which takes none")


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
