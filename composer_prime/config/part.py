"""A part that users may replace: its short name, or the import path of their own, with settings.

curriculum = "frontier"
curriculum = { name = "my_module:MyCurriculum", settings = { window = 4 } }
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import model_validator
from pydantic_config import BaseConfig

from composer_prime.config.removed import value_now
from composer_prime.console import did_you_mean


class PartConfig(BaseConfig):
    """A short name or `module:Class`, with settings. A plain text is a name without settings."""

    name: str
    """A short name, or `module:Class` of your own."""
    settings: dict[str, Any] = {}
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


def check_names(entries: Iterable[str | PartConfig], known: Sequence[str], setting: str) -> None:
    """Raise ValueError for an unknown short name, and for settings of a known one."""
    for part in as_parts(entries):
        if part.is_own:
            continue
        if part.name not in known:
            hint = value_now(setting, part.name) or did_you_mean(part.name, known)
            raise ValueError(f"{setting} has {part.name!r}; expected {', '.join(known)}, or `module:Class`{hint}")
        if part.settings:
            raise ValueError(f"{setting} has settings {sorted(part.settings)} for {part.name!r}, which takes none")
