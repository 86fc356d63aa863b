"""From the command line to a checked `Config`: `@ file.toml`, dotted flags, --resume, --dry-run.

    words -> layers.py: files, with their bases      -> values
          -> flags of list elements                  -> values
          -> other flags, by pydantic_config         -> Config, validated once
                                                     -> problems.py: what is wrong, in sentences

Imports no torch: --help and --dry-run answer at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_config import ConfigFileError, cli

from composer_prime.config.layers import Layer, flag_layer, merge_layers, read_layers
from composer_prime.config.problems import describe_problems, spell_flag, split_wrong_flags
from composer_prime.config.removed import without_removed
from composer_prime.config.root import Config
from composer_prime.console import columns, fail, pluralize, program, what_is_wrong
from composer_prime.data.conversation_rows import count_rows
from composer_prime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The request of a role's command line."""

    config: Config
    dry_run: bool
    """Print the plan and stop."""


def parse_command_line(argv: list[str]) -> CommandLine:
    """Parse `@ base.toml @ overlay.toml --trainer.optim.lr 3e-4 --resume --dry-run`.

    For main functions: prints what is wrong to stderr and exits with status 2, or prints the help and exits with
    status 0.
    """
    try:
        if asked := {"--help", "-h"} & set(argv):
            following = argv[argv.index(min(asked)) + 1 :]
            _print_help(following[0] if following and following[0][0] not in "-@" else "")
        return resolve(argv)
    except ConfigError as error:
        fail(error)


def resolve(argv: list[str]) -> CommandLine:
    """Parse as `parse_command_line` does. Raises ConfigError with everything that is wrong."""
    words = [word for word in argv if word not in ("--dry-run", "--resume")]
    if "--resume" in argv:
        words += ["--run.resume", "true"]
    files, flags = read_layers(words)
    _refuse_stray_files(flags)
    layers = [*files, flag_layer(flags)]
    if not any(layer.values for layer in layers):
        raise ConfigError(
            f"no configuration given; start with `{program()} @ configs/a1.toml` (--help lists the sections)"
        )
    sentences, flags = split_wrong_flags(flags)
    try:
        values = merge_layers(files)
        flags = _set_list_elements(values, flags)
        args = [spell_flag(word) for word in flags]
        config: Config = cli(Config, args=args, default=_Values(**values))  # pyright: ignore
    except ConfigFileError as error:
        cause = error.__cause__
        sentences += describe_problems(cause, layers) if isinstance(cause, ValidationError) else [error.message]
    except json.JSONDecodeError as error:
        sentences.append(f"a value on the command line starts like JSON but is not: {error}")
    except ConfigError as error:
        sentences.append(str(error))
    else:
        if not sentences:
            folders = config.run.import_from
            folders += [folder for folder in _module_folders(files) if folder not in folders]
            make_importable(config)
            config = _with_epochs(config, layers)
            return CommandLine(config=config, dry_run="--dry-run" in argv)
    raise ConfigError(what_is_wrong(sentences))


def _with_epochs(config: Config, layers: list[Layer]) -> Config:
    """Return `config` with run.max_steps in place of orchestrator.demonstrations.epochs, where that is set.

    max_steps = 0, an evaluation only, stays. Raises ConfigError when both are set, a file is missing or empty, or this
    length breaks a rule.
    """
    settings = config.orchestrator.demonstrations
    if settings.epochs is None or config.run.max_steps == 0:
        return config
    if "max_steps" in config.run.model_fields_set:
        raise ConfigError(
            f"run.max_steps is {config.run.max_steps} and orchestrator.demonstrations.epochs is {settings.epochs}: "
            "both give the length of the run; remove one"
        )
    if config.orchestrator.address is not None and not all(file.expanduser().is_file() for file in settings.files):
        raise ConfigError(
            f"orchestrator.demonstrations.epochs is {settings.epochs}, but this machine lacks the files whose rows it "
            f"counts (the orchestrator is at {config.orchestrator.address}): set run.max_steps instead on both sides"
        )
    rows = count_rows(settings.files, "orchestrator.demonstrations.files")
    values = config.model_dump()
    values["run"]["max_steps"] = settings.epochs * settings.steps_per_pass(rows)
    values["orchestrator"]["demonstrations"]["epochs"] = None  # config.json has one length
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(what_is_wrong(describe_problems(error, layers))) from None


