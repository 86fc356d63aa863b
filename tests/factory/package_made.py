"""The small package of shapes_made.toml in a folder."""

import subprocess
import tomllib
from pathlib import Path

from orchestrator.coding.task import write_tree

PACKAGE = tomllib.loads(Path(__file__).with_name("shapes_made.toml").read_text())
SHAPES, TESTS = PACKAGE["shapes_made/shapes.py"], PACKAGE["tests/test_shapes.py"]


def write_package(folder: Path, **changes: str) -> Path:
    """Write the package to a folder. `changes`: path -> text of further files, with __ for / and without .py."""
    files = {**PACKAGE, **{f"{name.replace('__', '/')}.py": text for name, text in changes.items()}}
    write_tree(folder, {path: text.encode() for path, text in files.items()})
    return folder


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True).stdout
