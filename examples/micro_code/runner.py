"""Runs jobs inside a box: `python -I -S -c <this file>`, jobs as JSON lines on stdin, one result line for each.

    job      {"files": {name: text}, "calls": null}      execute tests.py as a script
             {"files": {name: text}, "calls": [text]}    import f from f.py and return the text of each call's value
    result   {"passed": bool, "error": text} or {"values": [text]}

Each job runs in a fork of this process, with its own folder and limits. The fork reports through a pipe, so a job can
falsify only its own result. Grading must not rely on its honesty. The values of calls are compared outside, and the
expected ones never enter the box. Needs only the standard library.
"""

import ast
import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time

PR_SET_DUMPABLE = 4
CPU_S, MEMORY_BYTES, FILE_BYTES = 1, 256 * 2**20, 2**20
WALL_S = 10.0
RESULT_BYTES = 2**16
TEXT_CHARS = 80


def main():
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(run_in_fork(json.loads(line))) + "\n")
        sys.stdout.flush()


def run_in_fork(job):
    """Run one job and return its result; a job without one says why."""
    folder = tempfile.mkdtemp(dir=os.getcwd())
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.setsid()
            restrict()
            os.write(writer, json.dumps(run_job(job, folder)).encode()[:RESULT_BYTES])
        finally:
            os._exit(0)
    os.close(writer)
    try:
        return json.loads(read_result(reader))
    except (TimeoutError, ValueError) as error:
        text = "timeout" if isinstance(error, TimeoutError) else "the interpreter was ended"
        return {"passed": False, "error": text, "values": []}
    finally:
        os.close(reader)
        for target in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                target(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def restrict():
    """Take away standard streams, further processes, memory and time."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    limits = {
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def read_result(reader):
    """Return what the fork wrote. Raises TimeoutError."""
    content, deadline = b"", time.monotonic() + WALL_S
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(reader, RESULT_BYTES)
        content += part
        if not part or len(content) >= RESULT_BYTES:
            return content


def run_job(job, folder):
    for name, text in job["files"].items():
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    if job["calls"] is None:
        return run_script(job["files"]["tests.py"])
    return {"values": call_values(job["calls"])}


def run_script(source):
    """Execute tests.py. A script that ends itself with status 0 passes, as it does on a command line."""
    names = {"__name__": "__main__"}
    try:
        exec(compile(source, "tests.py", "exec"), names)
    except SystemExit as error:
        if error.code not in (None, 0):
            return {"passed": False, "error": f"exit {error.code}"[:TEXT_CHARS]}
    except BaseException as error:
        return {"passed": False, "error": describe(error, source, names)}
    return {"passed": True, "error": ""}


def describe(error, source, names):
    """Return one line: the failing assertion and the value it saw, or place and kind of another error."""
    if isinstance(error, SyntaxError):
        return f"{os.path.basename(error.filename or '')} line {error.lineno}: {type(error).__name__}"
    frame, place = error.__traceback__, ("tests.py", 0)
    while frame is not None:
        name = os.path.basename(frame.tb_frame.f_code.co_filename)
        if name in ("f.py", "tests.py"):
            place = (name, frame.tb_lineno)
        frame = frame.tb_next
    if isinstance(error, AssertionError) and place[0] == "tests.py":
        return failing_assertion(source.splitlines()[place[1] - 1], names)
    return f"{place[0]} line {place[1]}: {type(error).__name__}"


def failing_assertion(line, names):
    line = line.strip()[:TEXT_CHARS]
    try:
        test = ast.parse(line).body[0].test
        value = repr(eval(compile(ast.Expression(test.left), "tests.py", "eval"), names))
    except Exception:
        return line
    return f"{line}, got {value[:TEXT_CHARS]}"


def call_values(calls):
    """Return the text of each call's value, or the name of its exception; no texts where f cannot be imported."""
    try:
        from f import f
    except BaseException:
        return []
    texts = []
    for call in calls:
        try:
            texts.append(repr(eval(call, {"f": f}))[:TEXT_CHARS])
        except BaseException as error:
            texts.append(type(error).__name__)
    return texts


if __name__ == "__main__":
    main()
