"""Sentences about what is wrong with a configuration: key, value, the file and line that set it, what is expected."""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from composer_prime.config.layers import Layer
from composer_prime.config.removed import what_holds_now
from composer_prime.config.root import Config, DisagreementError
from composer_prime.console import what_is_wrong
from composer_prime.errors import ConfigError

_descriptions = getattr(import_module("pydantic_config.cli"), "_extract_field_docstrings", lambda section: {})
"""A private function; without it a message says less."""
COMMAND_LINE = "the command line"
Location = tuple[str | int, ...]


def wrong_config(error: ValidationError, layers: Sequence[Layer], section: Location = ()) -> ConfigError:
    """Return the error that has a sentence for each wrong key.

    `layers` tell where each key was set. `section`: the part that was validated; () for all.
    """
    problems_at: dict[Location, list[Any]] = {}
    for problem in error.errors():
        problems_at.setdefault(_key_location((*section, *problem["loc"])), []).append(problem)
    sentences: list[str] = []
    for location, problems in problems_at.items():
        cause = problems[0].get("ctx", {}).get("error")
        disagree = isinstance(cause, DisagreementError)
        sentences += cause.sentences if disagree else [_sentence(location, problems, layers)]
    return ConfigError(what_is_wrong(sentences))


def _sentence(location: Location, problems: list[Any], layers: Sequence[Layer]) -> str:
    first, key = problems[0], _dotted(location)
    origin = next((layer.place(location) for layer in reversed(layers) if layer.sets(location)), "")
    dash, place = ("--", "") if origin == COMMAND_LINE else ("", f" ({origin})" if origin else "")
    if first["type"] == "extra_forbidden":
        if (now := what_holds_now(location)) is not None:
            return f"{dash}{key}{place} was removed: {now}"
        return f"unknown {'option' if dash else 'key'} {dash}{key}{place}{_suggestion(location, dash)}"
    if first["type"] == "missing":
        return f"{key} is required: set it in the TOML file or pass --{key} VALUE"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    value = repr(first["input"])
    short = value if len(value) <= 80 else value[:77] + "..."
    shown = f"{key} = {short}{f' ({origin})' if origin else ''}"
    section = section_at(location)
    if first["type"] == "model_type" and section is not None:
        keys = ", ".join(section.model_fields)
        return f"{shown}: a section, not a value: set {dash}{key}.KEY, where KEY is one of {keys}"
    items = f"a list of sections: write [[{key}]] above each" if value[0] == "{" else f"a list, [{value}]"
    form = f"the form {first.get('ctx', {}).get('pattern')}"
    forms = {"dict_type": f"a table, such as {{ id = {value} }}", "list_type": items, "string_pattern_mismatch": form}
    said = [str(forms.get(each["type"], each["msg"].removeprefix("Input should be "))) for each in problems]
    said[-1] += _meaning(location, first["type"])
    return f"{shown}: expected {' or '.join(dict.fromkeys(said))}"


def _meaning(location: Location, mistake: str) -> str:
    """Return what the help says of a key whose number or form is wrong, in brackets."""
    section = section_at(location[:-1]) if mistake.startswith(("greater_than", "less_than", "string_pattern")) else None
    text = _descriptions(section).get(str(location[-1])) if section else None
    return f" ({' '.join(text.split()).removeprefix('* ').rstrip('.')})" if text else ""


def _suggestion(location: Location, dash: str) -> str:
    """Return `; did you mean a.b?`, else the section's keys. `dash`: what stands before a key."""
    *parents, name = location
    section = section_at(tuple(parents))
    fields = list(section.model_fields) if section is not None else []
    inside = "".join(f"{parent}." for parent in parents)
    named = [key for key in key_types() if key.rpartition(".")[2] == name]
    below = [key for key in named if parents and key.startswith(inside)]
    near = [inside + each for each in difflib.get_close_matches(str(name), fields, n=1, cutoff=0.8 if below else 0.6)]
    if found := near + below or named or _described(str(name), inside):
        return f"; did you mean {' or '.join(dash + key for key in found[:3])}?"
    return f"; keys of [{_dotted(parents)}]: {', '.join(fields)}"


def _described(name: str, inside: str) -> list[str]:
    """Return the keys whose help has the words of `name`, such as lr for learning_rate; those below `inside` first."""
    words = name.replace("_", " ").lower()
    sections = {"": Config} | {f"{key}.": section for key, kind in key_types().items() if (section := section_of(kind))}
    keys = [
        prefix + key
        for prefix, section in sections.items()
        for key, text in _descriptions(section).items()
        if words in " ".join(text.lower().split())
    ]
    return sorted(keys, key=lambda key: not key.startswith(inside)) if " " in words else []


@functools.cache
def key_types() -> dict[str, Any]:
    """Return the type of every dotted key; a list's elements stand below its name (orchestrator.source.weight)."""
    types_by_key: dict[str, Any] = {}

    def add(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            types_by_key[prefix + name] = field.annotation
            if inner := section_of(field.annotation):
                add(inner, f"{prefix}{name}.")

    add(Config, "")
    return types_by_key


@functools.cache
def key_defaults() -> dict[str, Any]:
    """Return the default of every dotted key that has one, as JSON holds it."""
    fields: dict[str, type[BaseModel]] = {"": Config}
    for key, kind in key_types().items():
        if section := section_of(kind):
            fields[f"{key}."] = section
    return {
        prefix + name: to_jsonable_python(field.get_default(call_default_factory=True))
        for prefix, section in fields.items()
        for name, field in section.model_fields.items()
        if not field.is_required()
    }


def is_kind(annotation: Any, *kinds: type) -> bool:
    """Return whether a value of the key may be a list, a table or the like."""
    return any(get_origin(member) in kinds for member in _members(annotation))


def _key_location(location: Location) -> Location:
    """Return `location` without the union members that pydantic appends."""
    for end in range(len(location), 0, -1):
        annotation = key_types().get(_dotted(names_of(location[:end])))
        if annotation is not None:
            opens = section_of(annotation) is not None or is_kind(annotation, dict)
            return location if opens else location[:end]
    return location


def section_at(location: Location) -> type[BaseModel] | None:
    """Return the section that `location` names; None for anything else."""
    if not location:
        return Config
    annotation = key_types().get(_dotted(names_of(location)))
    in_list = str(location[-1]).isdecimal()
    return None if is_kind(annotation, list) and not in_list else section_of(annotation)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section behind a key, also an optional one or a list's elements."""
    for member in _members(annotation):
        for candidate in get_args(member) if get_origin(member) is list else (member,):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                return candidate
    return None


def names_of(location: Sequence[str | int]) -> list[str]:
    return [str(segment) for segment in location if not str(segment).isdecimal()]


def _dotted(location: Sequence[str | int]) -> str:
    return ".".join(map(str, location))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
