"""Flags of the command line: `--section.key VALUE`, also of a list element (--orchestrator.source.0.weight 2)."""

from __future__ import annotations

import itertools
import json
from typing import Any

from composer_prime.config.layers import Layer
from composer_prime.config.problems import COMMAND_LINE, in_table, is_kind, is_known, key_types, names_of, unknown_key
from composer_prime.console import pluralize, program
from composer_prime.errors import ConfigError

Location = tuple[str, ...]


def apply_flags(values: dict[str, Any], words: list[str]) -> tuple[Layer, list[str]]:
    """Set in `values` what the flags in `words` say. Return what they set, and a sentence for each wrong flag."""
    layer = Layer(origin=COMMAND_LINE, values={})
    sentences: list[str] = []
    for name, given in _read(words):
        location = tuple(name.replace("-", "_").split("."))
        if not is_known(location) and is_known(off := (location[0].removeprefix("no_"), *location[1:])):
            location, given = off, ["false"]
        try:
            if not is_known(location):
                raise ConfigError(unknown_key(location, COMMAND_LINE))
            _put(values, location, _value(location, given))
        except ConfigError as error:
            sentences.append(str(error))
        else:
            _mark(layer.values, location)
    return layer, sentences


def _read(words: list[str]) -> list[tuple[str, list[str]]]:
    """Return each flag's name with its words. Raises ConfigError for words that belong to no flag."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif word.endswith(".toml") and not (flags and "." in flags[-1][0]):
            raise ConfigError(f"{word}: put @ before a configuration file: {program()} @ {word}")
        elif not flags:
            raise ConfigError(f"{word}: a value needs its key: --section.key {word}")
        else:
            flags[-1][1].append(word)
    return flags


def _value(location: Location, words: list[str]) -> Any:
    """Return the value that `words` spell; pydantic makes numbers and switches of them. No word is a switch's."""
    kind = key_types().get(".".join(names_of(location)))
    if len(words) > 1:
        return words
    word = words[0] if words else "true"
    if in_table(location):
        return _literal(word)
    if word[:1] in ("[", "{") and kind is not str:
        try:
            return json.loads(word)
        except ValueError as error:
            raise ConfigError(f"--{'.'.join(location)} {word}: starts like JSON but is not: {error}") from None
    return [word] if is_kind(kind, list, tuple) and word != "None" and not location[-1].isdecimal() else word


def _literal(text: str) -> Any:
    """Return a word as the value TOML would make of it; anything else stays text."""
    try:
        return None if text == "None" else json.loads(text)
    except ValueError:
        return text


def _put(values: dict[str, Any], location: Location, value: Any) -> None:
    """Set `value`, and the tables on the way to it. Raises ConfigError for an element that no file sets."""
    node: Any = values
    for key, following in itertools.pairwise(location):
        index = _index(node, key, location)
        if isinstance(node, dict) and not following.isdecimal() and not isinstance(node.get(key), dict):
            node[key] = {}
        node = node.get(key) if isinstance(node, dict) else node[index]
    node[_index(node, location[-1], location)] = value


def _index(node: Any, key: str, location: Location) -> Any:
    """Return what `key` is called in the table or list `node`."""
    if not key.isdecimal():
        return key
    flag = f"--{'.'.join(location)}"
    if not isinstance(node, list):
        raise ConfigError(f"{flag}: no configuration file sets the list, so it has no element to override")
    if int(key) >= len(node):
        count = pluralize(len(node), "element")
        raise ConfigError(f"{flag}: the list has {count}, counted from 0, so none at {key}")
    return int(key)


def _mark(values: dict[str, Any], location: Location) -> None:
    for key in location:
        values = values.setdefault(key, {})
