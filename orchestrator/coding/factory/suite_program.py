"""Run tests of the tree in the current folder, many times in a row, and print one JSON object.

This file runs inside a box with `python -P -c`. It imports nothing but the standard library and pytest.
A job comes on stdin. The interpreter imports pytest once, then forks one child a run.

    parent ── fork ──> child: imports the tree, runs pytest ── JSON lines ──> records file ──> parent: one result

Each line of the records file is an object with some fields of the result. Tables are merged, other values replaced.
The tree and the home folder of each run are new, because broken code leaves files behind and removes others.
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from _pytest.config import get_config

MESSAGE_CHARACTERS = 1500
COMPLETE = (0, 1, 5)
"""Exit statuses of pytest after it ran all that it found: all passed, some failed, nothing found."""


class SuiteReporter:
    """The pytest plugin of one run: writes a line for each test, and notes which functions it reaches."""

    def __init__(self, records: Path, root: str, is_traced: bool):
        self.out = records.open("a", buffering=1)
        self.pid = os.getpid()
        self.root = root + os.sep
        self.is_traced = is_traced
        self.codes: set = set()
        self.phases: dict = {}
        self.trace_again()

    def write(self, **record) -> None:
        if os.getpid() == self.pid:
            self.out.write(json.dumps(record) + "\n")
            self.out.flush()

    def trace_again(self) -> None:
        if self.is_traced:
            sys.settrace(lambda frame, event, argument: self.codes.add(frame.f_code))

    def reached(self) -> list[str]:
        # A module's own code has line 1 as well, where its first function may begin.
        codes = [code for code in list(self.codes) if code.co_name != "<module>"]
        self.codes.clear()
        inside = {code for code in codes if code.co_filename.startswith(self.root)}
        return sorted({f"{code.co_filename[len(self.root) :]}:{code.co_firstlineno}" for code in inside})

    def pytest_collectreport(self, report) -> None:
        if report.failed or "No module named" in report.longreprtext:
            self.write(collect_errors={report.nodeid: report.longreprtext[-MESSAGE_CHARACTERS:]})

    def pytest_collection_finish(self, session) -> None:
        self.write(imported=self.reached())

    def pytest_runtest_logstart(self, nodeid, location) -> None:
        self.phases = {}
        self.write(running=nodeid)
        self.reached()
        self.trace_again()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        message, assertion = "", ""
        if report.failed and call.excinfo is not None:
            message = call.excinfo.exconly(tryshort=True)[:MESSAGE_CHARACTERS]
            own = [entry for entry in call.excinfo.traceback if str(entry.path) == str(item.path)]
            assertion = str(own[-1].statement).strip()[:MESSAGE_CHARACTERS] if own else ""
        self.phases[report.when] = (outcome, report.duration, message, assertion)
        return report

    def pytest_runtest_logfinish(self, nodeid, location) -> None:
        outcomes = {phase: record[0] for phase, record in self.phases.items()}
        last = outcomes.get("call", outcomes.get("setup", "failed"))
        symptom = next((record for record in self.phases.values() if record[0] == "failed"), ("", 0.0, "", ""))
        record = {
            "node": nodeid,
            "outcome": "failed" if "failed" in outcomes.values() else last,
            "duration_s": round(sum(phase[1] for phase in self.phases.values()), 4),
            "message": symptom[2],
            "assertion": symptom[3],
            "reached": self.reached(),
        }
        self.write(tests={nodeid: record}, running=None)

    def pytest_sessionfinish(self, session, exitstatus) -> None:
        sys.settrace(None)
        self.write(exit_status=int(exitstatus))


def play(run: dict, job: dict, root: str, aside: Path) -> dict:
    records, said = aside / "records", aside / "said"
    records.write_bytes(b"")
    deadline = time.monotonic() + run["timeout_s"]
    child = os.fork()
    if child == 0:
        _child(run, job, root, records, said)
    finished, status = os.waitpid(child, os.WNOHANG)
    while not finished and time.monotonic() < deadline:
        time.sleep(0.005)
        finished, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not finished:
        os.waitpid(child, 0)
    result = _recorded(run, records)
    if not finished or result.get("exit_status") not in COMPLETE:
        ended = f"exit status {os.waitstatus_to_exitcode(status)}" if finished else "timeout"
        output = said.read_text("utf-8", "replace")[-MESSAGE_CHARACTERS:] if run["trace"] else ""
        result["ended"] = f"{ended}: {output}".removesuffix(": ")
    return result


def _recorded(run: dict, records: Path) -> dict:
    result: dict = {"key": run["key"], "tests": {}, "collect_errors": {}, "ended": ""}
    lines = records.read_text("utf-8", "replace").splitlines()
    for record in (json.loads(line) for line in lines if line.endswith("}")):
        for name, value in record.items():
            if isinstance(value, dict):
                result[name].update(value)
            else:
                result[name] = value
    return result


def _child(run: dict, job: dict, root: str, records: Path, said: Path) -> None:
    os.setsid()
    output = os.open(said if run["trace"] else os.devnull, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for standard in (0, 1, 2):
        os.dup2(output, standard)
    # By lines, as the process ends without a flush: the last one says why pytest did not start.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    sys.path[:0] = [os.path.normpath(os.path.join(root, folder)) for folder in job["python_path"]]
    status = 70
    try:
        reporter = SuiteReporter(records, root, run["trace"])
        status = int(pytest.main([*job["arguments"], *run["tests"]], plugins=[reporter]))
    finally:
        os._exit(status)


def replace_tree(pristine: Path, files: dict) -> None:
    for entry in Path().iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    shutil.copytree(pristine, ".", symlinks=True, dirs_exist_ok=True)
    for name, text in files.items():
        path = Path(name)
        path.unlink(missing_ok=True)
        if text is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    root = os.getcwd()
    get_config()  # imports pytest's own plugins
    aside = Path(tempfile.gettempdir(), ".suite")
    pristine, home = aside / "tree", aside / "home"
    shutil.copytree(".", pristine, symlinks=True)
    # By its source's hash, bytecode is never that of another run's file of the same size and second.
    compileall.compile_dir(
        pristine, quiet=2, stripdir=str(pristine), prependdir=root, invalidation_mode=PycInvalidationMode.CHECKED_HASH
    )
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = str(home)
    gc.collect()
    gc.freeze()
    played = []
    for run in job["runs"]:
        replace_tree(pristine, run["files"])
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(exist_ok=True)
        played.append(play(run, job, root, aside))
    with os.fdopen(answer, "w") as out:
        json.dump(played, out)


if __name__ == "__main__":
    main()
