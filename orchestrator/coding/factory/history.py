"""Commits that changed sources and tests: the sources are put back, the tests stay.

Each such commit has a tree of its own, the commit's. The agent begins with the sources of the parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.coding.factory.source import is_test
from orchestrator.coding.git_command import git

MAX_FILES = 8
"""Source files that a commit may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCommit:
    """A commit that changed sources and tests."""

    commit: str
    parent: str
    message: str
    before: dict[str, str]
    """Path -> the parent's text, of changed and removed source files."""
    added: tuple[str, ...]
    """Source files that the commit added."""
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
            path: git(repository, "show", f"{parent}:{path}").decode("utf-8")
            for path, state in sources.items()
            if state != "A"
        }
    except UnicodeDecodeError:
        return None
    return SourceCommit(
        commit=commit,
        parent=parent,
        message=git(repository, "log", "-1", "--format=%B", commit).decode(errors="replace").strip(),
        before=before,
        added=tuple(path for path, state in sources.items() if state == "A"),
        tests=tests,
    )
