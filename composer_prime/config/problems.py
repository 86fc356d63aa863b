"""Sentences about what is wrong with a configuration: the key, its value, the file that set it, what is expected.

For a key that does not exist they suggest one of nearly this name in its section, else one of this name elsewhere, else
one with a nearly equal path.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from composer_prime.config.layers import Layer
from composer_prime.config.removed import what_holds_now
from composer_prime.config.root import Config, DisagreementError

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


def split_wrong_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a sentence for each flag that names no key, or a section with a value, and the words without them."""
    sentences: list[str] = []
    good_words: list[str] = []
    in_wrong_flag = False
    for word, following in itertools.pairwise([*words, ""]):
        if word.startswith("--"):
            sentence = _wrong_flag(word, following)
            in_wrong_flag = sentence is not None
            if sentence is not None:
                sentences.append(sentence)
        if not in_wrong_flag:
            good_words.append(word)
    return sentences, good_words


def spell_flag(word: str) -> str:
    """Return a flag as pydantic_config knows it: dashes for underscores. Keys of free tables stay as written."""
    flag, equals, value = word.partition("=")
    name = _dotted(_names(_flag_location(flag)))
    is_field = name in _key_types() or name.removeprefix("no_") in _key_types()
    return flag.replace("_", "-") + equals + value if flag.startswith("--") and is_field else word


def _wrong_flag(word: str, following: str) -> str | None:
    """Return what is wrong with flag `word`; `following` is its value unless it holds one itself."""
    name, equals, value = word[2:].partition("=")
    location = _flag_location(word)
    if not _is_known(location):
        if (now := what_holds_now(location)) is not None:
            return f"--{name} was removed: {now}"
        switch = _flag_location(f"--{name.removeprefix('no-')}")
        return None if _is_known(switch) else f"unknown option --{name}{_suggest_key(location, '--')}"
    value = value if equals else following
    if not value or value == "None" or value.startswith(("{", "--")):
        return None
    remedy = _name_keys_of_section(location, "--")
    return f"--{name} {value}: {remedy}" if remedy else None


def _flag_location(flag: str) -> tuple[str, ...]:
    return tuple(flag.removeprefix("--").partition("=")[0].replace("-", "_").split("."))


def _sentence(location: Location, problems: list[Any], layers: Sequence[Layer]) -> str:
    first = problems[0]
    key = _dotted(location)
    origin = next((f" ({layer.origin})" for layer in reversed(layers) if layer.sets(location)), "")
    if first["type"] == "extra_forbidden":
        if (now := what_holds_now(location)) is not None:
            return f"{key}{origin} was removed: {now}"
        return f"unknown key {key}{origin}{_suggest_key(location)}"
    if first["type"] == "missing":
        return f"{key} is required: set it in the TOML file or pass --{key} VALUE"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    value = repr(first["input"])
    shown = value if len(value) <= 80 else value[:77] + "..."
    if first["type"] == "model_type" and (remedy := _name_keys_of_section(location)):
        return f"{key} = {shown}{origin}: {remedy}"
    expected = " or ".join(dict.fromkeys(_expected(problem["msg"]) for problem in problems))
    return f"{key} = {shown}{origin}: expected {expected}{_suggest_choice(first)}"


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


def _suggest_key(location: Location, dash: str = "") -> str:
    """Return `; did you mean a.b?`, else the keys that its section has. `dash`: what stands before a key."""
    *parents, name = _names(location) or [""]
    section = _section_at(location[:-1])
    if section is not None and (nearest := difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.6)):
        return f"; did you mean {dash}{_dotted((*location[:-1], *nearest))}?"
    parent, path = _dotted(parents), _dotted([*parents, name])
    keys = [key for key in _key_types() if not path.startswith(f"{key}.")]
    same_name = [key for key in keys if key.rpartition(".")[2] == name]
    candidates = [key for key in same_name if key.startswith(f"{parent}.")] or same_name
    if section is None and not candidates:
        candidates = difflib.get_close_matches(path, keys, n=1, cutoff=0.6)
    if candidates:
        return f"; did you mean {' or '.join(dash + key for key in candidates[:3])}?"
    if section is None:
        return ""
    return f"; keys of {f'[{parent}]' if parent else 'the file'}: {', '.join(section.model_fields)}"


def _name_keys_of_section(location: Location, dash: str = "") -> str | None:
    """Return what belongs where `location` names a section and a value was given; None where it names no section."""
    section = _section_at(location)
    if section is None:
        return None
    keys = ", ".join(section.model_fields)
    return f"a section, not a value: set {dash}{_dotted(location)}.KEY, where KEY is one of {keys}"


# The tree of keys, read from the types of `Config`.


@functools.cache
def _key_types() -> dict[str, Any]:
    """Return the type of every dotted key; elements of a list stand below its own name (orchestrator.source.weight)."""
    types_by_key: dict[str, Any] = {}

    def add(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            types_by_key[prefix + name] = field.annotation
            if inner := _inner_model(field.annotation):
                add(inner, f"{prefix}{name}.")

    add(Config, "")
    return types_by_key


def leaf_keys() -> list[str]:
    """Return every key that holds a value, with those of elements of lists once."""
    return [key for key, kind in _key_types().items() if _inner_model(kind) is None]


def _is_known(location: Location) -> bool:
    """Return whether `location` names a key, or something in a free table."""
    names = _names(location)
    prefixes = [_dotted(names[: depth + 1]) for depth in range(len(names))]
    in_table = any(_is_table(_key_types().get(prefix)) for prefix in prefixes)
    return bool(names) and (prefixes[-1] in _key_types() or in_table)


def _key_location(location: Location) -> Location:
    """Return `location` without the names of union members that pydantic appends to a key."""
    for end in range(len(location), 0, -1):
        annotation = _key_types().get(_dotted(_names(location[:end])))
        if annotation is not None:
            opens = _inner_model(annotation) is not None or _is_table(annotation)
            return location if opens else location[:end]
    return location


def _section_at(location: Location) -> type[BaseModel] | None:
    """Return the section that `location` names; None when it names a value, a list, a free table or nothing."""
    if not location:
        return Config
    annotation = _key_types().get(_dotted(_names(location)))
    is_list = any(get_origin(member) is list for member in _members(annotation))
    in_list = isinstance(location[-1], int) or location[-1].isdigit()
    return None if is_list and not in_list else _inner_model(annotation)


def _names(location: Sequence[str | int]) -> list[str]:
    """Return `location` without list positions."""
    return [str(segment) for segment in location if not str(segment).isdigit()]


def _dotted(location: Sequence[str | int]) -> str:
    return ".".join(map(str, location))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_table(annotation: Any) -> bool:
    return any(get_origin(member) is dict for member in _members(annotation))


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """Return the section behind a key: itself, an optional one, or the elements of a list."""
    for member in _members(annotation):
        for candidate in get_args(member) if get_origin(member) is list else (member,):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                return candidate
    return None
