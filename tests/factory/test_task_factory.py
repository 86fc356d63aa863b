"""`composer tasks make`, `check` and `show` on a small package, with real test runs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError
from orchestrator.coding.code.grading import Grade, grade
from orchestrator.coding.factory.check import patch_of_tests
from orchestrator.coding.task import CodeTask, read_tasks
from orchestrator.coding.tasks_command import main
from tests.factory.package_made import PACKAGE, SHAPES, TESTS, git, write_archive, write_package

pytestmark = pytest.mark.process

RUNTIME = ["--runtime", "subprocess"]


def make(source: Path, out: Path, *words: str) -> int:
    return main(["make", str(source), "-o", str(out), "--jobs", "2", *RUNTIME, *words])


def report_of(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def graded(task: CodeTask, out: Path, patch: dict[str, bytes]) -> Grade:
    return asyncio.run(grade(task, out / "trees", patch, RuntimeConfig(type="subprocess")))


# From an archive come deletions and mutations. Grading agrees: neither an empty patch nor one of tests solves.
def test_make_from_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = write_archive(tmp_path / "shapes_made-1.0.tar.gz", PACKAGE)
    assert make(archive, tmp_path / "out", "--mutations", "1", "--min-lines", "2") == 0
    tasks = {task.id: task for task in read_tasks(tmp_path / "out")}
    assert {task.kind for task in tasks.values()} == {"delete", "mutate"}
    deleted = tasks["shapes_made-1.0/delete/shapes_made.shapes.around+1"]
    assert "_double" not in deleted.start["shapes_made/shapes.py"] and "_double" not in deleted.prompt
    assert deleted.fail_to_pass == ["tests/test_shapes.py::test_around"] and len(deleted.pass_to_pass) == 4
    assert deleted.license == "MIT" and deleted.editable == ["shapes_made/*.py"]
    mutated = next(task for task in tasks.values() if task.kind == "mutate")
    assert mutated.fail_to_pass[0] in mutated.prompt and "shapes_made/shapes.py" not in mutated.prompt
    for task in (deleted, mutated):
        solution = {path: text.encode() for path, text in task.solution.items()}
        assert graded(task, tmp_path / "out", solution).solved
        assert not graded(task, tmp_path / "out", {}).solved
        assert not graded(task, tmp_path / "out", patch_of_tests(task)).solved
    report = report_of(tmp_path / "out")
    assert report["tasks"] == len(tasks) and report["refused_by_reason"].keys() <= {"no test fails"}
    assert main(["check", str(tmp_path / "out"), "--sample", "2", "--times", "2", "--jobs", "2", *RUNTIME]) == 0
    assert "2 of 2" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "out"), deleted.id]) == 0
    assert "Return the length of the border." in capsys.readouterr().out


# A run that was cut off goes on: what is done is not repeated, and the tasks are the same as without the cut.
def test_make_goes_on_and_is_deterministic(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made")
    assert make(source, tmp_path / "whole", "--kinds", "delete") == 0
    assert make(source, tmp_path / "cut", "--kinds", "delete") == 0
    whole, cut = tmp_path / "whole/tasks.jsonl", tmp_path / "cut/tasks.jsonl"
    assert whole.read_bytes() == cut.read_bytes()
    making = tmp_path / "cut/making.jsonl"
    making.write_bytes(b"".join(making.read_bytes().splitlines(keepends=True)[:4]))
    assert make(source, tmp_path / "cut", "--kinds", "delete") == 0
    assert whole.read_bytes() == cut.read_bytes()
    assert 0 < report_of(tmp_path / "cut")["made_in_this_run"] < report_of(tmp_path / "whole")["tasks"]
    (source / "shapes_made/shapes.py").write_text(SHAPES.replace("negative", "below zero"))
    with pytest.raises(ConfigError, match="differs from"):
        make(source, tmp_path / "cut", "--kinds", "delete")
    assert whole.read_bytes() == cut.read_bytes()


BAD_TESTS = """
import signal, socket, time


def test_fails():
    assert 1 == 2


def test_network():
    socket.create_connection(("example.org", 80), timeout=1)
"""
SLOW_TESTS = """
import time


def test_slow():
    time.sleep(60)


def test_beside_a_slow_one():
    pass
"""
BLIND_TESTS = """
from shapes_made import shapes


