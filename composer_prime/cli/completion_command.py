"""`composer completion bash|zsh|fish [--install]`: a script that completes commands, flags, settings and their values.

It covers composer, trainer, orchestrator, inference and diloco. The script is static: pressing TAB starts no Python.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from composer_prime.console import pluralize

SHELLS = ("bash", "zsh", "fish")
_FLAGS_OF_COMMANDS = {"plan": ("--gpus", "--resume"), "eval": ("--env", "--resume"), "replay": ()}
"""Flags of the commands that take settings and have no argparse parser."""


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    scripts = completion_scripts(options.shell)
    if not options.install:
        print("\n".join(scripts.values()))
        return 0
    folder = completion_folder(options.shell)
    folder.mkdir(parents=True, exist_ok=True)
    for program, script in scripts.items():
        (folder / _FILE_NAMES[options.shell].format(program)).write_text(script)
    print(f"wrote {pluralize(len(scripts), 'file')} to {folder}; {_NEXT[options.shell].format(folder)}")
    return 0


_FILE_NAMES = {"bash": "{}", "zsh": "_{}", "fish": "{}.fish"}
_NEXT = {
    "bash": "open a new shell (this needs the package bash-completion)",
    "zsh": "put fpath=({} $fpath) before compinit into .zshrc, and open a new shell",
    "fish": "open a new shell",
}


def completion_folder(shell: str) -> Path:
    """Return the folder from which the shell loads this user's completions."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fish/completions"
    return data / ("bash-completion/completions" if shell == "bash" else "zsh/site-functions")


def completion_scripts(shell: str) -> dict[str, str]:
    """Return the script of each program for `shell`."""
    import shtab

    return {parser.prog: shtab.complete(parser, shell) for parser in _programs()}


def _programs() -> list[argparse.ArgumentParser]:
    from diloco.main import _parser as diloco_parser

    inference = _with_settings(argparse.ArgumentParser(prog="inference", allow_abbrev=False))
    inference.add_argument("--run-dir", type=Path)
    inference.add_argument("--node-name")
    roles = [_with_settings(argparse.ArgumentParser(prog=name)) for name in ("trainer", "orchestrator")]
    return [_composer(), *roles, inference, diloco_parser()]


def _composer() -> argparse.ArgumentParser:
    """Return a parser that has every command with the arguments of its own parser."""
    from composer_prime.cli.main import COMMANDS

    program = argparse.ArgumentParser(prog="composer")
    program.add_argument("--version", action="store_true")
    commands = program.add_subparsers()
    pairs = commands.add_parser("pairs", help="preference pairs").add_subparsers()
    for name, (module, text) in COMMANDS.items():
        group = pairs if name.startswith("pairs ") else commands
        own = _parser_of(module)
        parents = [own] if own is not None else []
        child = group.add_parser(name.rpartition(" ")[2], help=text, parents=parents, add_help=own is None)
        if own is None:
            _with_settings(child)
            for flag in _FLAGS_OF_COMMANDS[name]:
                child.add_argument(flag)
        _complete_paths(child)
    return program


def _parser_of(module: str) -> argparse.ArgumentParser | None:
    """Return the result of the function in `module` whose name ends in "_parser"; None without such a function."""
    names = vars(importlib.import_module(module)).items()
    found = (value for name, value in names if name.endswith("_parser") and getattr(value, "__module__", "") == module)
    return next(found, lambda: None)()


def _with_settings(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give `parser` a flag for each setting, with the values that it may have."""
    import shtab

    from composer_prime.config.problems import settings_by_key

    parser.add_argument("files", nargs="*").complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    for flag in ("--resume", "--dry-run"):
        if parser.prog not in ("composer plan", "composer eval", "composer replay"):
            parser.add_argument(flag, action="store_true")
    for key, kind in settings_by_key().items():
        flag = parser.add_argument(f"--{key}", choices=_choices(kind), metavar=key.rpartition(".")[2].upper())
        if Path in (kind, *get_args(kind)):
            flag.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    return parser


def _choices(kind: Any) -> list[str] | None:
    """Return the words that a setting of this type may have; None where any are possible."""
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    inner = [_choices(part) for part in get_args(kind) if part is not type(None)]
    return inner[0] if len(inner) == 1 and get_origin(kind) is not list else None


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Let arguments that name files, runs or models complete to paths."""
    import shtab

    for action in parser._actions:
        is_path = action.type is Path or action.dest in ("run", "model", "env", "base")
        if is_path and action.choices is None and action.nargs != 0:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer completion",
        description="Print a shell's completion script, or install it for this user.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.add_argument("--install", action="store_true", help="write it where the shell looks for completions")
    return parser
