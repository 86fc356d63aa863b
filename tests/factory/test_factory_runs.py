"""Runs of tests that share a box: what one leaves behind, the next does not see."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest

from composer_prime.config.sandbox import RuntimeConfig
from orchestrator.coding.factory.source import SourceTree
from orchestrator.coding.factory.suite import SuiteRun, play

pytestmark = pytest.mark.process

PARTS = tomllib.loads(Path(__file__).with_name("parts.toml").read_text())


# Code that removes, replaces, moves or leaves files fails its own run only: the tree itself passes before and after.
def test_a_run_does_not_see_what_another_one_left(tmp_path: Path) -> None:
    files = {
        "package.py": "VALUE = 1\n",
        "test_package.py": PARTS["data_tests"],
        "data/table.txt": "1",
        "data/other.txt": "2",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    changes = {
        "before": {},
        "spoils": {"package.py": PARTS["spoiling"]},
        "between": {},
        "touches": {"package.py": PARTS["touching"]},
    }
    changes |= {"gone": {"package.py": None}, "after": {}}
    runs = [SuiteRun(key=key, tests=["test_package.py"], files=files) for key, files in changes.items()]
    nothing = {"texts": {}, "sources": (), "functions": {}, "tests": ()}
    tree = SourceTree(folder=tmp_path, repository="a", origin="a", python_path=(".",), **nothing)
    results = asyncio.run(asyncio.wait_for(play(tree, RuntimeConfig(type="subprocess"), runs, hash_seed=0), 200))
    passed = {key: sorted(node.partition("::test_")[2] for node in result.passed()) for key, result in results.items()}
    all_three = ["data", "nothing_is_left", "value"]
    expected = {"before": all_three, "spoils": [], "between": all_three, "touches": ["nothing_is_left"], "gone": []}
    assert passed == expected | {"after": all_three}
