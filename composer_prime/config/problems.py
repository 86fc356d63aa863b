"""What is wrong with a configuration, in sentences: the key, its value, where it was set, what is expected."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from composer_prime.config.agreement import DisagreementError
from composer_prime.config.overlays import Overlay
from composer_prime.config.remedies import for_unknown_key, for_value
from composer_prime.config.schema import Location, ends_in_field, is_known, real_location


def describe(error: ValidationError, layers: Sequence[Overlay]) -> list[str]:
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
