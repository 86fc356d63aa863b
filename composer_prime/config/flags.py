"""Flags of the command line: `--section.key VALUE`, also of a list element (--orchestrator.source.0.weight 2)."""

from __future__ import annotations

import itertools
import json
from typing import Any

from composer_prime.config.layers import Layer
from composer_prime.config.problems import (
    COMMAND_LINE,
    in_table,
    is_kind,
    is_known,
    key_types,
    names_of,
    section_at,
    unknown_key,
)
from composer_prime.console import pluralize, program
from composer_prime.errors import ConfigError

Location = tuple[str, ...]


def apply_flags(values: dict[str, Any], words: list[str]) -> tuple[Layer, list[str]]:
    """Set in `values` what the flags in `words` say. Return what they set, and a sentence for each wrong flag."""
    layer = Layer(origin=COMMAND_LINE, values={})
    sentences: list[str] = []
    places: list[Location] = []
    for name, given in _read(words):
        location = tuple(name.replace("-", "_").split("."))
        off = (location[0].removeprefix("no_"), *location[1:])
        if not given and not is_known(location) and _is_switch(off):
            location, given = off, ["false"]
        try:
            if not is_known(location):
                raise ConfigError(unknown_key(location, COMMAND_LINE))
            _check_apart(location, places)
            _put(values, location, _value(location, given))
        except ConfigError as error:
            sentences.append(str(error))
        else:
            places.append(location)
            _mark(layer.values, location)
    return layer, sentences


def _check_apart(location: Location, places: list[Location]) -> None:
    """Raise ConfigError for a flag that sets a part of what another flag sets whole, or the reverse."""
    for other in places:
        shorter = min(location, other, key=len)
        if location != other and location[: len(shorter)] == other[: len(shorter)]:
            raise ConfigError(f"--{'.'.join(location)} and --{'.'.join(other)} set the same value: give one of them")


def _is_switch(location: Location) -> bool:
    return key_types().get(".".join(names_of(location))) is bool


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
    """Return the value that `words` spell; pydantic makes numbers and switches of them. No word turns a switch on."""
    flag = f"--{'.'.join(location)}"
    kind = key_types().get(".".join(names_of(location)))
    if len(words) > 1:
        return words
    if not words and not _is_switch(location):
        raise ConfigError(f"{flag} needs a value")
    word = words[0] if words else "true"
    if in_table(location):
        return _literal(word)
    if word == "None":
        return word
    if (section := section_at(location)) is not None:
        raise ConfigError(f"{flag} is a section: set {flag}.KEY, where KEY is one of {', '.join(section.model_fields)}")
    takes_list = is_kind(kind, list, tuple) and not location[-1].isdecimal()
    if word[:1] in ("[", "{") and (takes_list or is_kind(kind, dict)):
        try:
            return json.loads(word)
        except ValueError as error:
            raise ConfigError(f"{flag} {word}: starts like JSON but is not: {error}") from None
    return [word] if takes_list else word


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
        if isinstance(node, dict) and not following.isdecimal() and node.get(key) in (None, "None"):
            node[key] = {}
        node = node.get(key) if isinstance(node, dict) else node[index]
    last = _index(node, location[-1], location)
    if not isinstance(node, dict | list):
        raise ConfigError(f"--{'.'.join(location)}: {location[-2]} is {node!r}, not a table")
    node[last] = value


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
