"""What is wrong with a configuration, in sentences: the key, its value, where it was set, what is expected."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from composer_prime.config.agreement import DisagreementError
from composer_prime.config.overlays import Overlay
from composer_prime.config.root import Config

Location = tuple[str | int, ...]


def describe(error: ValidationError, layers: Sequence[Overlay]) -> list[str]:
    """One sentence for each wrong key, in the order of the sections; `layers` tell where each was set."""
    merged: dict[Location, list[Any]] = {}
    for problem in error.errors():
        merged.setdefault(_real_location(problem["loc"]), []).append(problem)
    return [each for location, problems in merged.items() for each in _sentences(location, problems, layers)]


def misspelled_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """One sentence for each `--flag` that names no key, and the other words: without such flags and their values."""
    sentences: list[str] = []
    kept: list[str] = []
    value_of_unknown = False
    for word in words:
        if word.startswith("--"):
            name = word[2:].split("=", 1)[0]
            location = tuple(name.replace("-", "_").split("."))
            bare = tuple(name.removeprefix("no-").replace("-", "_").split("."))
            value_of_unknown = not (_known(location) or _known(bare))
            if value_of_unknown:
                sentences.append(f"unknown option --{name}{_suggestion(location, '--')}")
        elif word == "@":
            value_of_unknown = False
        if not value_of_unknown:
            kept.append(word)
    return sentences, kept


def spelled(word: str) -> str:
    """A flag as pydantic_config knows it: dashes for underscores in names of fields; free tables stay as written."""
    flag, equals, value = word.partition("=")
    location = tuple(flag[2:].replace("-", "_").split("."))
    if not flag.startswith("--") or "_" not in flag or not _ends_in_field(location):
        return word
    return flag.replace("_", "-") + equals + value


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key; elements of a list stand below its own name (`orchestrator.source.weight`)."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        inner = _inner_model(field.annotation)
        if inner is not None:
            keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def _sentences(location: Location, problems: list[Any], layers: Sequence[Overlay]) -> list[str]:
    cause = problems[0].get("ctx", {}).get("error")
    return cause.sentences if isinstance(cause, DisagreementError) else [_sentence(location, problems, layers)]


def _sentence(location: Location, problems: list[Any], layers: Sequence[Overlay]) -> str:
    first = problems[0]
    key, where = _dotted(location), _origin(location, layers)
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{where}{_suggestion(location)}"
    if first["type"] == "missing":
        return f"{key} is required: set it in the TOML file or pass --{key} VALUE"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    expected = " or ".join(dict.fromkeys(_expected(problem["msg"]) for problem in problems))
    return f"{key} = {_shown(first['input'])}{where}: expected {expected}{_nearest(first)}"


def _nearest(problem: Any) -> str:
    """The choice that a misspelled one comes closest to."""
    if problem["type"] != "literal_error" or not isinstance(problem["input"], str):
        return ""
    choices = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
    close = difflib.get_close_matches(problem["input"], choices, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def _dotted(location: Location) -> str:
    return ".".join(str(segment) for segment in location)


def _expected(message: str) -> str:
    text = message.removeprefix("Input should be ").split(", unable to parse")[0].split(", got a")[0]
    text = text.replace("a valid string", "text")
    return f"a value {text}" if text.startswith(("greater", "less")) else text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _origin(location: Location, layers: Sequence[Overlay]) -> str:
    for layer in reversed(layers):
        if layer.holds(location) or layer.holds(tuple(str(segment) for segment in location)):
            return f" ({layer.origin})"
    return ""


def _suggestion(location: Location, dash: str = "") -> str:
    """`; did you mean a.b?`, else the keys that its section has."""
    names = [str(segment) for segment in location if not str(segment).isdigit()]
    keys = known_keys()
    parent = ".".join(names[:-1])
    siblings = [key for key in keys if key.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(names[-1], [key.rpartition(".")[2] for key in siblings], n=1, cutoff=0.6)
    if close:
        return _mean(dash, _dotted((*location[:-1], close[0])))
    same_name = [key for key in keys if key.rpartition(".")[2] == names[-1]]
    close = same_name or difflib.get_close_matches(".".join(names), keys, n=1, cutoff=0.6)
    if close:
        return _mean(dash, f" or {dash}".join(close[:3]))
    if not siblings:
        return ""
    section = f"[{parent}]" if parent else "the file"
    return f"; keys of {section}: " + ", ".join(key.rpartition(".")[2] for key in siblings)


def _mean(dash: str, key: str) -> str:
    return f"; did you mean {dash}{key}?"


def _known(location: Location) -> bool:
    return _walk(location) is not None


def _ends_in_field(location: Location) -> bool:
    names = [str(segment) for segment in location if not str(segment).isdigit()]
    return ".".join(names) in known_keys() or ".".join(names).removeprefix("no_") in known_keys()


def _real_location(location: Location) -> Location:
    """`location` without the names of union members that pydantic appends."""
    return _walk(location, strict=False) or location


def _walk(location: Location, strict: bool = True) -> Location | None:
    """The part of `location` that is made of fields, list positions and free-table keys.

    With `strict`, None when any segment is none of these.
    """
    annotation: Any = Config
    for depth, segment in enumerate(location):
        model = _inner_model(annotation)
        position = isinstance(segment, int) or segment.isdigit()
        if position and _is(annotation, list, tuple):
            annotation = model
        elif _is(annotation, dict):
            return location
        elif model is not None and segment in model.model_fields and not _is(annotation, list):
            annotation = model.model_fields[str(segment)].annotation
        elif strict:
            return None
        else:
            return location if model is not None else location[:depth]
    return location


def _is(annotation: Any, *kinds: type) -> bool:
    return any(option in kinds or get_origin(option) in kinds for option in _options(annotation))


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return list(get_args(annotation))
    return [annotation]


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """The section behind a field: itself, an optional one, or the elements of a list."""
    for option in _options(annotation):
        candidates = get_args(option) if get_origin(option) is list else [option]
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                return candidate
    return None
