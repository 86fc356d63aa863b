"""The clean tree of a folder, or of a git repository's commit: its files, sources, functions and tests.

Only plain files are taken. What would give a deleted body away (bytecode, caches, wheels, version control, built
copies) is left out.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from composer_prime.errors import ConfigError
from orchestrator.coding.factory.functions import SourceFunction, find_functions
from orchestrator.coding.git_command import commit_files
from orchestrator.coding.monitor.before import unwanted_files

_NO_SOURCES = {
    "test", "tests", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "tools", "scripts", "script",
    "bin", "ci", "requirements", "changelog", "news", "man", "licenses", "extras", "contrib", "tasks", "perf", "setup",
    "conftest", "noxfile", "fabfile", "versioneer", "runtests", "run_tests", "manage", "release", "src", "lib",
    "python",
}  # fmt: skip
"""Folders and modules at the root that are no part of a package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """A package's clean tree on disk."""

    folder: Path
    """Its name is the tree's: "toolz-1.2.0"."""
    repository: str
    """What held-out splits are made by: the same for all commits of a repository."""
    origin: str
    """Where it comes from, for CodeTask.source."""
    python_path: tuple[str, ...]
    """Folders, relative to the tree, that hold the importable packages."""
    texts: Mapping[str, str]
    """Of all Python files, by path."""
    sources: tuple[str, ...]
    """Python files of the packages, tests left out."""
    functions: Mapping[str, SourceFunction]
    """Those of the sources, by `place`."""
    tests: tuple[str, ...]
    """Python files that belong to the tests."""

    @property
    def name(self) -> str:
        return self.folder.name


def source_files(source: Path, commit: str = "") -> dict[str, bytes]:
    """Return the files of a local folder, or of a commit of it, without those that would give deleted code away."""
    if commit:
        files = commit_files(source, commit)
        return {path: files[path] for path in _kept(files)}
    paths = [path for path in sorted(source.rglob("*")) if path.is_file() and not path.is_symlink()]
    kept = _kept([path.relative_to(source).as_posix() for path in paths])
    return {path: (source / path).read_bytes() for path in kept}


def _kept(paths: Collection[str]) -> list[str]:
    unwanted = set(unwanted_files(paths))
    return [path for path in paths if path not in unwanted and not path.endswith((".so", ".pth"))]


def describe_tree(folder: Path, repository: str, origin: str) -> SourceTree:
    """Find packages, tests and metadata of a tree.

    Raises ConfigError for a tree without a Python package or without tests.
    """
    texts = {}
    for path in sorted(folder.rglob("*.py")):
        with contextlib.suppress(UnicodeDecodeError, IsADirectoryError):
            texts[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8")
    tests = tuple(path for path in texts if is_test(path))
    for root in ("src", "lib", "python", "."):
        sources = tuple(path for path in texts if _belongs(path, root) and not is_test(path))
        if sources:
            break
    else:
        raise ConfigError(f"{origin}: no Python package in it (neither in src, lib, python nor at the root)")
    if not tests:
        raise ConfigError(f"{origin}: no tests in it (test_*.py, *_test.py or a folder tests); tasks need tests")
    _make_installed(folder, root)
    return SourceTree(
        folder=folder,
        repository=repository,
        origin=origin,
        python_path=(".",) if root == "." else (root, "."),
        texts=texts,
        sources=sources,
        functions={each.place: each for path in sources for each in find_functions(path, texts[path])},
        tests=tests,
    )


def editable_patterns(tree: SourceTree) -> list[str]:
    """Return patterns of the source files. A folder with tests in it, or the root, gives its files one by one."""
    folders = {path.rpartition("/")[0] for path in tree.sources}
    with_tests = {path.rpartition("/")[0] for path in tree.tests} | {""}
    patterns = {f"{folder}/*.py" for folder in folders - with_tests}
    return sorted(patterns | {path for path in tree.sources if path.rpartition("/")[0] in with_tests})


def is_test(path: str) -> bool:
    """Tell whether a Python file belongs to the tests."""
    *folders, name = path.split("/")
    stem = name.removesuffix(".py")
    return (
        stem.startswith("test_")
        or stem.endswith("_test")
        or stem in ("test", "tests", "conftest")
        or not {"test", "tests"}.isdisjoint(folders)
    )


def _belongs(path: str, root: str) -> bool:
    """Tell whether a module is part of a package below `root`."""
    if root != ".":
        return path.startswith(root + "/")
    first = path.partition("/")[0]
    return first.removesuffix(".py") not in _NO_SOURCES and not (first != path and first.startswith((".", "_")))


def _make_installed(folder: Path, root: str) -> None:
    """Write the metadata of PKG-INFO where `importlib.metadata` finds it, as an installation would.

    Many packages ask for their own version when they are imported.
    """
    path = folder / "PKG-INFO"
    headers = HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    name, version = headers.get("Name"), headers.get("Version")
    if not name or not version or any((folder / root).glob("*.egg-info/PKG-INFO")):
        return
    installed = folder / root / f"{re.sub('[-_.]+', '_', name)}-{version}.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def tree_name(path: Path) -> str:
    """Return the name of a source's tree: that of its folder, in plain characters."""
    return re.sub(r"[^\w.+-]", "-", path.resolve().name) or "source"
