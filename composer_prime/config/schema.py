"""`Config` as a tree of keys: which there are, and what stands behind a dotted one. Reads types, never values."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from composer_prime.config.root import Config

Location = tuple[str | int, ...]


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key; elements of a list stand below its own name (`orchestrator.source.weight`)."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        inner = _inner_model(field.annotation)
        if inner is not None:
            keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def names_of(location: Location) -> list[str]:
    """`location` without list positions."""
    return [str(segment) for segment in location if not str(segment).isdigit()]


def is_known(location: Location) -> bool:
    return _walk(location)[0] is not None


def ends_in_field(location: Location) -> bool:
    name = ".".join(names_of(location))
    return name in known_keys() or name.removeprefix("no_") in known_keys()


def real_location(location: Location) -> Location:
    """`location` without the names of union members that pydantic appends."""
    return _walk(location, strict=False)[0] or location


def section_at(location: Location) -> type[BaseModel] | None:
    """The section that `location` names; None when it names a value, a list, a free table or nothing."""
    found, annotation = _walk(location)
    lists = _is(annotation, list, tuple)
    return _inner_model(annotation) if found is not None and not lists else None


def choices(annotation: Any) -> tuple[Any, ...]:
    """What a field that takes fixed words takes."""
    fixed = [option for option in _options(annotation) if get_origin(option) is Literal]
    return tuple(value for option in fixed for value in get_args(option))


def _walk(location: Location, strict: bool = True) -> tuple[Location | None, Any]:
    """The part of `location` that is made of fields, list positions and free-table keys, and the type behind it.

    With `strict`, None when any segment is none of these.
    """
    annotation: Any = Config
    for depth, segment in enumerate(location):
        model = _inner_model(annotation)
        position = isinstance(segment, int) or segment.isdigit()
        if position and _is(annotation, list, tuple):
            annotation = model
        elif _is(annotation, dict):
            return location, Any
        elif model is not None and segment in model.model_fields and not _is(annotation, list):
            annotation = model.model_fields[str(segment)].annotation
        elif strict:
            return None, None
        else:
            return (location if model is not None else location[:depth]), None
    return location, annotation


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
