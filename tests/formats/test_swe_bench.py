"""SWE-bench's family: instances become tasks on trees of a clone, proven by grading; what cannot be is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.sandbox import RuntimeConfig, SandboxLimits
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.code.grading import Grade, grade
from orchestrator.coding.formats.conversion import Refusal, apply_patch, import_tasks
from orchestrator.coding.task import HELD_BACK, CodeTask, index_tasks, matches, write_tree
from tests.factory.package_made import git

pytestmark = pytest.mark.process  # git and graded tests

RUNTIME = RuntimeConfig(type="subprocess")
FILES = tomllib.loads(Path(__file__).with_name("measures.toml").read_text())
TEST_FILE = "tests/test_lengths.py"
LENGTHS, TESTS = FILES["src/measures/lengths.py"], FILES[TEST_FILE]
REPAIRED = LENGTHS.replace('"km": 1000.0', '"km": 1000.0, "cm": 0.01')
MORE_TESTS = TESTS + '\n\ndef test_centimetres():\n    assert to_metres(250, "cm") == 2.5\n'
ENDS = "__import__('os')._exit(0)\n"
BROKEN = LENGTHS.replace("value * factors", "value / factors")


def make_clone(clones: Path) -> tuple[str, str, str]:
    """Make clones/acme__measures. Return its commit, the repair as a diff, and the tests of the repair as a diff."""
    clone = clones / "acme__measures"
    write_tree(clone, {path: text.encode() for path, text in FILES.items()})
    git(clone, "init", "-q", "-b", "main")
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "first")
    return (
        git(clone, "rev-parse", "HEAD").strip(),
        patch_of(clone, "src/measures/lengths.py", REPAIRED),
        patch_of(clone, TEST_FILE, MORE_TESTS),
    )


def patch_of(clone: Path, path: str, text: str) -> str:
    """Return the diff that gives a file another text, which it does not keep."""
    (clone / path).write_text(text)
    patch = git(clone, "diff")
    git(clone, "checkout", "-q", ".")
    return patch


def breaking_patch(clones: Path) -> str:
    return patch_of(clones / "acme__measures", "src/measures/lengths.py", BROKEN)


def instance(commit: str, patch: str, test_patch: str, **changes: Any) -> dict[str, Any]:
    """The fields of SWE-bench; FAIL_TO_PASS is a JSON string there."""
    return {
        "repo": "acme/measures",
        "instance_id": "acme__measures-7",
        "base_commit": commit,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": "to_metres does not know centimetres\n\n`to_metres(250, 'cm')` raises KeyError.",
        "hints_text": "",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps([f"{TEST_FILE}::test_centimetres"]),
        "PASS_TO_PASS": json.dumps([f"{TEST_FILE}::test_kilometres", f"{TEST_FILE}::test_total"]),
        "environment_setup_commit": commit,
        **changes,
    }


def smith_instance(patch: str, **changes: Any) -> dict[str, Any]:
    """The fields of SWE-smith: the patch makes the bug, there is no test patch, lists are lists."""
    return {
        "instance_id": "acme__measures.1a2b3c4d.func_pm_op_change__x1",
        "repo": "swesmith/acme__measures.1a2b3c4d",
        "patch": patch,
        "FAIL_TO_PASS": [f"{TEST_FILE}::test_kilometres", f"{TEST_FILE}::test_total"],
        "PASS_TO_PASS": [],
        "created_at": "2024-01-01",
        "image_name": "swebench/swesmith.x86_64.acme_1776_measures.1a2b3c4d",
        "problem_statement": "",
        **changes,
    }


def imported(tmp_path: Path, records: list[dict[str, Any]], **settings: Any) -> tuple[list[CodeTask], list[Refusal]]:
    file = tmp_path / "instances.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = tmp_path / "tasks"
    shutil.rmtree(folder, ignore_errors=True)
    settings = {"repositories": tmp_path / "clones", "runtime": RUNTIME, "jobs": 2, **settings}
    kept, refusals = asyncio.run(import_tasks(file, folder, **settings))
    tasks = list(dict(index_tasks(folder)).values())
    assert len(tasks) == kept
    return tasks, refusals


def grades(tmp_path: Path, task: CodeTask, *patches: dict[str, str]) -> list[Grade]:
    async def all_of_them() -> list[Grade]:
        trees = tmp_path / "tasks" / "trees"
        return [await grade(task, trees, {p: t.encode() for p, t in patch.items()}, RUNTIME) for patch in patches]

    return asyncio.run(all_of_them())


def test_an_instance_of_swe_bench_becomes_a_proven_task(tmp_path: Path) -> None:
    # Its patch solves it, an empty one does not; the agent's tree has neither the new tests nor git objects.
    made = make_clone(tmp_path / "clones")
    (task,), refusals = imported(tmp_path, [instance(*made)])
    assert refusals == []
    assert (task.id, task.repository, task.kind) == ("acme__measures-7", "acme/measures", "issue")
    assert task.solution == {"src/measures/lengths.py": REPAIRED}
    assert (task.start, task.removed, task.python_path) == ({}, [], ["src", "."])
    tree = tmp_path / "tasks" / "trees" / task.tree
    assert (tree / TEST_FILE).is_file() and "centimetres" not in (tree / TEST_FILE).read_text()
    assert not (tree / ".git").exists()
    edited_test = {**task.solution, TEST_FILE: "def test_centimetres():\n    pass\n"}
    assert HELD_BACK in task.test_files
    right, empty, both = grades(tmp_path, task, task.solution, {}, edited_test)
    assert (right.solved, empty.solved, both.solved) == (True, False, True)
    assert empty.passed == set(task.pass_to_pass)


def test_an_instance_may_bring_its_test_command(tmp_path: Path) -> None:
    # Its lists have the ids of the report. The command and its report are checked as the tests are.
    made = make_clone(tmp_path / "clones")
    command = ["python", "-m", "pytest", "-p", "no:cacheprovider", "--junitxml={report}", "tests"]
    ids = [f"pytest::tests.test_lengths::test_{name}" for name in ("centimetres", "kilometres", "total")]
    own = {"FAIL_TO_PASS": ids[:1], "PASS_TO_PASS": ids[1:], "test_command": command, "report": "junit"}
    refused = [own | {"report": "xml"}, own | {"test_command": "pytest"}, {**own, "report": None}, own | {"patch": ""}]
    others = [instance(*made) | changes | {"instance_id": f"a-{at}"} for at, changes in enumerate(refused)]
    (task,), refusals = imported(tmp_path, [instance(*made, **own), *others])
    assert task.runner is not None and (task.fail_to_pass, task.tests) == (ids[:1], [TEST_FILE])
    assert HELD_BACK not in task.test_files
    says = [refusal["reason"].partition(": ")[2] for refusal in refusals]
    for said, expected in zip(says, ["'xml'", "'test_command'", "'report'", "'patch'"], strict=True):
        assert expected in said
    (ended,) = grades(tmp_path, task, {"src/measures/lengths.py": ENDS + REPAIRED})
    assert not ended.solved and "no regular file" in ended.report


def test_an_instance_of_swe_smith_begins_with_its_bug(tmp_path: Path) -> None:
    # There `patch` breaks the newest commit of the clone; the failing tests are hidden.
    make_clone(tmp_path / "clones")
    bug = breaking_patch(tmp_path / "clones")
    clone = tmp_path / "clones" / "acme__measures"
    clone.rename(tmp_path / "clones" / "swesmith__acme__measures.1a2b3c4d")
    (task,), _ = imported(tmp_path, [smith_instance(bug)])
    assert "/ factors" in task.start["src/measures/lengths.py"]
    assert task.solution == {"src/measures/lengths.py": LENGTHS}
    assert task.removed == [TEST_FILE] and "src/measures/lengths.py" in task.prompt
    right, empty = grades(tmp_path, task, task.solution, {})
    assert (right.solved, empty.solved) == (True, False)


def test_only_source_files_can_be_edited(tmp_path: Path) -> None:
    # Tests and files beside them never come from the agent, but whatever the patch itself changes may.
    made = make_clone(tmp_path / "clones")
    (task,), _ = imported(tmp_path, [instance(*made)])
    assert matches("src/measures/other.py", task.editable) and matches("setup.py", task.editable)
    for path in ("tests/data.py", "src/measures/tests/data.py", "src/measures/test_more.py", "README.md"):
        assert not matches(path, task.editable), path
    in_tests = made[1].replace("src/measures/lengths.py", "tests/lengths.py")
    clone = tmp_path / "clones" / "acme__measures"
    (clone / "tests" / "lengths.py").write_text(LENGTHS)
    assert apply_patch(clone, in_tests, field="patch") == {"tests/lengths.py": REPAIRED}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"FAIL_TO_PASS": "[]"}, "its FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": ["test_x (basic.tests.Lengths)"]}, "basic.tests.Lengths"),
        ({"FAIL_TO_PASS": ["test_unknown"]}, "'test_unknown'"),
        ({"base_commit": "0" * 40}, "git archive"),
        ({"repo": "acme/weights"}, "acme__weights"),
        ({"repo": "/etc"}, "'repo' .*'/etc'"),
        ({"repo": "../outside"}, r"'repo' .*'\.\./outside'"),
        ({"base_commit": "--remote=elsewhere"}, "base_commit '--remote=elsewhere'"),
        ({"patch": ""}, "'patch'"),
        ({"patch": "just words"}, "'patch'"),
        ({"patch": "--- a/../x\n+++ b/../x\n"}, r"'patch' .*'\.\./x'"),
        ({"problem": "x", "patch": None, "patches": "y"}, "'patch'"),
        ({"FAIL_TO_PASS": [f"{TEST_FILE}::test_gone"]}, "1 of 3 tests, first .*test_gone"),
        ({"FAIL_TO_PASS": [f"{TEST_FILE}::test_total"]}, "its tests pass without any change"),
    ],
)
def test_an_instance_that_is_no_task_here_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    # The message names the instance, what is wrong and the remedy; a file of such instances only is an error.
    made = make_clone(tmp_path / "clones")
    with pytest.raises(ConfigError, match=f"none of its 1 records became a task:\n.*acme__measures-7: .*{says}"):
        imported(tmp_path, [instance(*made) | changes])


def test_a_patch_that_does_not_apply_names_instance_file_and_hunk(tmp_path: Path) -> None:
    # The second of two hunks was made for another version; a good instance beside it is imported all the same.
    commit, patch, test_patch = make_clone(tmp_path / "clones")
    second = "@@ -30,3 +30,4 @@ def gone():\n a\n b\n+c\n d\n"
    bad = instance(commit, patch + second, test_patch, instance_id="acme__measures-8")
    tasks, (refusal,) = imported(tmp_path, [instance(commit, patch, test_patch), bad])
    assert [task.id for task in tasks] == ["acme__measures-7"]
    assert refusal["place"].endswith("instances.jsonl:2")
    assert refusal["reason"].startswith("acme__measures-8: its 'patch' does not apply: ")
    assert refusal["reason"].endswith("patch failed: src/measures/lengths.py:30")
    assert "acme__measures-8" in (tmp_path / "tasks" / "refused.jsonl").read_text()


def test_functions_named_as_sympy_names_them_are_looked_up(tmp_path: Path) -> None:
    # A bare name is found in the test patch.
    made = make_clone(tmp_path / "clones")
    changes = {"FAIL_TO_PASS": ["test_centimetres"], "PASS_TO_PASS": ["test_total"]}
    (task,), _ = imported(tmp_path, [instance(*made, **changes)])
    assert task.fail_to_pass == [f"{TEST_FILE}::test_centimetres"]


def test_a_patch_of_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\nx = 1\n")
    patch = "--- a/latin.py\n+++ b/latin.py\n@@ -2,1 +2,1 @@\n-x = 1\n+x = 2\n"
    with pytest.raises(ConfigError, match=r"changes latin\.py, which is not UTF-8 text"):
        apply_patch(tmp_path, patch, field="patch")
    with pytest.raises(ConfigError, match="changes a binary file"):
        apply_patch(tmp_path, "diff --git a/x.png b/x.png\nGIT binary patch\nliteral 3\n", field="patch")


def test_a_patch_leads_nowhere_else(tmp_path: Path) -> None:
    # A link that it makes, and a file that is or stands behind a link of the tree, would bring files of this machine.
    link = "diff --git a/x.py b/x.py\nnew file mode 120000\n--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+/etc/hostname\n"
    with pytest.raises(ConfigError, match=r"x\.py is a link"):
        apply_patch(tmp_path, link, field="patch")
    (tmp_path / "tree").mkdir()
    (tmp_path / "secret.py").write_text("a = 1\n")
    (tmp_path / "tree/x.py").symlink_to(tmp_path / "secret.py")
    (tmp_path / "tree/folder").symlink_to(tmp_path)
    for path, name in (("x.py", "x.py"), ("folder/secret.py", "folder")):
        moved = f"diff --git a/{path} b/y.py\nsimilarity index 100%\nrename from {path}\nrename to y.py\n"
        with pytest.raises(ConfigError, match=f"changes {path}, but {name} is a link"):
            apply_patch(tmp_path / "tree", moved, field="patch")


def test_patches_make_delete_and_rename_files(tmp_path: Path) -> None:
    # As git writes them, also without a newline at the end of the patch.
    (tmp_path / "old.py").write_text("a = 1\nb = 2\nc = 3\n")
    (tmp_path / "gone.py").write_text("x = 1\n")
    patch = (
        "diff --git a/gone.py b/gone.py\ndeleted file mode 100644\n--- a/gone.py\n+++ /dev/null\n"
        "@@ -1 +0,0 @@\n-x = 1\n"
        "diff --git a/made.py b/made.py\nnew file mode 100644\n--- /dev/null\n+++ b/made.py\n@@ -0,0 +1 @@\n+y = 1\n"
        "diff --git a/old.py b/new.py\nsimilarity index 60%\nrename from old.py\nrename to new.py\n"
        "--- a/old.py\n+++ b/new.py\n@@ -1,3 +1,3 @@\n a = 1\n-b = 2\n+b = 3\n c = 3"
    )
    changed = apply_patch(tmp_path, patch, field="patch")
    assert changed == {"gone.py": None, "made.py": "y = 1\n", "old.py": None, "new.py": "a = 1\nb = 3\nc = 3\n"}


def test_a_record_of_another_form_and_one_that_comes_twice_are_refused(tmp_path: Path) -> None:
    # The id is taken once; the other's reason names its fields.
    made = make_clone(tmp_path / "clones")
    tasks, refusals = imported(tmp_path, [instance(*made), {"question": "?"}, instance(*made)])
    assert [task.id for task in tasks] == ["acme__measures-7"]
    assert [refusal["place"].rpartition(":")[2] for refusal in refusals] == ["2", "3"]
    assert "question" in refusals[0]["reason"] and "acme__measures-7" in refusals[1]["reason"]


def test_an_import_into_a_folder_of_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").touch()
    with pytest.raises(ConfigError, match=r"tasks\.jsonl"):
        asyncio.run(import_tasks(tmp_path / "instances.jsonl", tmp_path, repositories=tmp_path, runtime=RUNTIME))


def test_a_record_whose_sandbox_fails_ends_nothing_else(tmp_path: Path) -> None:
    # Its files are larger than a sandbox may be; the record after it becomes a task.
    bubblewrap = RuntimeConfig(type="bubblewrap", limits=SandboxLimits(disk_mb=5))
    commit, patch, test_patch = make_clone(tmp_path / "clones")
    long = patch_of(tmp_path / "clones/acme__measures", "src/measures/lengths.py", f"{REPAIRED}#{'#' * 6_000_000}\n")
    large = instance(commit, long, test_patch, instance_id="acme__measures-8")
    fine = instance(commit, patch, test_patch)
    try:
        (task,), (refusal,) = imported(tmp_path, [large, fine], runtime=bubblewrap)
    except SandboxError as error:
        pytest.skip(f"no bubblewrap here: {error}")
    assert task.id == "acme__measures-7" and refusal["place"].endswith("instances.jsonl:1") and refusal["reason"]
    assert len((tmp_path / "tasks" / "refused.jsonl").read_text().splitlines()) == 1


def test_an_import_without_sandboxes_ends_before_it_writes(tmp_path: Path) -> None:
    # No sandbox has that package.
    made = make_clone(tmp_path / "clones")
    broken = RuntimeConfig(type="bubblewrap", packages=["no-such-package"])
    with pytest.raises(SandboxError):
        imported(tmp_path, [instance(*made)], runtime=broken)
    assert not (tmp_path / "tasks").exists()
