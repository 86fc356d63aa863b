"""Check the limits on the source tree: python infra/check_structure.py

file      at most 500 lines, median at most 200
function  at most 60 lines, median at most 12 (tests are not counted in the medians)
folder    at most 15 modules beside __init__.py (tests and benchmarks are not limited)
names     no utils, helpers, common or misc module; every public class name of the product only once;
          every module below tests/ has a name of its own, because pytest imports them side by side
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

MAX_FILE_LINES, MEDIAN_FILE_LINES = 500, 200
MAX_FUNCTION_LINES, MEDIAN_FUNCTION_LINES = 60, 12
MAX_MODULES = 15
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
PRODUCT = ("composer_prime", "orchestrator", "inference", "trainer", "diloco")


def main(root: Path) -> int:
    modules = {path: ast.parse((root / path).read_text()) for path in python_files(root)}
    lengths = {path: len((root / path).read_text().splitlines()) for path in modules}
    functions = {path: function_lengths(tree) for path, tree in modules.items()}
    source = [path for path in modules if path.parts[0] != "tests" and lengths[path]]
    file_median = median(lengths[path] for path in source)
    function_median = median(lines for path in source for lines in functions[path].values())
    problems = [f"{path} has {lines} lines" for path, lines in lengths.items() if lines > MAX_FILE_LINES]
    problems += [
        f"{path}:{place} has {lines} lines"
        for path in modules
        for place, lines in functions[path].items()
        if lines > MAX_FUNCTION_LINES
    ]
    if file_median > MEDIAN_FILE_LINES:
        problems.append(f"the median file has {file_median:g} lines, the limit is {MEDIAN_FILE_LINES}")
    if function_median > MEDIAN_FUNCTION_LINES:
        problems.append(f"the median function has {function_median:g} lines, the limit is {MEDIAN_FUNCTION_LINES}")
    problems += full_folders(modules) + bad_names(modules)
    print(f"{len(modules)} files; source median: {file_median:g} lines a file, {function_median:g} a function")
    print("\n".join(problems))
    return int(bool(problems))


def python_files(root: Path) -> list[Path]:
    """Return tracked files and new ones that git does not ignore, relative to `root`."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=root, capture_output=True, text=True
    )
    if listing.returncode != 0:
        raise SystemExit(f"{root} must be a git checkout: {listing.stderr.strip()}")
    return [Path(name) for name in sorted(set(listing.stdout.splitlines())) if (root / name).is_file()]


def function_lengths(tree: ast.Module) -> dict[str, int]:
    """Return lines by "line name", from the signature to the last line, docstring included."""
    return {
        f"{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }


def full_folders(modules: dict[Path, ast.Module]) -> list[str]:
    free = ("tests", "benchmarks")
    counts = Counter(path.parent for path in modules if path.parts[0] not in free and path.name != "__init__.py")
    return [f"{folder} has {count} modules, the limit is {MAX_MODULES}"
            for folder, count in counts.items() if count > MAX_MODULES]  # fmt: skip


def bad_names(modules: dict[Path, ast.Module]) -> list[str]:
    problems = [f"{path}: the name says nothing" for path in modules if path.stem in VAGUE_NAMES]
    tests = Counter(
        path.name for path in modules if path.parts[0] == "tests" and path.stem not in ("conftest", "__init__")
    )
    problems += [f"several files below tests/ are called {name}" for name, count in tests.items() if count > 1]
    classes: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules.items():
        for node in tree.body if path.parts[0] in PRODUCT else []:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path))
    return problems + [f"class {name} is defined in {', '.join(paths)}" for name, paths in classes.items() if paths[1:]]


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
