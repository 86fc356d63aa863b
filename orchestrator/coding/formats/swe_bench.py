"""Instances of SWE-bench, Lite, Verified, SWE-Gym and SWE-smith as tasks on trees of local clones.

    instances.jsonl + clones/owner__name --composer tasks import--> tasks/ --[[orchestrator.source]]--> rollouts

In most of these sets `patch` repairs the tree, and `test_patch` adds the tests. In SWE-smith `patch` breaks it. The
tree comes from `git archive` at base_commit, so that the agent's tree has no git objects.

Only tests that pytest runs can be graded. Django's instances name their tests as Django's own runner prints them, and
are refused; sympy's name functions only, which are looked up in the test patch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from composer_prime.errors import ConfigError
from orchestrator.coding.formats.patches import apply_patch
from orchestrator.coding.formats.task_files import Record
from orchestrator.coding.task import CodeTask, check_path

_DIFFICULTY = {"<15 min fix": 0.2, "15 min - 1 hour": 0.5, "1-4 hours": 0.8, ">4 hours": 0.95}
"""SWE-bench Verified's estimates of how long a person takes."""
_TESTS_ARE_NOT_EDITABLE = ("!**/tests/**", "!**/test/**", "!**/testing/**", "!**/test_*.py", "!**/*_test.py")
_UNITTEST_ID = re.compile(r"^\w+ \([\w.]+\)$")
_COMMIT = re.compile("[0-9a-f]{7,64}")
_GIT_TIMEOUT_S = 600.0
_COPY_LEAVES_OUT = shutil.ignore_patterns(".git", "__pycache__", "*.pyc", ".pytest_cache", ".mypy_cache")


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
    tree = _add_tree(repo, str(record.values.get("base_commit") or ""), repositories, trees)
    changed = apply_patch(trees / tree, record.text("patch"), field="patch")
    if not changed:
        raise ConfigError("its 'patch' is empty or changes nothing: there is nothing to solve")
    is_bug = _patch_breaks(record, repo)
    before = {path: _read(trees / tree / path) for path in changed}
    solution = before if is_bug else changed
    test_changes = apply_patch(trees / tree, str(record.values.get("test_patch") or ""), field="test_patch")
    test_files = {path: text for path, text in test_changes.items() if text is not None}
    fail_to_pass, pass_to_pass = (_pytest_ids(ids, test_files) for ids in (fail_to_pass, pass_to_pass))
    tests = sorted({test.partition("::")[0] for test in (*fail_to_pass, *pass_to_pass)})
    removed = [path for path, text in test_changes.items() if text is None]
    if is_bug:
        removed += sorted({test.partition("::")[0] for test in fail_to_pass})
    prompt = record.values.get("problem_statement") or _prompt_of_bug(repo, changed)
    return CodeTask(
        id=instance,
        kind="issue",
        repository=repo,
        tree=tree,
        prompt=prompt,
        start={path: text for path, text in changed.items() if text is not None} if is_bug else {},
        removed=removed,
        solution={path: text for path, text in solution.items() if text is not None},
        editable=_editable(changed),
        tests=tests,
        test_files=test_files,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        python_path=_python_path(trees / tree),
        timeout_s=timeout_s,
        difficulty=_DIFFICULTY.get(str(record.values.get("difficulty"))),
        source=f"{repo}@{record.values.get('base_commit') or 'tree'}",
    )


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
        if "::" in name:
            ids.append(name)
            continue
        files = [
            path for path, text in test_files.items() if re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE)
        ]
        if len(files) == 1:
            ids.append(f"{files[0]}::{name}")
            continue
        if _UNITTEST_ID.match(name):
            raise ConfigError(
                f"its test {name!r} is named as Django's test runner or unittest prints it; only tests that pytest "
                "runs can be graded here. Leave such repositories out"
            )
        where = f"{len(files)} files of its test_patch define it" if files else "no file of its test_patch defines it"
        raise ConfigError(f"its test {name!r} is not a pytest node id (file::test), and {where}")
    return ids


def _editable(changed: Iterable[str]) -> list[str]:
    """Return patterns: source files, no tests, and in any case the kinds of files and the files that the patch has."""
    suffixes = sorted({".py", *(PurePosixPath(path).suffix for path in changed)} - {""})
    return [*(f"**/*{suffix}" for suffix in suffixes), *_TESTS_ARE_NOT_EDITABLE, *sorted(changed)]


def _python_path(tree: Path) -> list[str]:
    return [folder for folder in ("src", "lib") if (tree / folder).is_dir()] + ["."]


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _add_tree(repo: str, commit: str, repositories: Path, trees: Path) -> str:
    """Put the repository's tree at a commit below `trees`, unless it is there. Return its folder's name."""
    folder = _find_repository(repo, repositories)
    is_clone = (folder / ".git").exists() or (folder / "objects").is_dir()
    if is_clone and not commit:
        raise ConfigError(f"it has no base_commit, but {folder} is a clone: it needs one")
    if is_clone and not _COMMIT.fullmatch(commit):
        raise ConfigError(f"its base_commit {commit!r} is not a commit; give the hexadecimal name from `git log`")
    tree = re.sub(r"[^\w.-]+", "__", f"{repo}-{commit[:12]}" if is_clone else repo)
    if (trees / tree).is_dir():
        return tree
    trees.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=trees) as scratch:
        made = Path(scratch, "tree")
        if is_clone:
            made.mkdir()
            _archive(folder, commit, made)
        else:
            shutil.copytree(folder, made, ignore=_COPY_LEAVES_OUT, symlinks=True)
        with contextlib.suppress(OSError):  # Another instance made it in the meantime.
            made.rename(trees / tree)
    if not (trees / tree).is_dir():
        raise ConfigError(f"{trees / tree} could not be made; look at the free space and the rights of {trees}")
    return tree


def _find_repository(repo: str, repositories: Path) -> Path:
    try:
        repo = check_path(repo)
    except ValueError as error:
        raise ConfigError(f"its 'repo' is refused: {error}; give owner/name") from None
    owner, _, name = repo.rpartition("/")
    candidates = [
        path for path in (f"{owner}__{name}" if owner else name, repo, name) for path in (path, f"{path}.git")
    ]
    for candidate in dict.fromkeys(candidates):
        if (repositories / candidate).is_dir():
            return repositories / candidate
    raise ConfigError(
        f"no clone or tree of {repo} in {repositories}: looked for {', '.join(dict.fromkeys(candidates))}. Clone it "
        f"(`git clone URL {repositories / candidates[0]}`) or name the right folder with --repositories"
    )


def _archive(clone: Path, commit: str, target: Path) -> None:
    """Unpack a commit's files. Raises ConfigError where the clone lacks it."""
    # A clone may belong to another user; the archive command runs no code of it.
    environment = {
        **os.environ,
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    try:
        packed = subprocess.run(
            ["git", "-C", str(clone), "archive", "--format=tar", commit],
            env={**environment, "LC_ALL": "C"},
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise ConfigError("git is not installed, and it reads clones: install it (`apt install git`)") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{clone}: git archive {commit} took longer than {_GIT_TIMEOUT_S:g} s") from None
    if packed.returncode:
        complaint = packed.stderr.decode(errors="replace").strip()[-300:]
        raise ConfigError(f"{clone} has no commit {commit} ({complaint}); fetch it there (`git fetch origin {commit}`)")
    subprocess.run(["tar", "-x", "-C", str(target)], input=packed.stdout, check=True, timeout=_GIT_TIMEOUT_S)
