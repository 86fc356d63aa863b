"""From the command line to a checked `Config`: `@ file.toml` overlays, dotted overrides, --resume, --dry-run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic_config import cli

from composer_prime.config.root import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What a role's command line asked for."""

    config: Config
    dry_run: bool


def parse(argv: list[str]) -> CommandLine:
    """Parse `@ base.toml @ overlay.toml --trainer.optim.lr 3e-4 --resume --dry-run`.

    Prints the error (with a did-you-mean for unknown keys) and exits with status 1 or 2 on wrong input.
    """
    flags = {"--dry-run", "--resume"}
    rest = [arg for arg in argv if arg not in flags]
    if "--resume" in argv:
        rest += ["--run.resume", "true"]
    return CommandLine(config=cli(Config, args=rest), dry_run="--dry-run" in argv)


def read(path: Path) -> Config:
    """The resolved configuration that the launcher wrote to `path` (config.json of a run directory)."""
    return Config.model_validate(json.loads(path.read_text()))


def dump(config: Config) -> str:
    """`config` as indented JSON. Holds no secrets: these live in key files and the environment only."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def arguments() -> list[str]:
    return sys.argv[1:]
