"""A small package in a git clone, and instances of it in the exact form of SWE-bench and SWE-smith."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.factory.package_made import git

REPO = "acme/measures"
LENGTHS = '''"""Lengths."""


def to_metres(value, unit):
    """Convert a length to metres."""
    factors = {"m": 1.0, "km": 1000.0}
    return value * factors[unit]


def total(lengths):
    """Add lengths, each a pair of value and unit."""
    return sum(to_metres(value, unit) for value, unit in lengths)
'''
TESTS = """from measures.lengths import to_metres, total


def test_kilometres():
    assert to_metres(2, "km") == 2000


def test_total():
    assert total([(1, "km"), (1, "m")]) == 1001
"""
REPAIRED = LENGTHS.replace('"km": 1000.0', '"km": 1000.0, "cm": 0.01')
MORE_TESTS = TESTS + '\n\ndef test_centimetres():\n    assert to_metres(250, "cm") == 2.5\n'
BROKEN = LENGTHS.replace("value * factors", "value / factors")
TEST_FILE = "tests/test_lengths.py"


def make_clone(clones: Path) -> tuple[str, str, str]:
    """Make clones/acme__measures. Return its commit, the repair as a diff, and the tests of the repair as a diff."""
    clone = clones / "acme__measures"
    for path, text in {"src/measures/__init__.py": "", "src/measures/lengths.py": LENGTHS, TEST_FILE: TESTS}.items():
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        (clone / path).write_text(text)
    git(clone, "init", "-q", "-b", "main")
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "first")
    commit = git(clone, "rev-parse", "HEAD").strip()
    (clone / "src/measures/lengths.py").write_text(REPAIRED)
    patch = git(clone, "diff")
    git(clone, "checkout", "-q", ".")
    (clone / TEST_FILE).write_text(MORE_TESTS)
    test_patch = git(clone, "diff")
    git(clone, "checkout", "-q", ".")
    return commit, patch, test_patch


def breaking_patch(clones: Path) -> str:
    clone = clones / "acme__measures"
    (clone / "src/measures/lengths.py").write_text(BROKEN)
    patch = git(clone, "diff")
    git(clone, "checkout", "-q", ".")
    return patch


def instance(commit: str, patch: str, test_patch: str, **changes: Any) -> dict[str, Any]:
    """The fields of SWE-bench; FAIL_TO_PASS is a JSON string there."""
    return {
        "repo": REPO,
        "instance_id": "acme__measures-7",
        "base_commit": commit,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": "to_metres does not know centimetres\n\n`to_metres(250, 'cm')` raises KeyError.",
        "hints_text": "",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps([f"{TEST_FILE}::test_centimetres"]),
        "PASS_TO_PASS": json.dumps([f"{TEST_FILE}::test_kilometres", f"{TEST_FILE}::test_total"]),
        "environment_setup_commit": commit,
        **changes,
    }


def smith_instance(patch: str, **changes: Any) -> dict[str, Any]:
    """The fields of SWE-smith: the patch makes the bug, there is no test patch, lists are lists."""
    return {
        "instance_id": "acme__measures.1a2b3c4d.func_pm_op_change__x1",
        "repo": "swesmith/acme__measures.1a2b3c4d",
        "patch": patch,
        "FAIL_TO_PASS": [f"{TEST_FILE}::test_kilometres", f"{TEST_FILE}::test_total"],
        "PASS_TO_PASS": [],
        "created_at": "2024-01-01",
        "image_name": "swebench/swesmith.x86_64.acme_1776_measures.1a2b3c4d",
        "problem_statement": "",
        **changes,
    }
