"""`composer tasks make` on a small package, with real test runs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from waiting import wait_until

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError
from orchestrator.coding.code.grading import Grade, grade
from orchestrator.coding.formats.conversion import NO_TESTS
from orchestrator.coding.monitor.before import seal
from orchestrator.coding.sandbox.box import read_tree
from orchestrator.coding.task import HELD_BACK, CodeTask, index_tasks
from orchestrator.coding.tasks_command import main
from tests.factory.package_made import SHAPES, TESTS, git, write_package

pytestmark = pytest.mark.process

PARTS = tomllib.loads(Path(__file__).with_name("parts.toml").read_text())
RUNTIME = ["--runtime", "subprocess"]


def make(source: Path, out: Path, *words: str) -> int:
    return main(["make", str(source), "-o", str(out), "--jobs", "2", *RUNTIME, *words])


def commit_all(source: Path, message: str) -> None:
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", message)


def report_of(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def graded(task: CodeTask, out: Path, patch: Mapping[str, bytes | None]) -> Grade:
    return asyncio.run(grade(task, out / "trees", patch, RuntimeConfig(type="subprocess")))


# From a folder come deletions and mutations, the same in each run. Grading agrees with the proofs.
def test_make_from_a_folder(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made")
    assert make(source, tmp_path / "out") == make(source, tmp_path / "again", "--jobs", "1") == 0
    assert (tmp_path / "out/tasks.jsonl").read_bytes() == (tmp_path / "again/tasks.jsonl").read_bytes()
    tasks = {task.id: task for task in dict(index_tasks(tmp_path / "out")).values()}
    assert {task.kind for task in tasks.values()} == {"delete", "mutate"}
    deleted = tasks["shapes_made/delete/shapes_made.shapes.area"]
    assert "width * height" not in deleted.start["shapes_made/shapes.py"] + deleted.prompt
    assert "tests/test_shapes.py::test_area" in deleted.fail_to_pass and len(deleted.pass_to_pass) == 3
    assert deleted.editable == ["shapes_made/**", *NO_TESTS]
    mutated = next(task for task in tasks.values() if task.kind == "mutate")
    assert mutated.fail_to_pass[0] in mutated.prompt and "shapes_made/shapes.py" not in mutated.prompt
    for task in (deleted, mutated):
        solution = {path: text.encode() for path, text in task.solution.items()}
        assert graded(task, tmp_path / "out", solution).solved
        assert not graded(task, tmp_path / "out", {}).solved
        assert not graded(task, tmp_path / "out", patch_of_tests(task)).solved
    report = report_of(tmp_path / "out")
    assert report["tasks"] == len(tasks) and report["refused_by_reason"].keys() <= {"no test fails"}
    assert report["tasks_without_counter_tests"] == 0
    assert report["tasks_without_held_back_inputs"] == sum(HELD_BACK not in each.test_files for each in tasks.values())
    assert HELD_BACK in deleted.test_files and HELD_BACK not in seal(deleted, tmp_path / "out/trees/shapes_made").start
    assert "Return the area of a rectangle." in deleted.prompt
    with pytest.raises(ConfigError, match="-o"):
        make(source, tmp_path / "out")


def patch_of_tests(task: CodeTask) -> dict[str, bytes]:
    """Return a patch that makes every test pass by changing tests alone: emptied tests, and a conftest that lies."""
    lie = PARTS["lying_conftest"].encode()
    patch = dict.fromkeys(task.tests, b"def test_nothing():\n    pass\n")
    return patch | {"conftest.py": lie, "tests/conftest.py": lie}


MORE = "def join(words):\n    text = ''\n    for word in words:\n        text += word\n    return text\n"
TESTS_OF_MORE = "from shapes_made import more, shapes\n\n\ndef test_join():\n    assert more.join(['a', 'b']) == 'ab'\n"


# A solution that breaks another module earns nothing, in full or in part: the rest of the suite runs as well, and the
# grade says for how long. With a bound of 0, or for tasks of earlier releases, the task's own tests alone decide. A
# public name that no test sees must stay too, which is no accusation.
def test_a_patch_that_breaks_another_module_earns_nothing(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made", shapes_made__more=MORE, tests__test_more=TESTS_OF_MORE)
    assert make(source, tmp_path / "out", "--kinds", "delete") == 0
    (task,) = [each for each in dict(index_tasks(tmp_path / "out")).values() if each.id.endswith("shapes.area")]
    assert task.tests == ["tests/test_shapes.py"]
    solution = {path: text.encode() for path, text in task.solution.items()}
    wreck = {**solution, "shapes_made/more.py": b"def join(words):\n    return None\n"}
    gone = {**solution, "shapes_made/more.py": None}
    renamed = {**solution, "shapes_made/more.py": MORE.replace("words", "texts").encode()}
    right, wrong, less, other = (graded(task, tmp_path / "out", patch) for patch in (solution, wreck, gone, renamed))
    assert other.solved and other.elsewhere == ["shapes_made/more.py: join"] and not right.elsewhere
    assert other.elsewhere[0] in other.report
    assert right.solved and 0 < right.regression_s <= right.wall_s
    assert not wrong.solved and wrong.fraction == 0
    assert "tests/test_more.py::test_join\n" in wrong.report and not less.solved and "tests/test_more.py" in less.report
    runtime = RuntimeConfig(type="subprocess")
    unbound = asyncio.run(grade(task, tmp_path / "out/trees", wreck, runtime, regression_s=0.0))
    (tmp_path / "out/trees/shapes_made.json").unlink()
    for result in (unbound, graded(task, tmp_path / "out", wreck)):
        assert result.solved and result.regression_s == 0


# Tests that fail, change their outcome or are slow are counted and left out; the others still make tasks.
def test_make_leaves_bad_tests_out(tmp_path: Path) -> None:
    bad = {"tests__test_bad": PARTS["bad_tests"], "tests__test_slow": PARTS["slow_tests"]}
    source = write_package(tmp_path / "shapes_made", **bad)
    assert make(source, tmp_path / "out", "--limit", "2") == 0
    left_out = report_of(tmp_path / "out")["baselines"]["shapes_made"]["tests_left_out"]
    assert left_out == {"failed": 1, "flaky": 1, "in a slow file": 2}
    tasks = list(dict(index_tasks(tmp_path / "out")).values())
    assert len(tasks) == 2
    for task in tasks:
        assert "tests/test_slow.py" not in task.tests
        assert not any("test_bad" in node for node in (*task.fail_to_pass, *task.pass_to_pass))


# Packages that tests lack here are named with what to do, as such tests guard no task: a test file or a test imports
# one, or is skipped for it.
def test_make_names_packages_that_tests_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = {
        "tests__test_a": "import package_a\ndef test_a(): pass",
        "tests__test_b": "def test_b(): import package_b.part\ndef test_own(): import shapes_made.gone",
        "tests__test_c": "import pytest\npytest.importorskip('package_c')\ndef test_c(): pass",
    }
    assert make(write_package(tmp_path / "shapes_made", **lacking), tmp_path / "out", "--limit", "1") == 0
    assert "--packages package_a,package_b,package_c" in capsys.readouterr().out
    missing = report_of(tmp_path / "out")["baselines"]["shapes_made"]["packages_missing"]
    assert missing == ["package_a", "package_b", "package_c"]


# The agent gets the very tree that was proven: a package finds its own version in it, and no file is too large.
def test_the_agent_gets_the_tree_that_was_proven(tmp_path: Path) -> None:
    test = "from importlib.metadata import version\ndef test_version(): assert version('shapes-made') == '1.0'\n"
    source = write_package(tmp_path / "shapes_made", tests__test_version=test)
    (source / "tests/large.bin").write_bytes(bytes(5 << 20))
    assert make(source, tmp_path / "out", "--limit", "2") == 0
    for task in dict(index_tasks(tmp_path / "out")).values():
        sealed = seal(task, tmp_path / "out/trees" / task.tree)
        assert sealed.start.keys() == read_tree(tmp_path / "out/trees" / task.tree).keys()
        assert "shapes_made-1.0.dist-info/METADATA" in sealed.start and "tests/large.bin" not in sealed.start
    assert report_of(tmp_path / "out")["baselines"]["shapes_made"]["tests"] == 6


# Where another file holds the code as it was, under any name, there is nothing to find out.
def test_make_refuses_what_a_copy_gives_away(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made")
    (source / "shapes before the rewrite.txt").write_text(textwrap.indent(SHAPES, "  "))
    assert make(source, tmp_path / "out") == 1
    report = report_of(tmp_path / "out")
    assert report["refused_by_reason"] == {"the original stands elsewhere": report["candidates"]}


# A package of which no test passes is refused with the reason: a test with its last words, the import error, what a
# conftest.py that cannot be imported lacks, or the place where a suite hangs before its first test.
@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("test_shapes", "import shapes_made.fast\ndef test_a(): pass", "ModuleNotFoundError"),
        (
            "test_shapes",
            "def test_a():\n    assert 1 + 1 == 3",
            r"failed: 1, \D*::test_a \(AssertionError: assert 1 \+ 1 == 3\)",
        ),
        ("test_shapes", "def test_a(): pass", "only one of its tests"),
        ("conftest", "import package_that_is_missing\n", "No module named 'package_that_is_missing'"),
        ("test_shapes", "import time\ntime.sleep(600)\ndef test_a(): pass", "--suite-timeout"),
    ],
    ids=["import", "fails", "one test", "conftest", "hangs"],
)
def test_make_names_why_no_test_passes(tmp_path: Path, file: str, text: str, words: str) -> None:
    source = write_package(tmp_path / "shapes_made", **{f"tests__{file}": text})
    with pytest.raises(ConfigError, match=words):
        make(source, tmp_path / "out", *(["--suite-timeout", "5"] if "sleep" in text else []))


# Files that a build writes and git ignores come from the folder, for the last commit and for those before it.
def test_make_takes_ignored_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_package(tmp_path / "shapes_made")
    (source / "shapes_made/__init__.py").write_text("from shapes_made.made import VERSION\n")
    (source / ".gitignore").write_text("made.py\n")
    commit_all(source, "begin")
    (source / "shapes_made/made.py").write_text("VERSION = 1\n")
    (source / "shapes_made/shapes.py").write_text(SHAPES.replace("value + value", "value * 2"))
    (source / "tests/test_more.py").write_text("def test_more(): pass\n")
    with pytest.raises(ConfigError, match=r"No module named 'shapes_made\.made'"):
        make(source, tmp_path / "without")
    assert "without 2 local edits" in capsys.readouterr().out
    assert make(source, tmp_path / "out", "--limit", "1", "--overlay", "shapes_made/made.py") == 0
    (task,) = dict(index_tasks(tmp_path / "out")).values()
    assert (tmp_path / "out/trees" / task.tree / "shapes_made/made.py").is_file()
    assert report_of(tmp_path / "out")["local_edits_left_out"] == {
        str(source): [" M shapes_made/shapes.py", "?? tests/test_more.py"]
    }
    for path, error in (("shapes_made/no.py", ConfigError), ("../made.py", SystemExit)):
        with pytest.raises(error):
            make(source, tmp_path / "other", "--overlay", path)


# A function on the first line of a file is a function like others: the module's own code has that line as well. A task
# whose test compares nothing is kept, and counted.
def test_make_deletes_a_function_on_the_first_line(tmp_path: Path) -> None:
    source = write_package(
        tmp_path / "shapes_made",
        shapes_made__shapes="def area(width, height):\n    one = width\n    two = height\n    return one * two\n",
        tests__test_shapes="from shapes_made.shapes import area\n"
        "def test_area(): area(2, 3)\ndef test_callable(): assert callable(area)\n",
    )
    assert make(source, tmp_path / "out", "--kinds", "delete") == 0
    assert [task.symbols for task in dict(index_tasks(tmp_path / "out")).values()] == [["shapes_made.shapes.area"]]
    assert report_of(tmp_path / "out")["tasks_without_counter_tests"] == 1


# Tests that see no behavior give no task: exit status 1, and the report has a reason for each candidate.
def test_make_of_nothing_says_why(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made", tests__test_shapes=PARTS["blind_tests"])
    assert make(source, tmp_path / "out") == 1
    report = report_of(tmp_path / "out")
    assert report["tasks"] == 0 and report["refused_by_reason"] == {"no test fails": report["candidates"]}
    assert {one["reason"] for one in report["refused"]} == {"no test fails"}
    assert report["baselines"]["shapes_made"]["functions_left_out"]["no test reaches it"] > 3


# One source that cannot be used does not stop the others; where none can, the command ends with the reason.
def test_make_goes_on_after_a_bad_source(tmp_path: Path) -> None:
    missing, source = str(tmp_path / "missing"), write_package(tmp_path / "shapes_made")
    assert main(["make", missing, str(source), "-o", str(tmp_path / "out"), "--limit", "1", *RUNTIME]) == 0
    assert report_of(tmp_path / "out")["sources_refused"].keys() == {missing}
    with pytest.raises(ConfigError, match=missing):
        main(["make", missing, "-o", str(tmp_path / "other"), *RUNTIME])


# A commit that changed sources and tests is a task: its sources are put back, its tests stay.
def test_make_from_history(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made")
    commit_all(source, "begin")
    (source / "shapes_made/shapes.py").write_text(SHAPES + "\n\ndef volume(side):\n    return side**3\n")
    (source / "shapes_made/more.py").write_text("def more():\n    return 1\n")
    test = (
        "\n\ndef test_volume():\n    from shapes_made import more\n    assert shapes.volume(2) == 8 and more.more()\n"
    )
    (source / "tests/test_shapes.py").write_text(TESTS + test)
    commit_all(source, "Add the volume of a cube")
    (source / "README").write_text("read me")
    commit_all(source, "no code")
    (source / "tests/test_shapes.py").write_text(TESTS + test + "\n")
    commit_all(source, "no source")
    assert make(source, tmp_path / "out", "--history", "10", "--limit", "3", "--kinds", "delete", "--hide-tests") == 0
    refused = {one["detail"]: one["reason"] for one in report_of(tmp_path / "out")["refused"]}
    assert refused == {
        "no code": "the commit changes no test file",
        "no source": "the commit changes no Python source",
        "begin": "the first commit changes nothing",
    }
    (task,) = [task for task in dict(index_tasks(tmp_path / "out")).values() if task.kind == "history"]
    assert "Add the volume of a cube" in task.prompt and task.repository == "shapes_made"
    assert task.fail_to_pass == ["tests/test_shapes.py::test_volume"] and len(task.pass_to_pass) == 5
    assert task.start == {"shapes_made/shapes.py": SHAPES} and "shapes_made/more.py" in task.removed
    assert "tests/test_shapes.py" in task.removed
    assert graded(task, tmp_path / "out", {path: text.encode() for path, text in task.solution.items()}).solved
    assert not graded(task, tmp_path / "out", {}).solved


# SIGTERM ends a run as Ctrl-C does: status 130, the tasks so far, and a report.
def test_make_ends_on_sigterm(tmp_path: Path) -> None:
    body = "    one = value + 1\n    two = one + 2\n    return two\n"
    more = "\n".join(f"def f{number}(value):\n{body}" for number in range(30))
    tests = "from shapes_made import more\n" + "\n".join(
        f"def test_{number}(): assert more.f{number}(1) == 4" for number in range(30)
    )
    source = write_package(tmp_path / "shapes_made", shapes_made__more=more, tests__test_more=tests)
    out = tmp_path / "out"
    words = ["tasks", "make", str(source), "-o", str(out), "--jobs", "1", *RUNTIME]
    run = subprocess.Popen([sys.executable, "-m", "composer_prime.cli.main", *words], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: run.poll() is not None or (out / "tasks.jsonl").is_file(), "a task")
        run.terminate()
        assert run.wait(200) == 130
    finally:
        run.kill()
    assert report_of(out)["tasks"] == len(list(dict(index_tasks(out)).values())) >= 1


# A number that cannot be is refused before any work, by each command.
@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("make", "--jobs", "0"),
        ("make", "--limit", "-1"),
        ("make", "--suite-timeout", "nan"),
        ("import", "--jobs", "-2"),
    ],
)
def test_numbers_that_are_too_small_are_refused(tmp_path: Path, command: str, option: str, value: str) -> None:
    with pytest.raises(SystemExit):
        main([command, str(tmp_path / "in"), "-o", str(tmp_path / "out"), option, value])
    assert not (tmp_path / "out").exists()
