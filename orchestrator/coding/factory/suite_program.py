"""Run tests of the tree in the current folder, many times in a row, and print one JSON object.

This file runs inside a box with `python -P -c`. It imports nothing but the standard library and pytest. A job comes on
stdin. The interpreter imports pytest and the job's `preload` once, then forks one child a run. So a run costs the
import of the tree and its tests, and not the start of Python.

    parent ── fork ──> child: imports the tree, runs pytest ── one JSON line a test ──> parent

A child that passes its deadline is killed with its process group.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

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

    def __init__(self, run: dict, descriptor: int, root: str, test_timeout_s: float):
        self.select = set(run["select"]) if run.get("select") is not None else None
        self.exclude = set(run.get("exclude", ()))
        self.out = os.fdopen(descriptor, "w", buffering=1)
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

    def pytest_collection_modifyitems(self, config, items) -> None:
        kept = [
            item
            for item in items
            if item.nodeid not in self.exclude and (self.select is None or item.nodeid in self.select)
        ]
        items[:] = kept
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


def play(run: dict, job: dict, root: str) -> dict:
    """Fork a child that runs the tests of one run, and return its records."""
    receiving, sending = os.pipe()
    said = tempfile.TemporaryFile() if run["trace"] else open(os.devnull, "r+b")  # noqa: SIM115
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        _child(run, job, root, sending, said.fileno())
    os.close(sending)
    data, ended, usage = _listen(child, receiving, started + run["timeout_s"])
    os.close(receiving)
    records = [json.loads(line) for line in data.decode("utf-8", "replace").splitlines() if line.endswith("}")]
    finished = [record["finished"] for record in records if "finished" in record]
    if ended != "timeout" and finished and finished[-1] in COMPLETE:
        ended = ""
    elif run["trace"]:
        said.seek(max(said.seek(0, os.SEEK_END) - MESSAGE_CHARACTERS, 0))
        ended = f"{ended}: {said.read().decode('utf-8', 'replace')}".removesuffix(": ")
    said.close()
    return {
        "key": run["key"],
        "records": records,
        "ended": ended,
        "wall_s": round(time.monotonic() - started, 4),
        "cpu_s": round(usage, 4),
    }


def _listen(child: int, receiving: int, deadline: float) -> tuple[bytes, str, float]:
    """Return what the child wrote, how it ended, and its CPU seconds."""
    data, exit_status, cpu_s = bytearray(), None, 0.0
    while True:
        readable, _, _ = select.select([receiving], [], [], 0.05 if exit_status is None else 0)
        if readable:
            chunk = os.read(receiving, 1 << 16)
            data += chunk
            if chunk:
                continue
            time.sleep(0.002)  # the pipe is closed, and the child is about to end
        if exit_status is not None:
            return bytes(data), f"exit status {exit_status}", cpu_s
        finished, status, usage = os.wait4(child, os.WNOHANG)
        if finished:
            exit_status, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            _kill_group(child)
        elif time.monotonic() > deadline:
            _kill_group(child)
            _, status, usage = os.wait4(child, 0)
            return bytes(data), "timeout", usage.ru_utime + usage.ru_stime


def _kill_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def _child(run: dict, job: dict, root: str, sending: int, said: int) -> None:
    os.setsid()
    for standard in (0, 1, 2):
        os.dup2(said, standard)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.path[:0] = [os.path.normpath(os.path.join(root, folder)) for folder in job["python_path"]]
    status = 70
    try:
        reporter = SuiteReporter(run, sending, root, job["test_timeout_s"])
        status = int(pytest.main([*job["arguments"], *run["tests"]], plugins=[reporter]))
    except BaseException as error:
        os.write(sending, json.dumps({"crash": repr(error)[:MESSAGE_CHARACTERS]}).encode() + b"\n")
    finally:
        os._exit(status)


class PristineTree:
    """Writes a run's files over the tree in the current folder, and afterwards puts everything back.

    Broken code leaves files behind and removes others. The next run must not see that. Bytecode stays, because it costs
    time to make; only that of changed files is removed.
    """

    def __init__(self):
        self.folders, names = _walk()
        self.content = {name: Path(name).read_bytes() for name in names if Path(name).is_file()}
        self.links = names - self.content.keys()
        self.modes = {name: os.stat(name).st_mode for name in self.content}
        self.states = {name: _state(name) for name in self.content}
        # A sandbox has a temporary folder of its own, its HOME. Another folder may hold what is not ours to remove.
        temporary = tempfile.gettempdir()
        self.temporary = Path(temporary) if temporary == os.environ.get("HOME") else None
        self.kept = set(os.listdir(temporary)) if self.temporary else set()

    def write(self, files: dict) -> None:
        """Write path -> text; None removes a file."""
        for name, text in files.items():
            self._put(Path(name), None if text is None else text.encode())

    def restore(self) -> None:
        """Put the tree back as it was, and empty the temporary folder of what is new."""
        folders, names = _walk()
        for folder in folders - self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        for name in names - self.content.keys() - self.links:
            self._put(Path(name), None)
        for folder in self.folders - folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.content.items():
            if name not in names or _state(name) != self.states[name]:
                self._put(Path(name), None)
                self._put(Path(name), content)
                os.chmod(name, self.modes[name])
                self.states[name] = _state(name)
        for left in self.temporary.iterdir() if self.temporary else ():
            if left.name in self.kept:
                continue
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)

    def _put(self, path: Path, content: bytes | None) -> None:
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _walk() -> tuple[set[str], set[str]]:
    """Return the folders and the files below the current folder, without bytecode."""
    folders: set[str] = set()
    files: set[str] = set()
    for place, inner, names in os.walk("."):
        links = [name for name in inner if os.path.islink(os.path.join(place, name))]
        inner[:] = [name for name in inner if name != "__pycache__" and name not in links]
        folders.update(os.path.join(place, name) for name in inner)
        files.update(os.path.join(place, name) for name in (*names, *links))
    return folders, files


def _state(name: str) -> tuple[int, int, int]:
    """Return what tells a changed file. Code can set the time of change of the content, but not that of the file."""
    found = os.lstat(name)
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


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
    gc.collect()
    gc.freeze()
    played = []
    pristine = PristineTree()
    for run in job["runs"]:
        pristine.write(run["files"])
        try:
            played.append(play(run, job, root))
        finally:
            pristine.restore()
    with os.fdopen(answer, "w") as out:
        json.dump({"runs": played, "cpu_s": _cpu_seconds()}, out)


if __name__ == "__main__":
    main()
