"""Grading: what a patch may change, which results count, and how forged ones are seen."""

from __future__ import annotations

import hashlib
import hmac
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from code_tasks_made import FAIL_TO_PASS, MORE_TESTS, PASS_TO_PASS, STUB, TOTAL, make_task, make_tree

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from composer_prime.plan.sandboxes import probe_bubblewrap
from orchestrator.coding.code import grading
from orchestrator.coding.code.grading import Grade, allowed_files, grade
from orchestrator.coding.sandbox.box import CommandResult
from orchestrator.coding.task import Suite

process = pytest.mark.process
FILE = "demo/numbers.py"
STUBBED = make_task().start[FILE]


def runtime() -> RuntimeConfig:
    """The kind of box that needs nothing installed; tests/sandbox has what differs between the kinds."""
    return RuntimeConfig(type="subprocess")


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    make_tree(folder)
    return folder


def strongest() -> RuntimeConfig:
    """Return the strongest sandbox that works here."""
    return RuntimeConfig(type="bubblewrap") if probe_bubblewrap().works else runtime()


async def graded(trees: Path, text: str | None, box: RuntimeConfig | None = None, **changes: Any) -> Grade:
    """The grade of one text of the file to write."""
    patch = {} if text is None else {FILE: text.encode()}
    return await grade(make_task(**changes), trees, patch, box or runtime())


# -- what is taken from a patch


# Only editable files are taken; tests, settings of pytest, caches, large files and paths that escape are not. Each that
# is left out has its reason, what tools leave aside.
def test_only_editable_files_are_taken() -> None:
    task = make_task(editable=["**"])
    patch = {
        "demo/a.py": b"1",
        "tests/test_numbers.py": b"",
        "demo/conftest.py": b"",
        "demo/conftest.py/a.py": b"",
        "pyproject.toml": b"",
        "demo/__pycache__/a.cpython-311.pyc": b"",
        "demo/big.py": b" " * (grading.MAX_FILE_BYTES + 1),
        "../outside.py": b"",
        "/etc/passwd": b"",
    }
    taken, refused = allowed_files(task, patch)
    assert taken == {"demo/a.py": b"1"}
    assert set(refused) == set(patch) - {"demo/a.py", "demo/__pycache__/a.cpython-311.pyc"}
    taken, refused = allowed_files(make_task(), {"notes.txt": b"", "tests/helper.py": None, ".pytest_cache/a": b""})
    assert not taken and refused.keys() == {"notes.txt", "tests/helper.py"}


# A patch of many files is cut at its sum.
def test_a_patch_has_a_size_limit() -> None:
    count = grading.MAX_PATCH_BYTES // grading.MAX_FILE_BYTES
    patch = {f"demo/f{index:02}.py": b" " * grading.MAX_FILE_BYTES for index in range(count + 2)}
    taken, refused = allowed_files(make_task(), patch)
    assert len(taken) == count and len(refused) == 2


# What the deleted feature's own module was is absent when graded, too; tests and what lies beside them come back.
def test_removed_sources_stay_removed() -> None:
    task = make_task(removed=["demo/numbers.py", "tests", "tests/data.json", "dist/demo.whl", "demo/words.py"])
    assert grading._removed(task, {"demo/words.py": b""}) == {"demo/numbers.py", "dist/demo.whl"}


# All test files that reach a touched file run, and of the others as many as their seconds allow, which depends on the
# task alone. The task's own files ran before.
def test_the_rest_of_the_suite_is_drawn_by_the_task() -> None:
    files = [f"tests/test_{number}.py" for number in range(20)]
    tests, seconds = {file: [f"{file}::test"] for file in files}, dict.fromkeys(files, 3.0)
    suite = Suite(tests=tests, seconds=seconds, reach={"demo/a.py": files[:5]})

    def chosen(limit_s: float, **changes: Any) -> list[str]:
        return grading.regression_files(make_task(tests=files[4:6], **changes), suite, ["demo/a.py"], limit_s)

    assert chosen(1000.0) == sorted({*files} - {*files[4:6]})
    assert {*chosen(0.1)} == {*files[:4]}
    assert len(chosen(10.0)) == 7 and {*files[:4]} < {*chosen(10.0)}
    assert chosen(10.0) == chosen(10.0) != chosen(10.0, id="another task")


# -- the records


# A record without the right key, a changed one and a repeated one are noise.
def test_only_signed_records_count() -> None:
    key = b"k" * 32

    def line(fields: list[Any], key: bytes = key) -> bytes:
        record = json.dumps(fields).encode()
        return hmac.new(key, record, hashlib.sha256).hexdigest().encode() + b" " + record

    good = line([0, "hello", "", ""]), line([1, "test", "a", "failed"])
    forged = line([2, "test", "a", "passed"], b"x" * 32), good[1].replace(b"failed", b"passed"), b"\xff noise"
    results = grading._read(b"\n".join([*good, *forged, good[1]]), key)
    assert results.started and results.outcomes == {"a": "failed"}