def test_area():
    try:
        shapes.area(1)
    except Exception:
        pass


def test_nothing():
    assert shapes.__name__ == "shapes_made.shapes"
"""


# Tests that fail, need a network or are slow are counted and left out; the others still make tasks.
def test_make_leaves_bad_tests_out(tmp_path: Path) -> None:
    bad = {"tests__test_bad": BAD_TESTS, "tests__test_slow": SLOW_TESTS}
    source = write_package(tmp_path / "shapes_made", **bad)
    words = ["--limit", "2", "--test-timeout", "2"]
    assert make(source, tmp_path / "out", *words) == 0
    left_out = report_of(tmp_path / "out")["baselines"]["shapes_made"]["tests_left_out"]
    beside = "in a file that is slow or has a slow test"
    assert left_out == {"failed": 1, "needs a network": 1, "slow": 1, beside: 1}
    tasks = list(read_tasks(tmp_path / "out"))
    assert len(tasks) == 2
    for task in tasks:
        assert "tests/test_slow.py" not in task.tests
        assert not any("test_bad" in node for node in (*task.fail_to_pass, *task.pass_to_pass))


# A package of which no test passes is refused with the reason, and its C extensions are named.
def test_make_refuses_failing_tests(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made", tests__test_shapes="import shapes_made.fast\ndef test_a(): pass")
    (source / "shapes_made/fast.c").write_text("")
    with pytest.raises(ConfigError, match=r"none of its tests passes(.|\n)*C extensions \(shapes_made/fast\.c"):
        make(source, tmp_path / "out")


# A package whose only tests fail, reach for a network or are slow is refused with one of them and its last words.
@pytest.mark.parametrize(
    ("test", "words"),
    [
        (
            "def test_a():\n    assert 1 + 1 == 3",
            r"failed: 1, such as \S+::test_a \(AssertionError: assert 1 \+ 1 == 3\)",
        ),
        (
            "import urllib.request\ndef test_a(): urllib.request.urlopen('http://example.com')",
            r"needs a network: 1, such as \S+::test_a \(.*no network in a task's tests",
        ),
        ("import time\ndef test_a(): time.sleep(60)", r"slow: 1, such as \S+::test_a \(TestTooSlow: longer than 1 s"),
        (
            "def test_a(): pass",
            r"only one of its tests passes(.|\n)*left out: none. A task needs a test that fails and",
        ),
    ],
    ids=["fails", "network", "slow", "one test"],
)
def test_make_names_a_test_that_it_leaves_out(tmp_path: Path, test: str, words: str) -> None:
    source = write_package(tmp_path / "shapes_made", tests__test_shapes=test)
    with pytest.raises(ConfigError, match=words):
        make(source, tmp_path / "out", "--test-timeout", "1")


# A function on the first line of a file is a function like others: the module's own code has that line as well.
def test_make_deletes_a_function_on_the_first_line(tmp_path: Path) -> None:
    source = write_package(
        tmp_path / "shapes_made",
        shapes_made__shapes="def area(width, height):\n    one = width\n    two = height\n    return one * two\n",
        tests__test_shapes="from shapes_made.shapes import area\n"
        "def test_area(): assert area(2, 3) == 6\ndef test_callable(): assert callable(area)\n",
    )
    assert make(source, tmp_path / "out", "--kinds", "delete") == 0
    assert [task.symbols for task in read_tasks(tmp_path / "out")] == [["shapes_made.shapes.area"]]


# A suite that hangs before its first test is refused with the place.
def test_make_refuses_a_hanging_import(tmp_path: Path) -> None:
    source = write_package(
        tmp_path / "shapes_made", tests__test_shapes="import time\ntime.sleep(600)\ndef test_a(): pass"
    )
    with pytest.raises(ConfigError, match=r"do not come to an end \(timeout\)(.|\n)*the import of its tests"):
        make(source, tmp_path / "out", "--suite-timeout", "5")


# Tests that see no behavior give no task: exit status 1, and the report has a reason for each candidate.
def test_make_of_nothing_says_why(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made", tests__test_shapes=BLIND_TESTS)
    assert make(source, tmp_path / "out") == 1
    report = report_of(tmp_path / "out")
    assert report["tasks"] == 0 and report["refused_by_reason"] == {"no test fails": report["candidates"]}
    assert {one["reason"] for one in report["refused"]} == {"no test fails"}
    assert report["baselines"]["shapes_made"]["functions_left_out"]["no test reaches it"] > 3


# One source that cannot be used does not stop the others.
def test_make_goes_on_after_a_bad_source(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made")
    words = [
        "make",
        str(tmp_path / "missing.tar.gz"),
        str(source),
        "-o",
        str(tmp_path / "out"),
        "--limit",
        "1",
        *RUNTIME,
    ]
    assert main(words) == 0
    assert list(report_of(tmp_path / "out")["sources_refused"].values()) == [f"{tmp_path}/missing.tar.gz: no such file"]


# A refusal that ends the command is told once, by its error.
def test_make_tells_a_refusal_once(tmp_path: Path, capsys) -> None:
    with pytest.raises(ConfigError, match=r"missing\.tar\.gz: no such file"):
        main(["make", str(tmp_path / "missing.tar.gz"), "-o", str(tmp_path / "out"), *RUNTIME])
    assert "no such file" not in "".join(capsys.readouterr())


# A commit that changed sources and tests is a task: its sources are put back, its tests stay.
def test_make_from_history(tmp_path: Path) -> None:
    source = write_package(tmp_path / "shapes_made")
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", "begin")
    (source / "shapes_made/shapes.py").write_text(SHAPES + "\n\ndef volume(side):\n    return side**3\n")
    (source / "shapes_made/more.py").write_text("def more():\n    return 1\n")
    test = (
        "\n\ndef test_volume():\n    from shapes_made import more\n    assert shapes.volume(2) == 8 and more.more()\n"
    )
    (source / "tests/test_shapes.py").write_text(TESTS + test)
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", "Add the volume of a cube")
    (source / "README").write_text("read me")
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", "no code")
    assert make(source, tmp_path / "out", "--history", "10", "--limit", "1", "--kinds", "delete", "--hide-tests") == 0
    (task,) = [task for task in read_tasks(tmp_path / "out") if task.kind == "history"]
    assert "Add the volume of a cube" in task.prompt and task.repository == "shapes_made"
    assert task.fail_to_pass == ["tests/test_shapes.py::test_volume"] and len(task.pass_to_pass) == 5
    assert task.start == {"shapes_made/shapes.py": SHAPES} and "shapes_made/more.py" in task.removed
    assert "tests/test_shapes.py" in task.removed
    assert graded(task, tmp_path / "out", {path: text.encode() for path, text in task.solution.items()}).solved
    assert not graded(task, tmp_path / "out", {}).solved


# SIGTERM ends a run as Ctrl-C does: status 130 and a report. The same command then does the rest only.
def test_make_ends_on_sigterm_and_goes_on(tmp_path: Path) -> None:
    source, out = write_package(tmp_path / "shapes_made"), tmp_path / "out"
    words = ["tasks", "make", str(source), "-o", str(out), "--mutations", "8", "--jobs", "1", *RUNTIME]
    run = subprocess.Popen([sys.executable, "-m", "composer_prime.cli.main", *words], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 200
        while not (out / "tasks.jsonl").is_file():
            assert time.monotonic() < deadline and run.poll() is None, "no task within 200 s"
            time.sleep(0.05)
        run.terminate()
        assert run.wait(200) == 130
    finally:
        run.kill()
    first = report_of(out)["made_in_this_run"]
    assert first >= 1
    assert make(source, out, "--mutations", "8") == 0
    report = report_of(out)
    assert report["made_in_this_run"] == report["tasks"] - first > 0


# A number that cannot be is refused before any work, by each command, with the least one.
@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("make", "--jobs", "0"),
        ("make", "--limit", "-1"),
        ("make", "--suite-timeout", "nan"),
        ("import", "--jobs", "-2"),
        ("import", "--shown-tests", "-1"),
        ("check", "--jobs", "0"),
        ("check", "--sample", "0"),
        ("check", "--times", "-3"),
    ],
)
def test_numbers_that_are_too_small_are_refused(tmp_path: Path, command: str, option: str, value: str) -> None:
    out = [] if command == "check" else ["-o", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=rf"{option} {value}\S* is below its least value (\S+): give \1 or more"):
        main([command, str(tmp_path / "in"), *out, option, value])
    assert not (tmp_path / "out").exists()
