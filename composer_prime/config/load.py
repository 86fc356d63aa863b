"""From the command line to a checked `Config`: `@ file.toml`, dotted flags, --resume, --dry-run.

    words -> layers.py: files, with their bases -> values
          -> flags.py                           -> values -> Config, validated once
                                                       -> problems.py: what is wrong, in sentences

Imports no torch: --help and --dry-run answer at once.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent, wrap
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from composer_prime.config.flags import apply_flags
from composer_prime.config.layers import Layer, merge_layers, read_layers
from composer_prime.config.problems import describe_problems, key_types, section_of
from composer_prime.config.removed import without_removed
from composer_prime.config.root import Config
from composer_prime.console import fail, program, what_is_wrong
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
    if not words:
        raise ConfigError(
            f"no configuration given; start with `{program()} @ configs/a1.toml` (--help lists the sections)"
        )
    files, words = read_layers(words)
    values = merge_layers(files)
    flags, sentences = apply_flags(values, words)
    layers = [*files, flags]
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        sentences += describe_problems(error, layers)
    if sentences:
        raise ConfigError(what_is_wrong(sentences))
    folders = config.run.import_from
    folders += [folder for folder in _module_folders(files) if folder not in folders]
    make_importable(config)
    return CommandLine(config=_with_epochs(config, layers), dry_run="--dry-run" in argv)


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


def _print_help(topic: str) -> NoReturn:
    """Print the sections, the keys of section `topic` and those below it, or every key for "all".

    Raises ConfigError for an unknown section.
    """
    sections = {key: section for key, kind in key_types().items() if (section := section_of(kind))}
    chosen = [name for name in sections if topic == "all" or f"{name}.".startswith(f"{topic.replace('-', '_')}.")]
    if topic and not chosen:
        raise ConfigError(f"--help {topic}: no such section; choose one of {', '.join(sections)}")
    print(f"usage: {program()} @ FILE.toml [@ FILE.toml ...] [--section.key VALUE ...] [--resume] [--dry-run]")
    lines = [line for name in chosen for line in _keys(name, sections[name])] if topic else _outline(list(sections))
    print("\n".join(lines))
    raise SystemExit(0)


def _outline(sections: list[str]) -> Iterator[str]:
    """Yield the lines of --help without a section."""
    yield f"\n{_DESCRIPTION}\n\nSections (--help SECTION lists the keys of one, --help all lists every key):"
    meanings = _docstrings(Config)
    for top in Config.model_fields:
        yield f"  {top:<13} {meanings[top]}"
        parts = [name.removeprefix(f"{top}.") for name in sections if name.startswith(f"{top}.")]
        yield from (f"{'':<15} {line}" for line in wrap(", ".join(parts), 100))


def _keys(name: str, section: type[BaseModel]) -> Iterator[str]:
    """Yield the lines of --help on the keys of one section."""
    yield f"\n[{name}]"
    meanings = _docstrings(section)
    for key, field in section.model_fields.items():
        if section_of(field.annotation) is None:
            default = "required" if field.is_required() else f"default {field.default}"
            yield f"  --{name}.{key} {_kind_text(field.annotation)} ({default})"
            yield indent(meanings.get(key, "").rstrip(), "      ")


def _kind_text(annotation: Any) -> str:
    """Return what a key takes: its choices, or the name of its type."""
    members = [member for member in get_args(annotation) or (annotation,) if member is not type(None)]
    if get_origin(annotation) is Literal:
        return "|".join(map(str, members))
    parts = [_kind_text(member) if get_origin(member) is Literal else _type_name(member) for member in members]
    whole = get_origin(annotation) not in (None, Union, UnionType, Annotated)
    return _type_name(annotation) if whole else "|".join(dict.fromkeys(parts))


def _type_name(annotation: Any) -> str:
    return getattr(get_origin(annotation) or annotation, "__name__", str(annotation)).upper()


def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each key of a section, in which the base classes' keys come first."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if base is BaseModel or not issubclass(base, BaseModel) or base.__module__.startswith("pydantic"):
            continue
        (tree,) = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for key, text in itertools.pairwise(tree.body):
            if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(key.target)] = inspect.cleandoc(str(text.value.value))
    return found


_DESCRIPTION = """\
@ FILE reads a TOML file; with several, later files win. A file with base = "a1.toml" at its top states only what
differs from that one. --section.key VALUE overrides a key, also of a list element: --orchestrator.source.0.weight 2.
--resume continues from the newest complete checkpoint (short for --run.resume true). --dry-run checks everything,
prints the plan and stops."""
