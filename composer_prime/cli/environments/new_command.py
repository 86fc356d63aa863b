"""`composer new environment|hint|reward NAME`: write a module, a configuration and a test that run as they are."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from importlib import resources
from pathlib import Path

from composer_prime.config.layers import read_table_file
from composer_prime.console import COMPOSER, UV_RUN
from composer_prime.errors import ConfigError
from composer_prime.host import module_file

KINDS = {
    "environment": {
        "environment.py": "__name__.py",
        "environment.toml": "__name__.toml",
        "test_environment.py": "test___name__.py",
    },
    "hint": {"hint.toml": "__name__.toml", "test_hint.py": "test___name__.py"},
    "reward": {"reward.py": "__name__.py", "reward.toml": "__name__.toml", "test_reward.py": "test___name__.py"},
}
"""By kind: each template of composer_prime/assets/new, and the file that it becomes."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer new", description="Write a module, a TOML and a test that run.", allow_abbrev=False
    )
    parser.add_argument("kind", choices=tuple(KINDS), help="what to write")
    parser.add_argument("name", metavar="NAME", help="module's name: lower case, digits, underscores")
    parser.add_argument("-o", "--folder", type=Path, default=Path("."), help="where to write (default: here)")
    return parser


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    written = write_new(options.kind, options.name, options.folder)
    print("\n".join(f"wrote {path}" for path in written))
    module = options.folder / f"{options.name}.py"
    configuration = options.folder / f"{options.name}.toml"
    tried = shlex.quote(str(module if module.exists() else configuration))
    test, configuration = shlex.quote(str(written[-1])), shlex.quote(str(configuration))
    pytest = f"{UV_RUN and 'uv run --group dev '}pytest {test}"
    print(f"next: {pytest}; {COMPOSER} try {tried}; {UV_RUN}trainer @ {configuration}")
    return 0


def write_new(kind: str, name: str, folder: Path) -> list[Path]:
    """Return the files written. Raises ConfigError for a bad name and for present files."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} cannot be a module's name: use lower-case letters, digits and underscores")
    if kind != "hint" and module_file(name) is not None and not (folder / f"{name}.py").exists():
        raise ConfigError(f"a module {name!r} is already installed and would come first: use another name")
    texts = {}
    for template, file in KINDS[kind].items():
        texts[folder / _filled(file, name)] = _filled(_template(template), name)
    if present := [str(path) for path in texts if path.exists()]:
        raise ConfigError(f"{', '.join(present)} exists already: use another name, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text)
        if path.suffix == ".toml":
            read_table_file(str(path))
    return list(texts)


def _template(name: str) -> str:
    return resources.files("composer_prime").joinpath("assets", "new", f"{name}.template").read_text()


def _filled(text: str, name: str) -> str:
    class_name = "".join(part.capitalize() for part in name.split("_"))
    values = {"__name__": name, "__Class__": class_name}
    for field, value in values.items():
        text = text.replace(field, value)
    return text
