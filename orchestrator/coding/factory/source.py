"""Get the sources of a package and put a clean tree on disk.

A source is `NAME` or `NAME==VERSION` of the package index, an archive (.tar.gz), a folder, or a git repository.
Nothing of an archive is believed: only plain files and folders below its root are taken, within limits of size and
number. What would give a deleted body away (bytecode, caches, wheels, version control, built copies) is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from pathlib import Path

from composer_prime.errors import ConfigError
from orchestrator.coding.task import check_path

MAX_FILES = 20_000
MAX_BYTES = 200 << 20
MAX_TEXT_BYTES = 1 << 20
ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
DOWNLOAD_TIMEOUT_S = 300.0
GIT_TIMEOUT_S = 120.0

_DROPPED_FOLDERS = {
    "__pycache__", ".git", ".hg", ".svn", ".tox", ".nox", ".venv", "venv", ".eggs", ".cache", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".hypothesis", ".benchmarks", "node_modules", "_build", "_modules", "htmlcov",
}  # fmt: skip
_DROPPED_AT_ROOT = {"build", "dist", "wheelhouse"}
_DROPPED_FILES = ("*.pyc", "*.pyo", "*.pyd", "*.so", "*.whl", "*.egg", "*.orig", "*.rej", ".coverage", "*.pth")
_COMPILED = (".pyx", ".pxd", ".c", ".cc", ".cpp", ".rs")
_NO_PACKAGE = {
    "test", "tests", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "tools", "scripts", "script",
    "bin", "ci", "requirements", "changelog", "news", "man", "licenses", "extras", "contrib", "tasks", "perf",
}  # fmt: skip
_NO_MODULE = (
    "setup",
    "conftest",
    "noxfile",
    "fabfile",
    "tasks",
    "versioneer",
    "runtests",
    "run_tests",
    "manage",
    "release",
)

_UNPACK_ERRORS = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """A package's clean tree on disk."""

    name: str
    """Name and version: "toolz-1.2.0". Also the folder's name below trees/."""
    repository: str
    """What held-out splits are made by: the same for all commits of a repository."""
    folder: Path
    origin: str
    """Where it comes from, for CodeTask.source."""
    license: str
    python_path: tuple[str, ...]
    """Folders, relative to the tree, that hold the importable packages."""
    sources: tuple[str, ...]
    """Python files of the packages, tests left out."""
    tests: tuple[str, ...]
    """Python files that belong to the tests."""
    compiled: tuple[str, ...]
    """Files of extensions that would have to be compiled; they are not."""

    def text(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")


def fetch_archive(requirement: str, cache: Path) -> Path:
    """Return the archive of `NAME` or `NAME==VERSION`, downloaded with pip unless `cache` has it.

    Only here is a network used. pip asks the package's build backend for its metadata, as every installation does.
    Raises ConfigError where pip gets none, with its last line.
    """
    name, _, version = requirement.partition("==")
    pattern = f"{re.sub('[-_.]+', '[-_.]', name)}-{version or '[0-9]*'}"
    known = [path for path in cache.glob("*") if fnmatchcase(_stem(path).lower(), pattern.lower())]
    if len(known) == 1:
        return known[0]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", requirement]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"pip did not get {requirement} within {DOWNLOAD_TIMEOUT_S:g} s: is there a network?"
            ) from error
        archives = [path for path in Path(folder).iterdir() if path.name.endswith(ARCHIVES)]
        if done.returncode or not archives:
            reason = (done.stderr.strip().splitlines() or ["it wrote no archive"])[-1]
            raise ConfigError(
                f"pip gets no source distribution of {requirement}: {reason}; give an archive or a folder"
            )
        return archives[0].rename(cache / archives[0].name)


def unpack(archive: Path, folder: Path) -> None:
    """Write an archive's plain files to a new folder, without the archive's root folder.

    Links, devices and files with paths that leave the root are not written. Raises ConfigError for an archive that
    cannot be read or passes a limit.
    """
    try:
        with tarfile.open(archive) as file:
            members = list(_plain_files(file))
        roots = {path.split("/", 1)[0] for path, _ in members}
        cut = len(next(iter(roots))) + 1 if len(roots) == 1 and all("/" in path for path, _ in members) else 0
        write_tree(folder, ((path[cut:], content) for path, content in members))
    except _UNPACK_ERRORS as error:
        raise ConfigError(f"{archive} cannot be unpacked: {str(error) or type(error).__name__}") from error


