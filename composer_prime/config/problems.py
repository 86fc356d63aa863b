"""Sentences about what is wrong with a configuration: the key, its value, the file that set it, what is expected.

For a key that does not exist they suggest one of nearly this name in its section, else one of this name elsewhere, else
one with a nearly equal path.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from composer_prime.config.layers import Layer
from composer_prime.config.removed import what_holds_now
from composer_prime.config.root import Config, DisagreementError

COMMAND_LINE = "the command line"
Location = tuple[str | int, ...]


def describe_problems(error: ValidationError, layers: Sequence[Layer], section: Location = ()) -> list[str]:
    """Return one sentence for each wrong key, in the order of the sections; `layers` tell where each was set.

    `section`: the part of the configuration that was validated; () for all of it.
    """
    problems_at: dict[Location, list[Any]] = {}
    for problem in error.errors():
        problems_at.setdefault(_key_location((*section, *problem["loc"])), []).append(problem)
    sentences = []
    for location, problems in problems_at.items():
        cause = problems[0].get("ctx", {}).get("error")
        disagree = isinstance(cause, DisagreementError)
        sentences += cause.sentences if disagree else [_sentence(location, problems, layers)]
    return sentences


def unknown_key(location: Location, origin: str = "") -> str:
    """Say that there is no such key, and what is meant or holds now. `origin`: where it was set, if that is known."""
    dash = "--" if origin == COMMAND_LINE else ""
    shown = f"{dash}{_dotted(location)}" + ("" if dash or not origin else f" ({origin})")
    if (now := what_holds_now(location)) is not None:
        return f"{shown} was removed: {now}"
    return f"unknown {'option' if dash else 'key'} {shown}{_suggest_key(location, dash)}"


def _sentence(location: Location, problems: list[Any], layers: Sequence[Layer]) -> str:
    first, key = problems[0], _dotted(location)
    origin = next((layer.origin for layer in reversed(layers) if layer.sets(location)), "")
    if first["type"] == "extra_forbidden":
        return unknown_key(location, origin)
    if first["type"] == "missing":
        return f"{key} is required: set it in the TOML file or pass --{key} VALUE"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    value = repr(first["input"])
    shown = f"{key} = {value if len(value) <= 80 else value[:77] + '...'}{f' ({origin})' if origin else ''}"
    section = section_at(location)
    if first["type"] == "model_type" and section is not None:
        dash = "--" if origin == COMMAND_LINE else ""
        keys = ", ".join(section.model_fields)
        return f"{shown}: a section, not a value: set {dash}{key}.KEY, where KEY is one of {keys}"
    expected = " or ".join(dict.fromkeys(_expected(problem["msg"]) for problem in problems))
    return f"{shown}: expected {expected}{_suggest_choice(first)}"


def _expected(message: str) -> str:
    text = message.removeprefix("Input should be ").split(", unable to parse")[0].split(", got a")[0]
    text = text.replace("a valid string", "text")
    return f"a value {text}" if text.startswith(("greater", "less")) else text


def _suggest_choice(problem: Any) -> str:
    """Suggest the choice that a misspelled one comes closest to."""
    if problem["type"] != "literal_error" or not isinstance(problem["input"], str):
        return ""
    choices = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
    nearest = difflib.get_close_matches(problem["input"], choices, n=1, cutoff=0.6)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def _suggest_key(location: Location, dash: str) -> str:
    """Return `; did you mean a.b?`, else the keys that its section has. `dash`: what stands before a key."""
    *parents, name = location
    section, path = section_at(location[:-1]), _dotted(names_of(location))
    near: list[str] = []
    if section is not None:
        close = difflib.get_close_matches(str(name), section.model_fields, n=1, cutoff=0.6)
        near = [_dotted((*parents, each)) for each in close]
    near = near or [key for key in key_types() if key.rpartition(".")[2] == name and not path.startswith(f"{key}.")]
    if section is None:
        near = near or difflib.get_close_matches(path, key_types(), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(dash + key for key in near[:3])}?"
    where = f"[{_dotted(parents)}]" if parents else "the file"
    return f"; keys of {where}: {', '.join(section.model_fields)}" if section is not None else ""


# The tree of keys, read from the types of `Config`.


@functools.cache
def key_types() -> dict[str, Any]:
    """Return the type of every dotted key; elements of a list stand below its own name (orchestrator.source.weight)."""
    types_by_key: dict[str, Any] = {}

    def add(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            types_by_key[prefix + name] = field.annotation
            if inner := section_of(field.annotation):
                add(inner, f"{prefix}{name}.")

    add(Config, "")
    return types_by_key


def leaf_keys() -> list[str]:
    """Return every key that holds a value, with those of elements of lists once."""
    return [key for key, kind in key_types().items() if section_of(kind) is None]


def is_known(location: Location) -> bool:
    """Return whether `location` names a key, or something in a free table."""
    return _dotted(names_of(location)) in key_types() or in_table(location)


def in_table(location: Location) -> bool:
    """Return whether `location` is below a free table."""
    names = names_of(location)
    return any(is_kind(key_types().get(_dotted(names[:depth])), dict) for depth in range(1, len(names)))


def is_kind(annotation: Any, *kinds: type) -> bool:
    """Return whether a value of the key may be a list, a table or the like."""
    return any(get_origin(member) in kinds for member in _members(annotation))


def _key_location(location: Location) -> Location:
    """Return `location` without the names of union members that pydantic appends to a key."""
    for end in range(len(location), 0, -1):
        annotation = key_types().get(_dotted(names_of(location[:end])))
        if annotation is not None:
            opens = section_of(annotation) is not None or is_kind(annotation, dict)
            return location if opens else location[:end]
    return location


def section_at(location: Location) -> type[BaseModel] | None:
    """Return the section that `location` names; None when it names a value, a list, a free table or nothing."""
    if not location:
        return Config
    annotation = key_types().get(_dotted(names_of(location)))
    in_list = str(location[-1]).isdecimal()
    return None if is_kind(annotation, list) and not in_list else section_of(annotation)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section behind a key: itself, an optional one, or the elements of a list."""
    for member in _members(annotation):
        for candidate in get_args(member) if get_origin(member) is list else (member,):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                return candidate
    return None


def names_of(location: Sequence[str | int]) -> list[str]:
    """Return `location` without list positions."""
    return [str(segment) for segment in location if not str(segment).isdecimal()]


def _dotted(location: Sequence[str | int]) -> str:
    return ".".join(map(str, location))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
