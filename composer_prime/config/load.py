"""From the command line to a checked `Config`: `@ file.toml`, dotted flags, --resume, --dry-run.

    words -> layers.py: files, with their bases -> values
          -> apply_flags                        -> values -> Config, validated once
                                                       -> problems.py: what is wrong, in sentences

Imports no torch: --help answers at once. A flag's word stays text, of which pydantic makes numbers and switches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError, create_model
from pydantic_config import BaseConfig, cli

from composer_prime.config.layers import Layer, merge_layers, read_layers
from composer_prime.config.problems import COMMAND_LINE, is_kind, key_types, names_of, wrong_config
from composer_prime.config.removed import without_removed
from composer_prime.config.root import Config
from composer_prime.console import did_you_mean, fail, program
from composer_prime.errors import ConfigError

Location = tuple[str, ...]


def apply_flags(values: dict[str, Any], words: list[str]) -> Layer:
    """Set in `values` what the flags in `words` say, and return it as a layer. Raises ConfigError."""
    layer = Layer(origin=COMMAND_LINE, values={})
    for name, given in _read(words):
        location = tuple(name.replace("-", "_").split("."))
        turns_off = location[0].startswith("no_") and not given
        if turns_off:
            location = (location[0].removeprefix("no_"), *location[1:])
        if not given and _kind(location) not in (bool, None):
            raise ConfigError(f"--{name} needs a value: only a switch has none")
        _put(values, location, _value(location, given) if given else not turns_off)
        mark = layer.values
        for key in location:
            mark = mark.setdefault(key, {})
    return layer


def _kind(location: Location) -> Any:
    return key_types().get(".".join(names_of(location)))


def _read(words: list[str]) -> list[tuple[str, list[str]]]:
    """Return each flag's name with its words. Raises ConfigError."""
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
    """Return the value that `words` spell: several are a list, and lists and tables may be JSON."""
    if len(words) > 1:
        return words
    word, kind = words[0], _kind(location)
    if word == "None":
        return None
    if kind is None:  # In a free table, or a key that is not known.
        try:
            return json.loads(word)
        except ValueError:
            return word
    takes_list = is_kind(kind, list, tuple) and not location[-1].isdecimal()
    if word[:1] in ("[", "{") and (takes_list or is_kind(kind, dict)):
        try:
            return json.loads(word)
        except ValueError as error:
            raise ConfigError(f"--{'.'.join(location)} {word}: starts like JSON but is not: {error}") from None
    return [word] if takes_list else word


def _put(values: dict[str, Any], location: Location, value: Any) -> None:
    """Set `value`, and the tables on the way to it. Raises ConfigError."""
    node: Any = values
    for key in location[:-1]:
        index = _index(node, key, location)
        if isinstance(node, dict) and node.get(key) in (None, "None"):
            node[key] = {}
        node = node[index]
    node[_index(node, location[-1], location)] = value


def _index(node: Any, key: str, location: Location) -> str | int:
    if isinstance(node, dict):
        return key
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        return int(key)
    what = f"a list of {len(node)}, counted from 0" if isinstance(node, list) else f"the value {node!r}"
    raise ConfigError(f"--{'.'.join(location)}: there is no {key} in {what}")


def parse_command_line(argv: list[str]) -> tuple[Config, bool]:
    """Return the configuration, and whether to print the plan and stop.

    For main functions: prints what is wrong and exits with status 2, or prints the help and exits with 0.
    """
    try:
        if asked := {"--help", "-h"} & set(argv):
            following = argv[argv.index(min(asked)) + 1 :]
            _print_help(following[0] if following and following[0][0] not in "-@" else "")
        return resolve(argv), "--dry-run" in argv
    except ConfigError as error:
        fail(error)


def resolve(argv: list[str]) -> Config:
    """Return the configuration of the words. Raises ConfigError with everything that is wrong."""
    words = [word for word in argv if word not in ("--dry-run", "--resume")]
    if "--resume" in argv:
        words += ["--run.resume", "true"]
    if not words:
        raise ConfigError(f"no configuration given; start with `{program()} @ a1` (--help lists the keys)")
    files, words = read_layers(words)
    values = merge_layers(files)
    config = _checked(values, [*files, apply_flags(values, words)])
    folders, homes = config.run.import_from, [Path(layer.origin).resolve().parent for layer in reversed(files)]
    for folder in dict.fromkeys(homes):
        if folder not in folders and (any(folder.glob("*.py")) or any(folder.glob("*/__init__.py"))):
            folders.append(folder)
    make_importable(config)
    return config


def _checked(values: dict[str, Any], layers: list[Layer]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise wrong_config(error, layers) from None


def read_config(path: Path) -> Config:
    """Return the configuration in `path`, the config.json of a run directory. Raises ConfigError.

    Removed keys are left out with a warning. Call make_importable where the run's own code is to run.
    """
    try:
        values = without_removed(json.loads(path.read_text()), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: start the run with `trainer @ file.toml`") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return _checked(values, [Layer(origin=str(path), values=values)])


def make_importable(config: Config) -> None:
    """Let this process import the modules of run.import_from, after what is installed."""
    sys.path += [str(folder) for folder in config.run.import_from if str(folder) not in sys.path]


def dump(config: Config) -> str:
    """Return `config` as indented JSON. It holds no secrets."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def _print_help(section: str) -> NoReturn:
    """Print the keys of a section, or of all with "". Raises ConfigError."""
    known = Config.model_fields
    if section and section not in known:
        raise ConfigError(f"--help {section}: no such section{did_you_mean(section, known)}")
    chosen = {name: (known[name].annotation, ...) for name in known if not section or name == section}
    part: Any = create_model("Part", __base__=BaseConfig, **chosen)  # pyright: ignore[reportCallIssue, reportArgumentType]
    usage = f"usage: {program()} @ FILE.toml [@ FILE.toml ...] [--section.key VALUE ...] [--resume] [--dry-run]"
    print(f"{usage}\n\n{_DESCRIPTION}\n")
    cli(part, args=["--help"])
    raise SystemExit(0)


_DESCRIPTION = """\
@ FILE reads a TOML file; with several, later files win. A file with base = "a1.toml" at its top states only what
differs from that one. --section.key VALUE overrides a key, also of a list element: --orchestrator.source.0.weight 2.
--resume continues from the newest complete checkpoint (short for --run.resume true). --dry-run checks everything,
prints the plan and stops. --help SECTION shows the keys of one section."""
