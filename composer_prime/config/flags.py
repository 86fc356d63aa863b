"""Flags of the command line: `--section.key VALUE`, also of a list element (--orchestrator.source.0.weight 2).

A word stays text: pydantic makes numbers and switches of it. Of several flags for one key the last one holds.
"""

from __future__ import annotations

import json
from typing import Any

from composer_prime.config.layers import Layer
from composer_prime.config.problems import COMMAND_LINE, is_kind, key_types, names_of
from composer_prime.console import program
from composer_prime.errors import ConfigError

Location = tuple[str, ...]


def apply_flags(values: dict[str, Any], words: list[str]) -> Layer:
    """Set in `values` what the flags in `words` say. Return what they set. Raises ConfigError for a wrong one."""
    layer = Layer(origin=COMMAND_LINE, values={})
    for name, given in _read(words):
        location = tuple(name.replace("-", "_").split("."))
        turns_off = location[0].startswith("no_") and not given
        if turns_off:
            location = (location[0].removeprefix("no_"), *location[1:])
        if not given and _kind(location) not in (bool, None):
            raise ConfigError(f"--{name} needs a value: only a switch has none")
        _put(values, location, _value(location, given) if given else not turns_off)
        mark = layer.values
        for key in location:
            mark = mark.setdefault(key, {})
    return layer


def _kind(location: Location) -> Any:
    return key_types().get(".".join(names_of(location)))


def _read(words: list[str]) -> list[tuple[str, list[str]]]:
    """Return each flag's name with its words. Raises ConfigError for words that belong to no flag."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif word.endswith(".toml") and not (flags and "." in flags[-1][0] and not flags[-1][1]):
            raise ConfigError(f"{word}: put @ before a configuration file: {program()} @ {word}")
        elif not flags:
            raise ConfigError(f"{word}: a value needs its key: --section.key {word}")
        else:
            flags[-1][1].append(word)
    return flags


def _value(location: Location, words: list[str]) -> Any:
    """Return the value that `words` spell: several are a list, and lists and tables may be JSON."""
    if len(words) > 1:
        return words
    word, kind = words[0], _kind(location)
    if word == "None":
        return None
    if kind is None:  # In a free table, or a key that is not known.
        try:
            return json.loads(word)
        except ValueError:
            return word
    takes_list = is_kind(kind, list, tuple) and not location[-1].isdecimal()
    if word[:1] in ("[", "{") and (takes_list or is_kind(kind, dict)):
        try:
            return json.loads(word)
        except ValueError as error:
            raise ConfigError(f"--{'.'.join(location)} {word}: starts like JSON but is not: {error}") from None
    return [word] if takes_list else word


def _put(values: dict[str, Any], location: Location, value: Any) -> None:
    """Set `value`, and the tables on the way to it. Raises ConfigError for an element that no file sets."""
    node: Any = values
    for key in location[:-1]:
        index = _index(node, key, location)
        if isinstance(node, dict) and node.get(key) in (None, "None"):
            node[key] = {}
        node = node[index]
    node[_index(node, location[-1], location)] = value


def _index(node: Any, key: str, location: Location) -> str | int:
    """Return what `key` is called in the table or list `node`."""
    if isinstance(node, dict):
        return key
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return int(key)
    what = f"a list of {len(node)}, counted from 0" if isinstance(node, list) else f"the value {node!r}"
    raise ConfigError(f"--{'.'.join(location)}: there is no {key} in {what}")
