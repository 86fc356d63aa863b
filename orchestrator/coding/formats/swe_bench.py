"""Instances of SWE-bench, Lite, Verified, SWE-Gym and SWE-smith as tasks on trees of local clones.

    instances.jsonl + clones/owner__name --composer tasks import--> tasks/ --[[orchestrator.source]]--> rollouts

In most of these sets `patch` repairs the tree, and `test_patch` adds the tests. In SWE-smith `patch` breaks it. The
tree comes from `git archive` at base_commit, so that the agent's tree has no git objects.

Only tests that pytest runs can be graded. Django's instances name their tests as Django's own runner prints them, and
are refused; sympy's name functions only, which are looked up in the test patch.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from composer_prime.errors import ConfigError
from orchestrator.coding.formats.task_files import Record
from orchestrator.coding.git_command import git
from orchestrator.coding.task import CodeTask, check_path

_DIFFICULTY = {"<15 min fix": 0.2, "15 min - 1 hour": 0.5, "1-4 hours": 0.8, ">4 hours": 0.95}
"""SWE-bench Verified's estimates of how long a person takes."""
_TESTS_ARE_NOT_EDITABLE = ("!**/tests/**", "!**/test/**", "!**/testing/**", "!**/test_*.py", "!**/*_test.py")
_COMMIT = re.compile("[0-9a-f]{7,64}")
_COPY_LEAVES_OUT = shutil.ignore_patterns(".git", "__pycache__", "*.pyc", ".pytest_cache", ".mypy_cache")
_TAR_TIMEOUT_S = 600.0
_HEADER = re.compile(r"^(?:(?:---|\+\+\+) (?:[ab]/)?|(?:rename|copy) (?:from|to) )(?P<path>[^\t\n]+)", re.MULTILINE)
"""A line of a diff that names a file."""


def instance_task(record: Record, repositories: Path, trees: Path, *, timeout_s: float) -> CodeTask:
    """Return the task of one instance, and put its tree below `trees`.

    Raises ConfigError, whose message begins with the instance, for what makes it no task here.
    """
    instance = record.text("instance_id")
    try:
        return _instance_task(record, instance, repositories, trees, timeout_s)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if instance in text else f"instance {instance}: {text}") from None


def _instance_task(record: Record, instance: str, repositories: Path, trees: Path, timeout_s: float) -> CodeTask:
    fail_to_pass, pass_to_pass = record.texts("FAIL_TO_PASS"), record.texts("PASS_TO_PASS")
    if not fail_to_pass:
        raise ConfigError("its FAIL_TO_PASS is empty: no test tells a solution from none")
    repo = record.text("repo")
    tree = trees / _add_tree(repo, str(record.values.get("base_commit") or ""), repositories, trees)
    changed = apply_patch(tree, record.text("patch"), field="patch")
    if not changed:
        raise ConfigError("its 'patch' is empty or changes nothing: there is nothing to solve")
    is_bug = _patch_breaks(record, repo)
    solution = {path: _text(tree, path, "patch") for path in changed} if is_bug else changed
    test_changes = apply_patch(tree, str(record.values.get("test_patch") or ""), field="test_patch")
    test_files = _present(test_changes)
    fail_to_pass, pass_to_pass = (_pytest_ids(ids, test_files) for ids in (fail_to_pass, pass_to_pass))
    hidden = [path for path, text in test_changes.items() if text is None]
    if is_bug:
        hidden += sorted({test.partition("::")[0] for test in fail_to_pass})
    return CodeTask(
        id=instance,
        kind="issue",
        repository=repo,
        tree=tree.name,
        prompt=record.values.get("problem_statement") or _prompt_of_bug(repo, changed),
        start=_present(changed) if is_bug else {},
        removed=hidden,
        solution=_present(solution),
        editable=_editable(changed),
        tests=sorted({test.partition("::")[0] for test in (*fail_to_pass, *pass_to_pass)}),
        test_files=test_files,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        python_path=_python_path(tree),
        timeout_s=timeout_s,
        difficulty=_DIFFICULTY.get(str(record.values.get("difficulty"))),
        source=f"{repo}@{record.values.get('base_commit') or 'tree'}",
    )


def _python_path(tree: Path) -> list[str]:
    return [folder for folder in ("src", "lib") if (tree / folder).is_dir()] + ["."]


def _present(files: dict[str, str | None]) -> dict[str, str]:
    return {path: text for path, text in files.items() if text is not None}


def _patch_breaks(record: Record, repo: str) -> bool:
    """Tell whether `patch` makes the bug, as in SWE-smith, and not the repair."""
    image = str(record.values.get("image_name") or "")
    return not record.values.get("test_patch") and ("swesmith" in image or repo.startswith("swesmith/"))


def _prompt_of_bug(repo: str, changed: Iterable[str]) -> str:
    return f"Some tests of {repo} fail. The cause is in {', '.join(sorted(changed))}. Find it and repair it."