def _plain_files(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the plain files, within the limits."""
    count = size = 0
    for entry in archive:
        if entry.isreg():
            count, size = count + 1, size + entry.size
            if count > MAX_FILES or size > MAX_BYTES:
                raise ValueError(f"more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
            yield check_path(entry.name), (archive.extractfile(entry) or io.BytesIO()).read()


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
    """Yield the files of a commit. Raises ConfigError where git fails."""
    with tarfile.open(fileobj=io.BytesIO(git(repository, "archive", "--format=tar", commit))) as file:
        try:
            yield from _plain_files(file)
        except ValueError as error:
            raise ConfigError(f"commit {commit} of {repository} cannot be used: {error}") from error


def git(repository: Path, *words: str) -> bytes:
    """Return what a git command prints. Raises ConfigError with git's message where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, timeout=GIT_TIMEOUT_S)
    except FileNotFoundError as error:
        raise ConfigError("git is not installed; it is needed to read a repository's history") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"git {words[0]} in {repository} took more than {GIT_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise ConfigError(f"git {words[0]} in {repository}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def describe_tree(folder: Path, name: str, origin: str) -> SourceTree:
    """Find packages, tests and metadata of an unpacked tree.

    Raises ConfigError for a tree without a Python package or without tests.
    """
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    modules = [path for path in files if path.endswith(".py") and _is_text(folder / path)]
    tests = tuple(path for path in modules if is_test(path))
    for root in ("src", "lib", "python", "."):
        sources = tuple(path for path in modules if _belongs(path, root) and not is_test(path))
        if sources:
            break
    else:
        raise ConfigError(f"{origin}: no Python package in it (neither in src, lib, python nor at the root)")
    if not tests:
        raise ConfigError(f"{origin}: no tests in it (test_*.py, *_test.py or a folder tests); tasks need tests")
    metadata = _metadata(folder)
    _make_installed(folder, root, metadata)
    return SourceTree(
        name=name,
        repository=name,
        folder=folder,
        origin=origin,
        license=_license(metadata),
        python_path=(".",) if root == "." else (root, "."),
        sources=sources,
        tests=tests,
        compiled=tuple(path for path in files if path.endswith(_COMPILED) and not is_test(path)),
    )


def other_texts(tree: SourceTree) -> dict[str, str]:
    """Return the tree's text files that are not sources: tests, documentation, settings. Large ones are left out."""
    texts = {}
    for path in sorted(tree.folder.rglob("*")):
        relative = path.relative_to(tree.folder).as_posix()
        if path.is_file() and relative not in tree.sources and path.stat().st_size < MAX_TEXT_BYTES:
            with contextlib.suppress(UnicodeDecodeError):
                texts[relative] = path.read_text(encoding="utf-8")
    return texts


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
    first, _, rest = path.partition("/")
    if not rest:
        return first.removesuffix(".py") not in _NO_MODULE
    return first not in _NO_PACKAGE and not first.startswith((".", "_")) and first not in ("src", "lib", "python")


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _metadata(folder: Path):
    """Return the headers of PKG-INFO, or nothing."""
    path = folder / "PKG-INFO"
    return HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")


def _license(metadata) -> str:
    named = [metadata.get("License-Expression", ""), metadata.get("License", "").split("\n")[0]]
    named += [
        line.rsplit(" :: ", 1)[-1] for line in metadata.get_all("Classifier", []) if line.startswith("License ::")
    ]
    return next((text.strip()[:80] for text in named if text.strip() not in ("", "UNKNOWN")), "")


def _make_installed(folder: Path, root: str, metadata) -> None:
    """Write the metadata where `importlib.metadata` finds it, as an installation would.

    Many packages ask for their own version when they are imported.
    """
    name, version = metadata.get("Name"), metadata.get("Version")
    if not name or not version or any((folder / root).glob("*.egg-info/PKG-INFO")):
        return
    installed = folder / root / f"{re.sub('[-_.]+', '_', name)}-{version}.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def _stem(path: Path) -> str:
    return next((path.name.removesuffix(ending) for ending in ARCHIVES if path.name.endswith(ending)), path.name)


def tree_digest(folder: Path) -> str:
    """Return a hash of all files and their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def tree_name(path: Path) -> str:
    """Return a folder name for a source's tree: an archive's name without its ending, or the folder's own name."""
    return re.sub(r"[^\w.+-]", "-", _stem(path)) or "source"