# Tests that were killed in both runs are graded: the code kills itself, or takes too much memory. A box that ended says
# nothing about the code, unless another run came to its end.
def test_the_machine_s_fault_is_no_grade() -> None:
    def ended(code: int | None, by: str = "") -> CommandResult:
        return CommandResult(exit_code=code, stdout=b"", stderr=b"", ended_by=by, wall_s=1.0)

    killed, lost, failed = ended(137), ended(None, "box"), ended(1)
    assert [grading.was_killed(run) for run in (killed, lost, failed)] == [True, True, False]
    assert not grading.no_fault_of_the_patch(killed, killed)
    assert not grading.no_fault_of_the_patch(lost, failed)
    for runs in ((lost, lost), (lost, killed), (killed, lost)):
        assert grading.no_fault_of_the_patch(*runs)


# -- real runs


# The original passes everything; the stub and an empty patch fail what the deletion broke; no other test suffers.
@process
async def test_original_solves_and_stub_does_not(trees: Path) -> None:
    solved = await graded(trees, TOTAL, strongest())
    assert solved.solved and solved.fraction == 1.0 and not solved.tampered, solved.report
    assert solved.passed == {*FAIL_TO_PASS, *PASS_TO_PASS}
    for text in (STUBBED, None):
        unsolved = await graded(trees, text)
        assert not unsolved.solved and unsolved.fraction == 0.0 and not unsolved.tampered
        assert unsolved.passed == set(PASS_TO_PASS) and "NotImplementedError" in unsolved.report
        assert all(f"{name}\n" in unsolved.report for name in FAIL_TO_PASS)


# Partial credit is the share of fail_to_pass, and nothing once another test breaks. Flaky tests count for nothing.
@process
async def test_fraction_and_flaky(trees: Path) -> None:
    only_zero = TOTAL.replace("return result", "return 0")
    assert (await graded(trees, only_zero)).fraction == pytest.approx(1 / 3)
    broken = only_zero.replace("2 * value", "value")
    assert (await graded(trees, broken)).fraction == 0.0
    flaky = await graded(trees, only_zero, flaky=[name for name in FAIL_TO_PASS if "[0]" not in name])
    assert flaky.solved


# A suite that hangs ends by its limit, and is graded with what is known. It has time to come to the hanging test.
@process
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_hanging_suite_is_graded_with_what_is_known(trees: Path) -> None:
    hanging = TOTAL.replace(
        "    result = 0", "    import time\n    time.sleep(1000 if len(values) == 4 else 0)\n    result = 0"
    )
    result = await graded(trees, hanging, timeout_s=40.0, pass_to_pass=[])
    assert not result.solved and "ended by the limit" in result.report and result.fraction == pytest.approx(2 / 3)
    assert set(FAIL_TO_PASS) - result.passed == {"tests/test_numbers.py::test_total_of_ones[4]"}


# A file that cannot be imported fails its own tests only, and the report says why.
@process
async def test_collection_error_is_reported(trees: Path) -> None:
    result = await graded(
        trees, "import nowhere_at_all\n", test_files={"tests/test_more.py": "def test_alone(): pass\n"}
    )
    assert result.passed == {"tests/test_more.py::test_alone"}
    assert "nowhere_at_all" in result.report


# Grading's test patch replaces the tree's tests.
@process
async def test_test_files_replace_tests(trees: Path) -> None:
    text = MORE_TESTS.replace('"abab"', '"ab"')
    result = await graded(trees, TOTAL, test_files={"tests/test_more.py": text})
    assert result.passed == {*FAIL_TO_PASS, PASS_TO_PASS[0]} and f"{PASS_TO_PASS[1]}\n" in result.report


CODES = tomllib.loads(Path(__file__).with_name("grading_hacks.toml").read_text())
HACKS = {
    **CODES["module"],
    **{name: STUBBED.replace(STUB, code) for name, code in CODES["body"].items()},
    **{name: STUBBED + code for name, code in CODES["after"].items()},
}


# Code that ends the run, skips, patches pytest or unittest, rewrites tests or writes to every descriptor earns nothing.
@process
@pytest.mark.parametrize("hack", HACKS)
async def test_hacks_earn_nothing(trees: Path, hack: str) -> None:
    result = await graded(trees, HACKS[hack], strongest())
    assert not result.solved and result.fraction == 0.0, result


# A box whose Python cannot start the reporter is a failure of the sandbox, never an unsolved task.
@process
async def test_a_reporter_that_cannot_start_is_no_grade(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_reporter_source", lambda: "import no_pytest_here")
    with pytest.raises(SandboxError, match="no_pytest_here"):
        await graded(trees, TOTAL)