def _pytest_ids(names: Sequence[str], test_files: dict[str, str]) -> list[str]:
    """Return node ids. Raises ConfigError for names that pytest does not know."""
    ids = []
    for name in names:
        define = re.compile(rf"^def {re.escape(name)}\(", re.MULTILINE)
        files = [path for path, text in test_files.items() if define.search(text)]
        if "::" not in name and len(files) != 1:
            raise ConfigError(
                f"its test {name!r} is no pytest node id (file::test), and {len(files)} files of its test_patch define "
                "it; only tests that pytest runs can be graded"
            )
        ids.append(name if "::" in name else f"{files[0]}::{name}")
    return ids


def _editable(changed: Iterable[str]) -> list[str]:
    """Return patterns: source files, no tests, and in any case the kinds of files and the files that the patch has."""
    suffixes = sorted({".py", *(PurePosixPath(path).suffix for path in changed)} - {""})
    return [*(f"**/*{suffix}" for suffix in suffixes), *_TESTS_ARE_NOT_EDITABLE, *sorted(changed)]


def _add_tree(repo: str, commit: str, repositories: Path, trees: Path) -> str:
    """Put the repository's tree at a commit below `trees`, unless it is there. Return its folder's name."""
    folder = _find_repository(repo, repositories)
    is_clone = (folder / ".git").exists() or (folder / "objects").is_dir()
    if is_clone and not _COMMIT.fullmatch(commit):
        raise ConfigError(f"its base_commit {commit!r} is no commit of the clone {folder}; give the hexadecimal name")
    tree = re.sub(r"[^\w.-]+", "__", f"{repo}-{commit[:12]}" if is_clone else repo)
    if (trees / tree).is_dir():
        return tree
    trees.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=trees) as scratch:
        made = Path(scratch, "tree")
        if is_clone:
            made.mkdir()
            packed = git(folder, "archive", "--format=tar", commit)
            subprocess.run(["tar", "-x", "-C", str(made)], input=packed, check=True, timeout=_TAR_TIMEOUT_S)
        else:
            shutil.copytree(folder, made, ignore=_COPY_LEAVES_OUT, symlinks=True)
        with contextlib.suppress(OSError):  # Another instance made it in the meantime.
            made.rename(trees / tree)
    if not (trees / tree).is_dir():
        raise ConfigError(f"{trees / tree} could not be made; look at the free space and the rights of {trees}")
    return tree


def _find_repository(repo: str, repositories: Path) -> Path:
    try:
        folder = repositories / check_path(repo).replace("/", "__")
    except ValueError as error:
        raise ConfigError(f"its 'repo' is refused: {error}; give owner/name") from None
    if not folder.is_dir():
        raise ConfigError(f"no clone or tree of {repo}: `git clone URL {folder}`, or correct --repositories")
    return folder


def apply_patch(tree: Path, patch: str, *, field: str) -> dict[str, str | None]:
    """Return the text of each file that a diff changes or makes, None for one that it deletes. `tree` does not change.

    `git apply` does the work. `field`: the patch's name in the record, for messages. Raises ConfigError for a patch
    that does not apply, or that changes what is no plain file of text.
    """
    if not patch.strip():
        return {}
    paths = _touched(patch, field)
    with tempfile.TemporaryDirectory(prefix="composer-patch-") as scratch:
        copy = Path(scratch, "tree")
        copy.mkdir()
        before = {path: _text(tree, path, field) for path in paths}
        for path, text in _present(before).items():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            (copy / path).write_bytes(text.encode())
        try:
            whole = patch if patch.endswith("\n") else patch + "\n"
            git(copy, "apply", "--whitespace=nowarn", "-", stdin=whole.encode())
        except ConfigError as error:
            raise ConfigError(f"its {field!r} does not apply: {error}") from None
        after = {path: _text(copy, path, field) for path in paths}
    return {path: text for path, text in after.items() if text != before[path]}


def _touched(patch: str, field: str) -> list[str]:
    if "GIT binary patch" in patch:
        raise ConfigError(f"its {field!r} changes a binary file; tasks hold text only")
    try:
        paths = [check_path(match["path"]) for match in _HEADER.finditer(patch) if match["path"] != "/dev/null"]
    except ValueError as error:
        raise ConfigError(f"its {field!r} is refused: {error}") from None
    if not paths:
        raise ConfigError(f"its {field!r} is not a unified diff: it has no line that begins with '--- ' or '+++ '")
    return sorted(set(paths))


def _text(tree: Path, path: str, field: str) -> str | None:
    """Return a file's text, None where there is none. A link may lead out of the tree, and so is refused."""
    for part in (PurePosixPath(path), *PurePosixPath(path).parents[:-1]):
        if (tree / part).is_symlink():
            raise ConfigError(f"its {field!r} changes {path}, but {part} is a link; tasks hold plain files only")
    try:
        return (tree / path).read_bytes().decode() if (tree / path).is_file() else None
    except UnicodeDecodeError:
        raise ConfigError(f"its {field!r} changes {path}, which is not UTF-8 text; tasks hold UTF-8 only") from None
