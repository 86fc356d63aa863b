"""The layers of a configuration: TOML files and their bases.

A file may name one base, relative to itself (base = "a1.toml"). Its own values win key by key; a list is
replaced whole.
"""

from __future__ import annotations

import copy
import difflib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.removed import without_removed
from composer_prime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Values from one place."""

    origin: str
    """A path as the user wrote it, or "the command line"."""
    values: dict[str, Any]

    def sets(self, location: tuple[str | int, ...]) -> bool:
        """Return whether this layer holds a value at `location`."""
        node: Any = self.values
        for segment in location:
            if isinstance(node, list) and isinstance(segment, int) and segment < len(node):
                node = node[segment]
            elif isinstance(node, dict) and str(segment) in node:
                node = node[str(segment)]
            else:
                return False
        return True

    def place(self, location: tuple[str | int, ...]) -> str:
        """Return where the value at `location` was set, for a TOML file with its line: `a1.toml:7`."""
        if not self.origin.endswith(".toml"):
            return self.origin
        lines, begin = Path(self.origin).read_text("utf-8").split("\n"), 1
        for end in range(1, len(lines) + 1):
            try:
                values = tomllib.loads("\n".join(lines[:end]))
            except ValueError:
                continue  # within a value of several lines
            if Layer(origin=self.origin, values=values).sets(location):
                break
            begin = end + 1
        return f"{self.origin}:{begin}"


def read_layers(words: list[str]) -> tuple[list[Layer], list[str]]:
    """Return the layers of all `@ FILE` in `words`, the strongest last, and the other words. Raises ConfigError."""
    layers: list[Layer] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("@"):
            rest.append(word)
            continue
        name = word[1:] or (queue.pop(0) if queue else "")
        if not name or name.startswith("--"):
            raise ConfigError("@ must be followed by a configuration file: @ my.toml, or a shipped one: @ a1")
        layers += read_with_bases(name)
    return layers, rest


def read_with_bases(name: str, *, readers: tuple[str, ...] = ()) -> list[Layer]:
    """Return the layers of file `name` and its bases, its own last. `readers`: the files that led here.

    Raises ConfigError.
    """
    name = shipped(name)
    values = read_table_file(name)
    base = values.pop("base", None)
    own = Layer(origin=name, values=values)
    if base is None:
        return [own]
    if not isinstance(base, str):
        raise ConfigError(f"{name}: base is {base!r}; expected the path of a TOML file, relative to this one")
    found, chain = shipped(base), (*readers, name)
    path = Path(name).parent / base if found == base else Path(found)
    if not path.is_file():
        raise ConfigError(f"{name}: base is {base!r}, but there is no file {path}{_files_near(path, name)}")
    if path.resolve() in {Path(reader).resolve() for reader in chain}:
        loop = " -> ".join([*chain, str(path)])
        raise ConfigError(f"{name}: base is {base!r}, which leads back to itself: {loop}")
    return [*read_with_bases(str(path), readers=chain), own]


_SHIPPED = [Path(__file__).parents[up] / "configs" for up in (1, 2)]
"""Where they may be: in a wheel and in a checkout."""


def shipped(name: str) -> str:
    """Return the shipped file that `a1` or `smollm2/a1` names; any other name as it is."""
    files = [folder / f"{name}.toml" for folder in _SHIPPED]
    return next((str(file) for file in files if not Path(name).suffix and file.is_file()), name)


def merge_layers(layers: list[Layer]) -> dict[str, Any]:
    """Return all values in new tables; later layers win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge_into(merged, layer.values)
    return merged


def read_table_file(name: str) -> dict[str, Any]:
    """Return the tables of a .toml or .json file. Raises ConfigError."""
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{name} is not a configuration file: give a .toml (or .json), or a shipped one: a1")
    try:
        text = path.read_bytes().decode()
        if path.suffix == ".toml":
            return tomllib.loads(text)
        return without_removed(json.loads(text), name)
    except FileNotFoundError:
        raise ConfigError(f"configuration file {name} does not exist{_files_near(path)}") from None
    except OSError as error:
        raise ConfigError(f"configuration file {name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{name} is not valid {path.suffix[1:].upper()} in UTF-8: {error}") from None


def _files_near(path: Path, reader: str = "") -> str:
    """Return what a missing file's name may have meant. `reader`: names it, and is no answer."""
    names = sorted(str(file) for file in path.parent.glob("*.toml") if file != Path(reader))
    shipped = [file.stem for folder in _SHIPPED for file in folder.glob("*.toml")]
    known = {**{name: name for name in shipped}, **{Path(name).stem: name for name in names}}
    if near := difflib.get_close_matches(path.stem, known, n=1):
        return f"; did you mean {known[near[0]]}?"
    return f"; there is {', '.join(names[:6])}" if names else f" (the current folder is {Path.cwd()})"


def _merge_into(merged: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            _merge_into(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
