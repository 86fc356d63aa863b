"""Put a clean tree of a folder or of a git repository's commit on disk, and find commits that make tasks.

Only plain files are taken. What would give a deleted body away (bytecode, caches, wheels, version control, built
copies) is left out. A commit that changed sources and tests has a tree of its own: the agent begins with the sources of
its parent, and the tests stay.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from pathlib import Path

from composer_prime.errors import ConfigError
from orchestrator.coding.git_command import git
from orchestrator.coding.task import check_path

_DROPPED_FOLDERS = {
    "__pycache__", ".git", ".hg", ".svn", ".tox", ".nox", ".venv", "venv", ".eggs", ".cache", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".hypothesis", ".benchmarks", "node_modules", "_build", "_modules", "htmlcov",
}  # fmt: skip
_DROPPED_AT_ROOT = {"build", "dist", "wheelhouse"}
_DROPPED_FILES = ("*.pyc", "*.pyo", "*.pyd", "*.so", "*.whl", "*.egg", "*.orig", "*.rej", ".coverage", "*.pth")
MAX_FILES = 8
"""Source files that a commit may change."""
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
    sources: tuple[str, ...]
    """Python files of the packages, tests left out."""
    tests: tuple[str, ...]
    """Python files that belong to the tests."""

    @property
    def name(self) -> str:
        return self.folder.name

    def text(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")


def write_tree(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write files to a folder, without those that `is_dropped` names."""
    for path, content in files:
        if not is_dropped(path):
            target = folder / check_path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def is_dropped(path: str) -> bool:
    """Tell whether a file would give deleted code away, or is left from builds and tools."""
    *folders, name = path.split("/")
    return (
        not _DROPPED_FOLDERS.isdisjoint(folders)
        or bool(folders and folders[0] in _DROPPED_AT_ROOT)
        or any(fnmatchcase(name, pattern) for pattern in _DROPPED_FILES)
    )


def folder_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a local folder. Links are left out."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and not is_dropped(relative):
            yield relative, path.read_bytes()


def commit_files(repository: Path, commit: str) -> Iterator[tuple[str, bytes]]:
    """Yield the plain files of a commit. Raises ConfigError where git fails."""
    with tarfile.open(fileobj=io.BytesIO(git(repository, "archive", "--format=tar", commit))) as archive:
        for entry in archive:
            if entry.isreg():
                yield entry.name, (archive.extractfile(entry) or io.BytesIO()).read()


def describe_tree(folder: Path, repository: str, origin: str) -> SourceTree:
    """Find packages, tests and metadata of a tree.

    Raises ConfigError for a tree without a Python package or without tests.
    """
    files = [path for path in sorted(folder.rglob("*.py")) if path.is_file() and _is_text(path)]
    modules = [path.relative_to(folder).as_posix() for path in files]
    tests = tuple(path for path in modules if is_test(path))
    for root in ("src", "lib", "python", "."):
        sources = tuple(path for path in modules if _belongs(path, root) and not is_test(path))
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
        sources=sources,
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


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCommit:
    """A commit that changed sources and tests."""

    commit: str
    message: str
    before: dict[str, str | None]
    """Source file -> the parent's text; None for one that the commit added."""
    tests: tuple[str, ...]
    """Test files that the commit added or changed."""


def source_commits(repository: Path, newest: int) -> list[SourceCommit]:
    """Return those of the `newest` commits, without merges, that changed Python sources and tests.

    Raises ConfigError where git fails.
    """
    listing = git(repository, "log", "--no-merges", f"--max-count={newest}", "--format=%H %P").decode()
    commits = []
    for line in listing.splitlines():
        commit, *parents = line.split()
        found = _read_commit(repository, commit, parents[0]) if parents else None
        if found is not None:
            commits.append(found)
    return commits


def _read_commit(repository: Path, commit: str, parent: str) -> SourceCommit | None:
    """Return what a commit changed; None if it makes no task: no tests, no sources, too many files, or other text."""
    changes = git(repository, "diff", "--name-status", "--no-renames", "-z", parent, commit).decode().split("\0")
    states = dict(zip(changes[1::2], changes[0::2], strict=False))
    modules = {path: state for path, state in states.items() if path.endswith(".py")}
    sources = {path: state for path, state in modules.items() if not is_test(path) and path != "setup.py"}
    tests = tuple(path for path, state in modules.items() if is_test(path) and state != "D")
    if not tests or not sources or len(sources) > MAX_FILES:
        return None
    try:
        before = {
            path: None if state == "A" else git(repository, "show", f"{parent}:{path}").decode("utf-8")
            for path, state in sources.items()
        }
    except UnicodeDecodeError:
        return None
    return SourceCommit(
        commit=commit,
        message=git(repository, "log", "-1", "--format=%B", commit).decode(errors="replace").strip(),
        before=before,
        tests=tests,
    )
