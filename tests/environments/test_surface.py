"""What a patch must still offer to callers that no test has."""

from __future__ import annotations

import pytest

from orchestrator.coding.code.surface import lost

MODULE = """
import os
from json import loads as read

LIMIT = 5
ITEMS = [1, 2]


def scale(value, by=2, *, base=10):
    return value * by


@cached
def slow(value):
    return value


class Box:
    size = 3

    def __init__(self, width, height=1):
        self.width = width

    def area(self):
        return 0

    def _hidden(self):
        return 1


if os.name == "posix":
    def where():
        return "here"

Old = Box
"""
ALL = ["Box", "Box.__init__", "Box.area", "Box.size", "ITEMS", "LIMIT", "Old", "scale", "slow", "where"]


def broken(patched: str, solution: str = MODULE) -> list[str]:
    files = [{"m.py": text.encode()} for text in (MODULE, solution, patched)]
    return [name.partition(": ")[2] for name in lost(*files)]


# A name that is gone, another default, an order, a constant or a parameter that all calls lack: each breaks a caller.
@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("Old = Box", "", ["Old"]),
        ("LIMIT = 5", "LIMIT = 6", ["LIMIT"]),
        ("class Box:", "Box = None\nclass _Box:", ["Box"]),
        ("by=2", "by=3", ["scale"]),
        ("value, by=2", "by, value=2", ["scale"]),
        ("*, base=10", "*, base=2", ["scale"]),
        ("*, base=10", "*, base=10, unit", ["scale"]),
        ("value, by=2", "value, by=2, unit=0", []),
        ("def area", "def _area", ["Box.area"]),
        ("height=1", "height", ["Box.__init__"]),
        ("def scale", "async def scale", ["scale"]),
        ("def where", "def _where", ["where"]),
        ("LIMIT = 5", "LIMIT = = 5", ALL),
        (MODULE, "", ALL),
    ],
)
def test_what_a_caller_may_rely_on_is_kept(old, new, names):
    assert broken(MODULE.replace(old, new)) == names


# Honest work: a private name, another body, a parameter more with a default, a decorator, a name made in another way,
# and whatever the known solution changes as well.
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_hidden", "_other"),
        ("return value * by", "return by * value"),
        ("base=10", "base=10, unit=1"),
        ("base=10):", "base=10, **more):"),
        ("def scale", "@cached\ndef scale"),
        ("ITEMS = [1, 2]", "ITEMS = [1, 2, 3]"),
        ("LIMIT = 5", "from limits import LIMIT"),
        ("def slow(value)", "def slow(value, more)"),
        ("import os\nfrom json import loads as read", "import os"),
        ("*, base=10", "base=10"),
        ("self, width, height=1", "self, width=2, height=1"),
        ("class Box:", "@dataclass\nclass Box:"),
        ("    def area(self):\n        return 0\n", "    area = _area\n"),
        ("class Box:\n    size = 3", "class Box(Base):\n    pass"),
        ("LIMIT = 5\nITEMS = [1, 2]", "LIMIT, ITEMS = 5, [1, 2]"),
        ("Old = Box", "from old import *"),
        ("Old = Box", "def __getattr__(name):\n    return Box"),
        ("by=2", "by=FACTOR"),
    ],
)
def test_honest_changes_lose_nothing(old, new):
    assert broken(MODULE.replace(old, new)) == []


def test_what_the_solution_changes_is_free():
    solution = MODULE.replace("LIMIT = 5", "LIMIT = 7").replace("by=2", "by=4").replace("Old = Box", "")
    assert broken(solution.replace("LIMIT = 7", ""), solution) == []


def test_tests_and_what_a_package_imports():
    # Tests are no surface. What a package's __init__.py imports is.
    before = {"tests/test_m.py": b"def test_a(): pass", "p/__init__.py": b"from .a import A, B"}
    after = {"tests/test_m.py": b"def test_b(): pass", "p/__init__.py": b"from .a import A"}
    assert [*lost(before, before, after)] == ["p/__init__.py: B"]
