"""What is wrong with a configuration, in sentences: the key, its value, where it was set, what is expected.

`Config` as a tree of keys: which there are, and what stands behind a dotted one. Reads types, never values.

What somebody who wrote a key that does not exist, or a value where a section is, most likely meant.

In this order, keys of the same section first:
1. a key with this choice: `diloco.codec.int4` is `diloco.codec.type`
2. a key whose docstring begins with this word: `diloco.tau` is `diloco.delay`, whose docstring says "tau: ..."
3. a key of nearly this name; keys of this name in other sections; where there is no such section, a nearly equal path

The layers a configuration comes from (files, then the command line), kept apart so that messages can name them.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import json
import re
import textwrap
import tomllib
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from composer_prime.config.root import Config, DisagreementError
from composer_prime.errors import ConfigError

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


def for_unknown_key(location: Location, dash: str = "") -> str:
    """`; did you mean a.b?`, else the keys that its section has. `dash`: what stands before a key."""
    *parents, name = names_of(location)
    section = section_at(location[:-1]) if len(location) > 1 else Config
    key = lambda own: dash + _dotted((*location[:-1], own))
    if section is not None:
        if chosen := _with_choice(section, name):
            return _mean(_set(key(chosen), name, dash))
        if meant := _described_as(section, name):
            return _mean(*map(key, meant))
        if close := difflib.get_close_matches(name, list(section.model_fields), n=1, cutoff=0.6):
            return _mean(key(close[0]))
    parent, path = ".".join(parents), ".".join([*parents, name])
    keys = [each for each in known_keys() if not path.startswith(f"{each}.")]
    below = [each for each in keys if each.startswith(f"{parent}.") and each.rpartition(".")[2] == name]
    same_name = below or [each for each in keys if each.rpartition(".")[2] == name]
    if section is None and not same_name:
        same_name = difflib.get_close_matches(path, keys, n=1, cutoff=0.6)
    if same_name:
        return _mean(*(dash + each for each in same_name[:3]))
    if section is None:
        return ""
    return f"; keys of {f'[{parent}]' if parent else 'the file'}: " + ", ".join(section.model_fields)


def for_value(location: Location, value: object, dash: str = "") -> str | None:
    """What is meant by `value` where `location` names a section; None where it names none."""
    section = section_at(location)
    if section is None:
        return None
    key = dash + _dotted(location)
    if chosen := _with_choice(section, value):
        return "a section, not a value" + _mean(_set(f"{key}.{chosen}", value, dash))
    return f"a section, not a value: set {key}.KEY, where KEY is one of {', '.join(section.model_fields)}"


def _with_choice(section: type[BaseModel], word: object) -> str | None:
    """The field that takes `word`, where it is one of few."""
    return next((name for name, field in section.model_fields.items() if word in choices(field.annotation)), None)


def _described_as(section: type[BaseModel], word: str) -> list[str]:
    """Fields whose docstring begins with `word`: a paper's symbol for them."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    return [
        field.target.id
        for field, text in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        and re.match(rf"{re.escape(word)}( of |: )", str(text.value.value), re.IGNORECASE)
    ]  # fmt: skip


def _set(key: str, value: object, dash: str) -> str:
    return f"{key} {value}" if dash else f"{key} = {value!r}"


def _mean(*keys: str) -> str:
    return f"; did you mean {' or '.join(keys)}?"


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


def describe_problems(error: ValidationError, layers: Sequence[Overlay]) -> list[str]:
    """One sentence for each wrong key, in the order of the sections; `layers` tell where each was set."""
    merged: dict[Location, list[Any]] = {}
    for problem in error.errors():
        merged.setdefault(real_location(problem["loc"]), []).append(problem)
    return [each for location, problems in merged.items() for each in _sentences(location, problems, layers)]


def wrong_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """One sentence for each `--flag` that names no key, or a section and has one value; and the other words."""
    sentences: list[str] = []
    kept: list[str] = []
    in_wrong = False
    for word, following in itertools.pairwise([*words, ""]):
        if word.startswith("--"):
            sentence = _wrong_flag(word, following)
            in_wrong = sentence is not None
            sentences += [sentence] if sentence is not None else []
        elif word == "@":
            in_wrong = False
        if not in_wrong:
            kept.append(word)
    return sentences, kept


def _wrong_flag(word: str, following: str) -> str | None:
    """What is wrong with flag `word`, in words; `following` is its value unless it holds one itself."""
    name, equals, value = word[2:].partition("=")
    location = tuple(name.replace("-", "_").split("."))
    if not is_known(location):
        bare = tuple(name.removeprefix("no-").replace("-", "_").split("."))
        return None if is_known(bare) else f"unknown option --{name}{for_unknown_key(location, '--')}"
    value = value if equals else following
    if not value or value == "@" or value == "None" or value.startswith(("{", "--")):
        return None
    meant = for_value(location, value, "--")
    return None if meant is None else f"--{name} {value}: {meant}"


def spelled(word: str) -> str:
    """A flag as pydantic_config knows it: dashes for underscores in names of fields; free tables stay as written."""
    flag, equals, value = word.partition("=")
    location = tuple(flag[2:].replace("-", "_").split("."))
    if not flag.startswith("--") or "_" not in flag or not ends_in_field(location):
        return word
    return flag.replace("_", "-") + equals + value


def _sentences(location: Location, problems: list[Any], layers: Sequence[Overlay]) -> list[str]:
    cause = problems[0].get("ctx", {}).get("error")
    return cause.sentences if isinstance(cause, DisagreementError) else [_sentence(location, problems, layers)]


def _sentence(location: Location, problems: list[Any], layers: Sequence[Overlay]) -> str:
    first = problems[0]
    key, where = _dotted(location), _origin(location, layers)
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{where}{for_unknown_key(location)}"
    if first["type"] == "missing":
        return f"{key} is required: set it in the TOML file or pass --{key} VALUE"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type" and (meant := for_value(location, first["input"])):
        return f"{key} = {_shown(first['input'])}{where}: {meant}"
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
