"""Runs of tests that share a box: what one leaves behind, the next does not see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.factory.source import SourceTree
from orchestrator.coding.factory.suite import SuiteRun, play

pytestmark = pytest.mark.process

TESTS = """
import os
import tempfile
from pathlib import Path

import package


def test_data():
    assert Path("data/table.txt").read_text() == "1"
    assert Path("data/other.txt").read_text() == "2"


def test_nothing_is_left():
    assert sorted(os.listdir()) == ["__pycache__", "data", "package.py", "test_package.py"]
    assert not Path(tempfile.gettempdir(), "left").exists()


def test_value():
    assert package.VALUE == 1
"""
SPOILING = """
import os, shutil, tempfile
from pathlib import Path

VALUE = 2
shutil.rmtree("data")
Path("data").write_text("a file where a folder was")
Path("new").mkdir()
Path("new/deep.txt").touch()
Path("left.txt").touch()
os.symlink("/etc", "link")
Path(tempfile.gettempdir(), "left").mkdir()
"""
TOUCHING = """
import os
from pathlib import Path

VALUE = 3
before = os.stat("data/table.txt")
Path("data/table.txt").write_text("7")
os.utime("data/table.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
os.rename("data/other.txt", "data/moved.txt")
"""


# Code that removes, replaces, moves or leaves files fails its own run only: the tree itself passes before and after.
def test_a_run_does_not_see_what_another_one_left(tmp_path: Path) -> None:
    files = {"package.py": "VALUE = 1\n", "test_package.py": TESTS, "data/table.txt": "1", "data/other.txt": "2"}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    changes = {"before": {}, "spoils": {"package.py": SPOILING}, "between": {}, "touches": {"package.py": TOUCHING}}
    changes |= {"gone": {"package.py": None}, "after": {}}
    runs = [SuiteRun(key=key, tests=["test_package.py"], files=files) for key, files in changes.items()]
    nothing = {"texts": {}, "sources": (), "functions": {}, "tests": ()}
    tree = SourceTree(folder=tmp_path, repository="a", origin="a", python_path=(".",), **nothing)
    results = asyncio.run(asyncio.wait_for(play(tree, RuntimeConfig(type="subprocess"), runs, hash_seed=0), 200))
    passed = {key: sorted(node.partition("::test_")[2] for node in result.passed()) for key, result in results.items()}
    all_three = ["data", "nothing_is_left", "value"]
    expected = {"before": all_three, "spoils": [], "between": all_three, "touches": ["nothing_is_left"], "gone": []}
    assert passed == expected | {"after": all_three}
