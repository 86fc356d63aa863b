"""From the command line to a checked `Config`: `@ file.toml` overlays, dotted overrides, --resume, --dry-run.

pydantic_config merges the overlays and overrides and validates once; `elements.py` adds overrides of list elements,
`problems.py` turns what is wrong into sentences. Imports no torch: --help and --dry-run answer at once.

Overrides of one element of a list or one entry of a free table: `--orchestrator.source.0.taskset.num_tasks 64`.

pydantic_config replaces a list whole or not at all. So each such override is applied to the list as the files give it,
and the outcome is handed on as one JSON value.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_config import ConfigFileError, cli

from composer_prime.config.problems import Overlay, command_line, describe_problems, read_overlays, spelled, wrong_flags
from composer_prime.config.root import Config
from composer_prime.console import fail, pluralize, program, what_is_wrong
from composer_prime.errors import ConfigError


def fold_elements(words: list[str], overlays: list[Overlay]) -> list[str]:
    """`words` with every override through a list position replaced by one JSON override of the whole list."""
    kept: list[str] = []
    lists: dict[str, list[Any]] = {}
    index = 0
    while index < len(words):
        flag, equals, value = words[index].partition("=")
        position = _position(flag)
        if position is None:
            kept.append(words[index])
            index += 1
            continue
        if not equals:
            index += 1
            if index == len(words) or words[index].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            value = words[index]
        keys = flag[2:].replace("-", "_").split(".")
        name = ".".join(keys[:position])
        if name not in lists:
            lists[name] = _current(keys[:position], overlays, flag)
        _assign(lists[name], keys[position:], _literal(value), flag)
        index += 1
    for name, elements in lists.items():
        kept += [f"--{name.replace('_', '-')}", json.dumps(elements)]
    return kept


def _position(flag: str) -> int | None:
    """Where the first list position stands among the flag's segments."""
    if not flag.startswith("--"):
        return None
    segments = flag[2:].split(".")
    return next((index for index, segment in enumerate(segments) if index and segment.isdigit()), None)


def _current(keys: list[str], overlays: list[Overlay], flag: str) -> list[Any]:
    """A copy of the list at `keys` as the last file that sets it gives it."""
    for overlay in reversed(overlays):
        if overlay.holds(tuple(keys)):
            node: Any = overlay.values
            for key in keys:
                node = node[key]
            if isinstance(node, list):
                return copy.deepcopy(node)
            raise ConfigError(f"{flag}: {'.'.join(keys)} is no list in {overlay.origin}")
    raise ConfigError(f"{flag}: no configuration file sets the list {'.'.join(keys)}, so it has no element to override")


def _assign(elements: list[Any], keys: list[str], value: Any, flag: str) -> None:
    position = int(keys[0])
    if position >= len(elements):
        held = pluralize(len(elements), "element")
        raise ConfigError(f"{flag}: the list has {held}, counted from 0, so none at {position}")
    if len(keys) == 1:
        elements[position] = value
        return
    node = elements[position]
    for key in keys[1:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError(f"{flag} goes through a value that is no table")
    node[keys[-1]] = value


def _literal(text: str) -> Any:
    """A command-line word as the value TOML would make of it; anything else stays text."""
    if text == "None":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What a role's command line asked for."""

    config: Config
    dry_run: bool
    """Print the plan and stop."""


def parse_command_line(argv: list[str]) -> CommandLine:
    """Parse `@ base.toml @ overlay.toml --trainer.optim.lr 3e-4 --resume --dry-run`.

    Prints what is wrong (with a did-you-mean for unknown keys) to stderr and exits with status 2, or prints the help
    and exits with status 0.
    """
    if {"--help", "-h"} & set(argv):
        _help()
    try:
        return resolve(argv)
    except ConfigError as error:
        fail(error)


def resolve(argv: list[str]) -> CommandLine:
    """`parse` for callers that handle the error. Raises ConfigError."""
    words = _split_signs([word for word in argv if word not in ("--dry-run", "--resume")])
    if "--resume" in argv:
        words += ["--run.resume", "true"]
    _refuse_stray_files(words)
    overlays = read_overlays(words)
    layers = [*overlays, command_line(words)]
    if not any(layer.values for layer in layers):
        raise ConfigError(f"no configuration given; start with `{program()} @ configs/a1.toml` (--help lists the keys)")
    wrong, words = wrong_flags(words)
    try:
        config = cli(Config, args=[spelled(word) for word in fold_elements(words, overlays)])
    except ConfigFileError as error:
        raise ConfigError(what_is_wrong([*wrong, *_explain(error, layers)])) from None
    except json.JSONDecodeError as error:
        wrong.append(f"a value on the command line starts like JSON but is not: {error}")
        raise ConfigError(what_is_wrong(wrong)) from None
    except ConfigError as error:
        raise ConfigError(what_is_wrong([*wrong, str(error)])) from None
    if wrong:
        raise ConfigError(what_is_wrong(wrong))
    return CommandLine(config=config, dry_run="--dry-run" in argv)


def read_config(path: Path) -> Config:
    """The resolved configuration that the launcher wrote to `path` (config.json of a run directory).

    Raises ConfigError when the file is missing or was written for another release's keys.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: start the run with `trainer @ file.toml`") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(what_is_wrong(describe_problems(error, [Overlay(origin=str(path), values=values)]))) from None


def dump(config: Config) -> str:
    """`config` as indented JSON. Holds no secrets: these live in key files and the environment only."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def _help() -> NoReturn:
    """Print every key with its docstring. pydantic_config reads base classes' source once a section: remember it."""
    inspect.getsource = functools.cache(inspect.getsource)
    cli(Config, args=["--help"], prog=program(), description=_DESCRIPTION)  # pyright: ignore[reportCallIssue]
    raise SystemExit(0)


def _split_signs(words: list[str]) -> list[str]:
    """`@file.toml` means `@ file.toml`."""
    split = []
    for index, word in enumerate(words):
        value_of_flag = index > 0 and words[index - 1].startswith("--") and "=" not in words[index - 1]
        split += [word] if not word.startswith("@") or word == "@" or value_of_flag else ["@", word[1:]]
    return split


def _refuse_stray_files(words: list[str]) -> None:
    for before, word in zip(["", *words], words, strict=False):
        if word.endswith(".toml") and before != "@" and not before.startswith("--") and not word.startswith("--"):
            raise ConfigError(f"{word}: a configuration file stands after an @ sign: {program()} @ {word}")


def _explain(error: ConfigFileError, layers: list[Overlay]) -> list[str]:
    cause = error.__cause__
    return describe_problems(cause, layers) if isinstance(cause, ValidationError) else [error.message]


_DESCRIPTION = """\
@ FILE reads a TOML file; with several, later files win. --section.key VALUE overrides a key, also of a list element:
--orchestrator.source.0.weight 2. --resume continues from the newest complete checkpoint (short for --run.resume true).
--dry-run checks everything, prints the plan and stops."""
