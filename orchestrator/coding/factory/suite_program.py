"""Run tests of the tree in the current folder, many times in a row, and print one JSON object.

This file runs inside a box with `python -P -c`. It imports nothing but the standard library and pytest. A job comes on
stdin. The interpreter imports pytest and the job's `preload` once, then forks one child a run. So a run costs the
import of the tree and its tests, and not the start of Python.

    parent ── fork ──> child: imports the tree, runs pytest ── one JSON line a test ──> records file

A child that passes its deadline is killed with its process group. Broken code leaves files behind and removes others,
so that the tree of each run is a new copy.
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
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
WAITING = 3
"""A test may take this many times its CPU limit on the clock."""
LINE_TRACED_CALLS = 100
"""Calls of a function whose lines are traced; after them only the call itself is noted."""


class NetworkUse(OSError):
    """Raised in a test that reaches for the network."""


class TestTooSlow(BaseException):
    """Raised by the alarm of one test. A BaseException, so that the tested code does not catch it."""


class Reach:
    """Note which functions run, by file and first line. Only calls and a few line events are traced."""

    def __init__(self, root: str):
        self.root = root + os.sep
        self.codes: set = set()
        self.lines: set = set()
        self.calls: dict = {}

    def trace(self, frame, event, argument):
        code = frame.f_code
        self.codes.add(code)
        calls = self.calls.get(code)
        if calls is None:
            inside = code.co_filename.startswith(self.root)
            calls = self.calls[code] = 0 if inside else LINE_TRACED_CALLS
        if calls < LINE_TRACED_CALLS:
            self.calls[code] = calls + 1
            return self._trace_line
        return None

    def _trace_line(self, frame, event, argument):
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace_line

    def take(self) -> list[str]:
        """Return what ran since the last call, as `path:first line`."""
        # A module's own code has line 1 as well, where its first function may begin.
        codes = [code for code in list(self.codes) if code.co_name != "<module>"]
        places = {self.place(code.co_filename, code.co_firstlineno) for code in codes}
        self.codes.clear()
        return sorted(places - {""})

    def place(self, file: str, line: int) -> str:
        return f"{file[len(self.root) :]}:{line}" if file.startswith(self.root) else ""


class SuiteReporter:
    """The pytest plugin of one run: picks the tests and writes a line for each."""

    def __init__(self, run: dict, records: Path, root: str, test_timeout_s: float):
        self.out = records.open("a", buffering=1)
        self.pid = os.getpid()
        self.root = root
        self.test_timeout_s = test_timeout_s
        self.reach = Reach(root) if run.get("trace") else None
        self.network = False
        self.slow = False
        self.phases: dict = {}
        if self.reach:
            sys.settrace(self.reach.trace)
        sys.addaudithook(self._audit)

    def write(self, **record) -> None:
        if os.getpid() == self.pid:
            self.out.write(json.dumps(record) + "\n")
            self.out.flush()

    def _audit(self, event, arguments) -> None:
        if event == "socket.getaddrinfo" and str(arguments[0]) not in ("localhost", "127.0.0.1", "::1", "None", ""):
            self.network = True
            raise NetworkUse("no network in a task's tests")
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            host = str(arguments[1][0])
            if not host.startswith("127.") and host not in ("localhost", "::1", ""):
                self.network = True
                raise NetworkUse("no network in a task's tests")

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.write(collect_error=report.nodeid, message=report.longreprtext[-MESSAGE_CHARACTERS:])

    def pytest_collection_finish(self, session) -> None:
        if self.reach:
            self.write(imported=self.reach.take())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.phases, self.network, self.slow = {}, False, False
        self.write(start=item.nodeid)
        if self.reach:
            self.reach.take()
            sys.settrace(self.reach.trace)
        for alarm, timer, limit_s in self._alarms():
            signal.signal(alarm, self._too_slow)
            signal.setitimer(timer, limit_s)
        try:
            return (yield)
        finally:
            for _, timer, _ in self._alarms():
                signal.setitimer(timer, 0)

    def _alarms(self):
        """CPU time decides, so that a busy machine changes nothing. A test that waits ends by the clock."""
        return (
            (signal.SIGPROF, signal.ITIMER_PROF, self.test_timeout_s),
            (signal.SIGALRM, signal.ITIMER_REAL, WAITING * self.test_timeout_s),
        )

    def _too_slow(self, number, frame) -> None:
        self.slow = True
        raise TestTooSlow(f"longer than {self.test_timeout_s:g} s")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        message, assertion = "", ""
        if report.failed and call.excinfo is not None:
            message, assertion = self._symptom(call.excinfo, item)
        self.phases[report.when] = (outcome, report.duration, message, assertion)
        return report

    def _symptom(self, excinfo, item) -> tuple[str, str]:
        message = excinfo.exconly(tryshort=True)[:MESSAGE_CHARACTERS]
        for entry in reversed(excinfo.traceback):
            if str(entry.path) == str(item.path):
                return message, str(entry.statement).strip()[:MESSAGE_CHARACTERS]
        return message, ""

    def pytest_runtest_logfinish(self, nodeid, location) -> None:
        outcomes = {phase: record[0] for phase, record in self.phases.items()}
        last = outcomes.get("call", outcomes.get("setup", "failed"))
        outcome = "failed" if "failed" in outcomes.values() else last
        symptom = next((record for record in self.phases.values() if record[0] == "failed"), ("", 0.0, "", ""))
        record = {
            "node": nodeid,
            "outcome": "slow" if self.slow else outcome,
            "duration_s": round(sum(phase[1] for phase in self.phases.values()), 4),
            "network": self.network,
            "message": symptom[2],
            "assertion": symptom[3],
        }
        if self.reach:
            record["reached"] = self.reach.take()
        self.write(**record)

    def pytest_sessionfinish(self, session, exitstatus) -> None:
        if self.reach:
            sys.settrace(None)
            lines = {self.reach.place(file, line) for file, line in self.reach.lines}
            modules = [name for name, module in sys.modules.items() if _foreign(module, self.root)]
            self.write(lines=sorted(lines), modules=sorted(modules))
        self.write(finished=int(exitstatus))


def _foreign(module, root: str) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.startswith((sys.prefix, sys.base_prefix)) and not file.startswith(root)


def play(run: dict, job: dict, root: str, aside: Path) -> dict:
    """Fork a child that runs the tests of one run, and return its records."""
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
    lines = records.read_text("utf-8", "replace").splitlines()
    found = [json.loads(line) for line in lines if line.endswith("}")]
    statuses = [record["finished"] for record in found if "finished" in record]
    ended = f"exit status {os.waitstatus_to_exitcode(status)}" if finished else "timeout"
    if finished and statuses and statuses[-1] in COMPLETE:
        ended = ""
    elif run["trace"]:
        ended = f"{ended}: {said.read_text('utf-8', 'replace')[-MESSAGE_CHARACTERS:]}".removesuffix(": ")
    return {"key": run["key"], "records": found, "ended": ended}


def _child(run: dict, job: dict, root: str, records: Path, said: Path) -> None:
    os.setsid()
    output = os.open(said if run["trace"] else os.devnull, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for standard in (0, 1, 2):
        os.dup2(output, standard)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.path[:0] = [os.path.normpath(os.path.join(root, folder)) for folder in job["python_path"]]
    status = 70
    try:
        reporter = SuiteReporter(run, records, root, job["test_timeout_s"])
        status = int(pytest.main([*job["arguments"], *run["tests"]], plugins=[reporter]))
    except BaseException as error:
        with records.open("a") as file:
            file.write(json.dumps({"crash": repr(error)[:MESSAGE_CHARACTERS]}) + "\n")
    finally:
        os._exit(status)


def empty(folder: Path, kept: frozenset = frozenset()) -> None:
    """Remove everything from a folder but the entries named in `kept`."""
    for entry in folder.iterdir():
        if entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def replace_tree(pristine: Path, files: dict, temporary: Path) -> None:
    """Fill the current folder with the tree and `files` (path -> text; None removes one), and empty `temporary`."""
    empty(Path())
    empty(temporary)
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
    for name in job["preload"]:
        try:
            importlib.import_module(name)
        except BaseException:
            continue
    get_config()  # imports pytest's own plugins
    home = Path(tempfile.gettempdir())
    aside = home / ".suite"
    pristine = aside / "tree"
    shutil.copytree(".", pristine, symlinks=True)
    # By its source's hash, bytecode is never that of another run's file of the same size and second.
    compileall.compile_dir(
        pristine, quiet=2, stripdir=str(pristine), prependdir=root, invalidation_mode=PycInvalidationMode.CHECKED_HASH
    )
    (aside / "temporary").mkdir()
    # A sandbox has a temporary folder of its own, its HOME. Another folder may hold what is not ours to remove.
    kept = frozenset(os.listdir(home)) if str(home) == os.environ.get("HOME") else None
    os.environ["TMPDIR"] = tempfile.tempdir = str(aside / "temporary")
    gc.collect()
    gc.freeze()
    played = []
    for run in job["runs"]:
        replace_tree(pristine, run["files"], aside / "temporary")
        if kept is not None:
            empty(home, kept)
        played.append(play(run, job, root, aside))
    with os.fdopen(answer, "w") as out:
        json.dump({"runs": played}, out)


if __name__ == "__main__":
    main()
