"""The layers a configuration comes from (files, then the command line), kept apart so that messages can name them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """One layer of values."""

    origin: str
    """The file's path as the user wrote it, or "the command line"."""
    values: dict[str, Any]
    """Nested tables."""

    def holds(self, location: tuple[str | int, ...]) -> bool:
        """Whether this layer sets the value at `location` (keys and list positions)."""
        node: Any = self.values
        for segment in location:
            reached = _child(node, segment)
            if reached is None:
                return False
            node = reached[0]
        return True


def _child(node: Any, segment: str | int) -> tuple[Any] | None:
    if isinstance(node, list) and isinstance(segment, int):
        return (node[segment],) if segment < len(node) else None
    return (node[segment],) if isinstance(node, dict) and segment in node else None


def read_overlays(words: list[str]) -> list[Overlay]:
    """The files that follow an `@`, or `--section @`, in order. Raises ConfigError for a file that cannot be read."""
    overlays = []
    for index, word in enumerate(words):
        section = words[index - 1][2:] if index and words[index - 1].startswith("--") else ""
        if word == "@":
            if index + 1 == len(words) or words[index + 1].startswith("--"):
                raise ConfigError("@ must be followed by a configuration file: @ configs/a1.toml")
            overlays.append(_overlay(words[index + 1], section))
        elif section and word.startswith("@"):
            overlays.append(_overlay(word[1:], section))
    return overlays


def command_line(words: list[str]) -> Overlay:
    """The overrides among `words` as a layer: enough to tell which keys the command line set."""
    values: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            key = word[2:].split("=", 1)[0].replace("-", "_")
            _nest(values, key.removeprefix("no_").split("."))
    return Overlay(origin="the command line", values=values)


def _overlay(name: str, section: str) -> Overlay:
    values = read_file(name)
    for key in reversed(section.replace("-", "_").split(".") if section else []):
        values = {key: values}
    return Overlay(origin=name, values=values)


def read_file(name: str) -> dict[str, Any]:
    """The tables of a .toml or .json file. Raises ConfigError when it is missing, of another kind or malformed."""
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{name} is no configuration file: its name must end in .toml (or .json)")
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"configuration file {name} does not exist{_neighbours(path)}") from None
    except OSError as error:
        raise ConfigError(f"configuration file {name} cannot be read: {error.strerror}") from None
    try:
        text = raw.decode()
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid {path.suffix[1:].upper()}: {error}") from None


def _neighbours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (nor does the folder {folder}; the current folder is {Path.cwd()})"
    names = sorted(str(folder / found.name) for found in folder.glob("*.toml"))
    return f"; there is {', '.join(names[:6])}" if names else ""


def _nest(values: dict[str, Any], keys: list[str]) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            return
    values.setdefault(keys[-1], {})
