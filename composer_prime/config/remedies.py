"""What somebody who wrote a key that does not exist, or a value where a section is, most likely meant.

In this order, keys of the same section first:
1. a key with this choice: `diloco.codec.int4` is `diloco.codec.type`
2. a key whose docstring begins with this word: `diloco.tau` is `diloco.delay`, whose docstring says "tau: ..."
3. a key of nearly this name; keys of this name in other sections; where there is no such section, a nearly equal path
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import re
import textwrap

from pydantic import BaseModel

from composer_prime.config.root import Config
from composer_prime.config.schema import Location, choices, known_keys, names_of, section_at


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


def _dotted(location: Location) -> str:
    return ".".join(str(segment) for segment in location)
