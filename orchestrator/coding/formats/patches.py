"""Apply unified diffs to files of a tree. `git apply` does the work, and its error names the file and the line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

from composer_prime.errors import ConfigError
from orchestrator.coding.task import check_path

_HEADER = re.compile(r"^(?:(?:---|\+\+\+) (?:[ab]/)?|(?:rename|copy) (?:from|to) )(?P<path>[^\t\n]+)", re.MULTILINE)
_LINK = re.compile(
    r"^(?:(?:new file|deleted file|old|new) mode |index [0-9a-f]+\.\.[0-9a-f]+ )(?:120000|160000)\b", re.MULTILINE
)
"""Modes of symbolic links and of submodules. Lines of a hunk begin with a space, + or -."""
_TIMEOUT_S = 120.0


def apply_patch(tree: Path, patch: str, *, field: str) -> dict[str, str | None]:
    """Return the text of each file that a patch changes or makes, None for one that it deletes. `tree` does not change.

    `field`: the patch's name in the record, for messages. Raises ConfigError for a patch that does not apply or that
    changes a file that is not text.
    """
    if not patch.strip():
        return {}
    paths = _touched(patch, field)
    with tempfile.TemporaryDirectory(prefix="composer-patch-") as scratch:
        copy = Path(scratch, "tree")
        copy.mkdir()
        for path in paths:
            _refuse_link(tree, path, field)
            if (tree / path).is_file():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / path, copy / path)
        _git_apply(copy, patch if patch.endswith("\n") else patch + "\n", field)
        changed: dict[str, str | None] = {}
        for path in paths:
            _refuse_link(copy, path, field)
            before, after = _text(tree / path, path, field), _text(copy / path, path, field)
            if before != after:
                changed[path] = after
        return changed


def _touched(patch: str, field: str) -> list[str]:
    if "GIT binary patch" in patch or re.search(r"^Binary files .* differ$", patch, re.MULTILINE):
        raise ConfigError(f"its {field!r} changes a binary file; tasks hold text only")
    if _LINK.search(patch):
        raise ConfigError(f"its {field!r} makes or changes a link or a submodule; tasks hold plain files only")
    try:
        paths = [check_path(match["path"]) for match in _HEADER.finditer(patch) if match["path"] != "/dev/null"]
    except ValueError as error:
        raise ConfigError(f"its {field!r} is refused: {error}") from None
    if not paths:
        raise ConfigError(f"its {field!r} is not a unified diff: it has no line that begins with '--- ' or '+++ '")
    return sorted(set(paths))


def _refuse_link(tree: Path, path: str, field: str) -> None:
    """Raise ConfigError for a path at or behind a link, which may lead out of the tree."""
    for part in (PurePosixPath(path), *PurePosixPath(path).parents[:-1]):
        if (tree / part).is_symlink():
            raise ConfigError(f"its {field!r} changes {path}, but {part} is a link; tasks hold plain files only")


def _git_apply(folder: Path, patch: str, field: str) -> None:
    # Outside of any repository, git applies to the folder. A ceiling keeps it from finding one above.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent), "LC_ALL": "C"}
    try:
        applied = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            input=patch.encode(),
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise ConfigError("git is not installed, and it applies patches: install it (`apt install git`)") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"its {field!r} was not applied within {_TIMEOUT_S:g} s by git apply") from None
    if applied.returncode:
        complaint = applied.stderr.decode(errors="replace").strip() or "git apply failed"
        raise ConfigError(f"its {field!r} does not apply: {complaint.splitlines()[0].removeprefix('error: ')}")


def _text(path: Path, name: str, field: str) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise ConfigError(f"its {field!r} changes {name}, which is not UTF-8 text; tasks hold UTF-8 only") from None
