"""From the command line to a checked `Config`: `@ file.toml`, dotted flags, --resume, --dry-run.

    words -> layers.py: files, with their bases -> values
          -> flags.py                           -> values -> Config, validated once
                                                       -> problems.py: what is wrong, in sentences

Imports no torch: --help and --dry-run answer at once.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError, create_model
from pydantic_config import BaseConfig, cli

from composer_prime.config.flags import apply_flags
from composer_prime.config.layers import Layer, merge_layers, read_layers
from composer_prime.config.problems import wrong_config
from composer_prime.config.removed import without_removed
from composer_prime.config.root import Config
from composer_prime.console import did_you_mean, fail, program
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
        raise ConfigError(f"no configuration given; start with `{program()} @ configs/a1.toml` (--help lists the keys)")
    files, words = read_layers(words)
    values = merge_layers(files)
    config = _checked(values, [*files, apply_flags(values, words)])
    folders = config.run.import_from
    folders += [folder for folder in _module_folders(files) if folder not in folders]
    make_importable(config)
    return CommandLine(config=config, dry_run="--dry-run" in argv)


def _checked(values: dict[str, Any], layers: list[Layer]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise wrong_config(error, layers) from None


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
    return _checked(values, [Layer(origin=str(path), values=values)])


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


def _print_help(section: str) -> NoReturn:
    """Print the keys of a section of the file, or of all with "". Raises ConfigError for an unknown section."""
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
