"""What a patch changes beside its task."""

from __future__ import annotations

import pytest

from orchestrator.coding.code.elsewhere import changed_elsewhere

MODULE = '''
import os
from json import loads as read

LIMIT: int = 5


def scale(value, by=2):
    return value * by


class Box(Base):
    size = 3

    def area(self, *, unit="m") -> float:
        """Return it."""
        return 0


if os.name == "posix":
    def where():
        return "here"

Box.size = 4
'''
START = {
    "m.py": MODULE,
    "p/__init__.py": "from p.a import one",
    "p/a.py": "one = 1",
    "p/py.typed": "",
    "README.md": "x",
}


def elsewhere(patch: dict[str, str | None], solution: dict[str, str | None] | None = None) -> list[str]:
    files = [
        {path: None if text is None else text.encode() for path, text in each.items()}
        for each in (START, solution or {}, patch)
    ]
    return [place.replace("m.py: ", "") for place in changed_elsewhere(*files)]


# A definition that the known solution leaves alone is named, whatever of it changes: a body, a default, a base, a
# constant, a condition, what runs at import. So is what others meet unasked: special methods, names of builtins.
@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("value * by", "value * by if value < 1000 else 0", ["scale"]),
        ("by=2", "by=3", ["scale"]),
        ("def scale", "async def scale", ["scale"]),
        ("def scale", "@slow\ndef scale", ["scale"]),
        ("LIMIT: int = 5", "LIMIT: int = 6", ["LIMIT"]),
        ("Box(Base)", "Box(Other)", ["Box"]),
        ("size = 3", "size = (3,)", ["Box.size"]),
        ("return 0", "return None", ["Box.area"]),
        ("loads as read", "load as read", ["read"]),
        ('os.name == "posix"', "False", ["where"]),
        ("Box.size = 4", "Box.size = 5", ["Box.size = 4", "Box.size = 5"]),
        ("Box.size = 4", "Box.size = 4\ndel scale", ["del scale"]),
        ("Box.size = 4", "Box.size = 4\nLIMIT = str(LIMIT)", ["LIMIT"]),
        ("    size = 3", "    size = 3\n    def __eq__(self, other):\n        return True", ["Box.__eq__"]),
        ("import os", "import os\nfrom other import len", ["len"]),
        ("import os", "import os\ndef __getattr__(name):\n    return 1", ["__getattr__"]),
    ],
)
def test_changes_elsewhere_are_named(old, new, names):
    assert MODULE.count(old) >= 1
    assert elsewhere({"m.py": MODULE.replace(old, new, 1)}) == names


# Free: new names and files, docstrings, annotations of functions, layout, an import that nothing needs, prose.
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import os", "import os\nimport re\n\n_WORD = re.compile('x')\ndef helper():\n    return 1"),
        ('"""Return it."""', '"""Return the area."""'),
        ("def scale(value, by=2):", "def scale(value: float, by: int = 2) -> float:"),
        ("from json import loads as read\n", ""),
        ("    size = 3", "    def _more(self):\n        return 2\n\n    size = 3"),
        ("return value * by", "return (value*by)  # plain"),
        ("import os", "import os\nimport os.path\ntry:\n    import re2\nexcept ImportError:\n    re2 = None"),
        ("    size = 3", "    size = 3\n    def filter(self):\n        return 2"),
        ("Box.size = 4", "Box.size = 4\nif __name__ == '__main__':\n    print(scale(1))"),
    ],
)
def test_new_names_and_layout_are_free(old, new):
    assert elsewhere({"m.py": MODULE.replace(old, new, 1), "new.py": "x = 1", "README.md": "y"}) == []


# What the known solution changes as well is the task, however the patch changes it; the rest of the file is not.
def test_the_task_itself_is_free():
    solution = {"m.py": MODULE.replace("value * by", "by * value"), "p/a.py": "one = 2"}
    patch = {"m.py": MODULE.replace("value * by", "sum([value] * by)"), "p/a.py": None}
    assert elsewhere(patch, solution) == []
    assert elsewhere({"m.py": MODULE.replace("by=2", "by=3").replace("return 0", "return 1")}, solution) == ["Box.area"]


# So are statements where it changes one, a file that it deletes or makes a package.
def test_what_the_solution_moves_is_free():
    solution = {"m.py": MODULE.replace("Box.size = 4", "Box.size = 5"), "p/a.py": None, "p/a/__init__.py": "one = 1"}
    patch = {"m.py": MODULE.replace("Box.size = 4", "Box.size = 2 + 3"), "p/a.py": None, "p/a/__init__.py": "one = 1"}
    assert elsewhere(patch, solution) == []


# Files that go, data that changes, exports of a package, a package in a module's place, code that does not parse.
@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ({"p/a.py": None}, ["p/a.py: one"]),
        ({"p/py.typed": None}, ["p/py.typed: the file"]),
        ({"p/__init__.py": ""}, ["p/__init__.py: one"]),
        ({"p/a/__init__.py": "one = 1"}, ["p/a.py: a package stands in its place"]),
        ({"m.py": "def ("}, ["scale", "Box"]),
        ({"m.py": f"print({'+'.join(['1'] * 3000)})"}, ["scale", "Box"]),
    ],
)
def test_files_elsewhere_are_named(patch, named):
    assert set(named) <= set(elsewhere(patch))