def read_config(path: Path) -> Config:
    """Return the configuration that the launcher wrote to `path` (config.json of a run directory).

    The caller makes run.import_from importable where it runs the run's code; one that only reads does not.
    Keys that this release no longer has are left out, with a warning. Raises ConfigError when the file is missing or
    has keys that no release had.
    """
    try:
        values = without_removed(json.loads(path.read_text()), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: start the run with `trainer @ file.toml`") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(what_is_wrong(describe_problems(error, [Layer(origin=str(path), values=values)]))) from None


def make_importable(config: Config) -> None:
    """Let this process import the modules of run.import_from. What is installed comes first."""
    sys.path += [str(folder) for folder in config.run.import_from if str(folder) not in sys.path]


def _module_folders(files: list[Layer]) -> list[Path]:
    """Return the folders of these files that hold Python modules, that of the strongest file first."""
    folders = dict.fromkeys(Path(layer.origin).resolve().parent for layer in reversed(files))
    return [folder for folder in folders if any(folder.glob("*.py")) or any(folder.glob("*/__init__.py"))]


def dump(config: Config) -> str:
    """Return `config` as indented JSON. It holds no secrets: these are in key files and the environment only."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


class _Values(BaseModel):
    """Values of files, unchecked, in the form in which pydantic_config lays flags over them."""

    model_config = ConfigDict(extra="allow")


def _refuse_stray_files(words: list[str]) -> None:
    for before, word in zip(["", *words], words, strict=False):
        is_value = before.startswith("--") and "." in before  # as of --orchestrator.hints.templates_file
        if word.endswith(".toml") and not is_value and not word.startswith("--"):
            raise ConfigError(f"{word}: put @ before a configuration file: {program()} @ {word}")


def _set_list_elements(values: dict[str, Any], words: list[str]) -> list[str]:
    """Apply flags such as `--orchestrator.source.0.taskset.num_tasks 64` to `values`; return the other words.

    pydantic_config replaces a list whole or not at all. Raises ConfigError for an element that no file sets, and where
    another flag replaces the whole list: one of the two would be lost.
    """
    rest: list[str] = []
    element_flags: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or not any(key.isdecimal() for key in flag[2:].split(".")[1:]):
            rest.append(word)
            continue
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            value = queue.pop(0)
        _set_list_element(values, flag, _literal(value))
        element_flags.append(flag)
    for whole, element in itertools.product(rest, element_flags):
        name = whole.partition("=")[0].replace("-", "_")
        if whole.startswith("--") and f"{element.replace('-', '_')}.".startswith(f"{name}."):
            raise ConfigError(
                f"{whole.partition('=')[0]} replaces what {element} changes an element of: give one of the two, or put "
                "the change into the whole value"
            )
    return rest


def _set_list_element(values: dict[str, Any], flag: str, value: Any) -> None:
    keys = [int(key) if key.isdecimal() else key for key in flag[2:].replace("-", "_").split(".")]
    node: Any = values
    key = keys[0]
    try:
        for key, following in itertools.pairwise(keys):
            is_new_table = isinstance(node, dict) and isinstance(following, str)
            node = node.setdefault(key, {}) if is_new_table else node[key]
        key = keys[-1]
        node[key] = value
    except IndexError:
        count = pluralize(len(node), "element")
        raise ConfigError(f"{flag}: the list has {count}, counted from 0, so none at {key}") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{flag}: no configuration file sets the list, so it has no element to override") from None


def _literal(text: str) -> Any:
    """Return a command-line word as the value TOML would make of it; anything else stays text."""
    if text == "None":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _print_help(topic: str) -> NoReturn:
    """Print the sections, the keys of section `topic`, or every key for "all", from their docstrings.

    Raises ConfigError for an unknown section.
    """
    sections = _help_by_section(max(100, columns() or 0) if topic else 200)
    if topic and topic != "all" and not (chosen := [name for name in sections if _is_within(name, topic)]):
        raise ConfigError(f"--help {topic}: no such section; choose one of {', '.join(sections)}")
    print(f"usage: {program()} @ FILE.toml [@ FILE.toml ...] [--section.key VALUE ...] [--resume] [--dry-run]\n")
    if topic:
        print("\n".join(sections[name] for name in (sections if topic == "all" else chosen)))
        raise SystemExit(0)
    print(
        f"{_DESCRIPTION}\n\nSections (--help SECTION lists the keys of one, as --help run; --help all lists every key):"
    )
    print("\n".join(_outline(sections)))
    raise SystemExit(0)


def _outline(sections: dict[str, str]) -> Iterator[str]:
    """Yield each top section with its meaning, and below it the names of its parts."""
    tops = dict.fromkeys(re.split(r"[.\[]", name)[0] for name in sections)
    for top in tops:
        title = sections.get(top, "").partition("\n")[0].partition(": ")[2].split(" (")[0].rstrip(" ─╮")
        # A table of tables has no box of its own.
        yield f"  {top:<13} {title or Config.model_fields[top].annotation.__doc__ or ''}".rstrip()
        parts = [name.removeprefix(top).removeprefix(".") for name in sections if name != top and _is_within(name, top)]
        indent = " " * 16
        yield from wrap(", ".join(parts), 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _is_within(section: str, topic: str) -> bool:
    """Whether `section`, as --help names it, is `topic` or below it."""
    plain = topic.removeprefix("--").replace("_", "-")
    return section == plain or section.startswith((f"{plain}.", f"{plain}["))


def _help_by_section(width: int) -> dict[str, str]:
    """Return the help of each section, drawn by pydantic_config as a box, by the section's name."""
    # pydantic_config reads the source of base classes once for each section, which takes most of a second.
    inspect.getsource = functools.cache(inspect.getsource)
    printed, width_before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli(Config, args=["--help"], prog=program())  # pyright: ignore[reportCallIssue]
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if width_before is None else {"COLUMNS": width_before})
    boxes = re.findall(r"^(╭─ (\S+): .*?^╰[^\n]*\n)", printed.getvalue(), re.MULTILINE | re.DOTALL)
    return {name: box for box, name in boxes}


_DESCRIPTION = """\
@ FILE reads a TOML file; with several, later files win. A file with base = "a1.toml" at its top states only what
differs from that one. --section.key VALUE overrides a key, also of a list element: --orchestrator.source.0.weight 2.
--resume continues from the newest complete checkpoint (short for --run.resume true). --dry-run checks everything,
prints the plan and stops."""
