"""Fails when the source outgrows its limits: python infra/check_structure.py

file      at most 500 lines, median at most 150
function  at most 60 lines, median at most 12 (tests are not counted in the medians)
names     no utils, helpers, common or misc module: a name says what it holds
tests     each module below tests/ has a name of its own, for pytest imports them side by side
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

MAX_FILE, MEDIAN_FILE = 500, 150
MAX_FUNCTION, MEDIAN_FUNCTION = 60, 12
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    where: str
    lines: int
    """From the first line of its signature to its last, docstring included."""


def python_files(root: Path) -> list[Path]:
    """Tracked files and new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=root, capture_output=True, text=True
    )
    if listed.returncode != 0:
        raise SystemExit(f"{root} must be a git checkout: {listed.stderr.strip()}")
    return [root / name for name in sorted(set(listed.stdout.splitlines())) if (root / name).is_file()]


def functions(path: Path, root: Path) -> list[Function]:
    tree = ast.parse(path.read_text())
    return [
        Function(where=f"{path.relative_to(root)}:{node.lineno} {node.name}", lines=node.end_lineno - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]


def findings(root: Path) -> list[str]:
    """One line for each limit that is passed."""
    files = python_files(root)
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    found = [f"{path.relative_to(root)} has {count} lines" for path, count in lengths.items() if count > MAX_FILE]
    found += [f"{path.relative_to(root)}: the name says nothing" for path in files if path.stem in VAGUE]
    tests = Counter(path.name for path in files if path.relative_to(root).parts[0] == "tests")
    twice = [name for name, count in tests.items() if count > 1 and name != "conftest.py"]
    found += [f"several files below tests/ are called {name}" for name in twice]
    source = [path for path in files if path.relative_to(root).parts[0] != "tests" and lengths[path]]
    every = {path: functions(path, root) for path in files}
    for path in files:
        found += [f"{each.where} has {each.lines} lines" for each in every[path] if each.lines > MAX_FUNCTION]
    middle_file = median(lengths[path] for path in source)
    middle_function = median(each.lines for path in source for each in every[path])
    print(f"{len(files)} files; source median: {middle_file:g} lines a file, {middle_function:g} a function")
    if middle_file > MEDIAN_FILE:
        found.append(f"the median file has {middle_file:g} lines, at most {MEDIAN_FILE} are wanted")
    if middle_function > MEDIAN_FUNCTION:
        found.append(f"the median function has {middle_function:g} lines, at most {MEDIAN_FUNCTION} are wanted")
    return found


if __name__ == "__main__":
    problems = findings(Path(__file__).resolve().parents[1])
    print("\n".join(problems))
    sys.exit(bool(problems))
