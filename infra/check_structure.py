"""Check the limits on the source tree: python infra/check_structure.py

folder    at most 15 modules beside __init__.py (tests and benchmarks are not limited)
names     no utils, helpers, common or misc module; every public class name of the product only once;
          every module below tests/ has a name of its own, because pytest imports them side by side;
          every module that tests/contract.txt names exists
benchmark a module benchmarks/NAME.py has a flag --quick, with which .ci/run starts it (helpers: a leading underscore)
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

MAX_MODULES = 15
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
PRODUCT = ("composer_prime", "orchestrator", "inference", "trainer", "diloco")


def main(root: Path) -> int:
    modules = {path: ast.parse((root / path).read_text()) for path in python_files(root)}
    problems = full_folders(modules) + bad_names(modules) + slow_benchmarks(root, modules)
    print(f"{len(modules)} files")
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


def full_folders(modules: dict[Path, ast.Module]) -> list[str]:
    free = ("tests", "benchmarks")
    counts = Counter(path.parent for path in modules if path.parts[0] not in free and path.name != "__init__.py")
    return [
        f"{folder} has {count} modules, the limit is {MAX_MODULES}"
        for folder, count in counts.items()
        if count > MAX_MODULES
    ]


def bad_names(modules: dict[Path, ast.Module]) -> list[str]:
    problems = [f"{path}: the name says nothing" for path in modules if path.stem in VAGUE_NAMES]
    tests = Counter(
        path.name for path in modules if path.parts[0] == "tests" and path.stem not in ("conftest", "__init__")
    )
    problems += [f"several files below tests/ are called {name}" for name, count in tests.items() if count > 1]
    contract = Path(__file__).resolve().parents[1] / "tests" / "contract.txt"
    named = [line for line in contract.read_text().splitlines() if line and not line.startswith("#")]
    problems += [
        f"tests/contract.txt names {name}, which does not exist" for name in named if f"{name}.py" not in tests
    ]
    classes: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules.items():
        for node in tree.body if path.parts[0] in PRODUCT else []:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path))
    return problems + [f"class {name} is defined in {', '.join(paths)}" for name, paths in classes.items() if paths[1:]]


def slow_benchmarks(root: Path, modules: dict[Path, ast.Module]) -> list[str]:
    names = [path for path in modules if path.parts[:-1] == ("benchmarks",) and not path.name.startswith("_")]
    return [f"{path} has no flag --quick" for path in names if '"--quick"' not in (root / path).read_text()]


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
