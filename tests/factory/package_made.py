"""A small package with tests, in the forms that the task factory reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

SHAPES = '''\
"""Shapes and their sizes."""


def area(width, height=1):
    """Return the area of a rectangle."""
    # the secret comment
    if width < 0 or height < 0:
        raise ValueError("negative")
    result = width * height
    return result
    # a trailing secret


def _double(value):
    doubled = value + value
    return doubled


def around(width, height):
    """Return the length of the border."""
    half = width + height
    return _double(half)


def never_tested(value):
    first = value + 1
    second = first + 1
    return second


def register(name):
    names = [name]
    names.sort()
    return names


NAMES = register("square")


class Box:
    """A box of things."""

    def __init__(self, size=2):
        self.size = size
        self.things = []
        self.full = False

    def put(self, thing):
        """Put one thing in. Raises IndexError when the box is full."""
        if len(self.things) >= self.size:
            raise IndexError("full")
        self.things.append(thing)
        self.full = len(self.things) == self.size
'''
TESTS = """\
import pytest

from shapes_made import shapes


def test_area():
    assert shapes.area(2, 3) == 6
    assert shapes.area(4) == 4


def test_negative_area():
    with pytest.raises(ValueError):
        shapes.area(-1, 2)


def test_around():
    assert shapes.around(2, 3) == 10


def test_box():
    box = shapes.Box()
    box.put("a")
    assert not box.full
    box.put("b")
    assert box.full
    with pytest.raises(IndexError):
        box.put("c")


def test_names():
    assert shapes.NAMES == ["square"]
"""
PACKAGE = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: shapes-made\nVersion: 1.0\n",
    "shapes_made/__init__.py": "",
    "shapes_made/shapes.py": SHAPES,
    "tests/test_shapes.py": TESTS,
}


def write_package(folder: Path, **changes: str) -> Path:
    """Write the package to a folder. `changes`: path -> text of further files, with __ for / and without .py."""
    files = {**PACKAGE, **{f"{name.replace('__', '/')}.py": text for name, text in changes.items()}}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True).stdout
