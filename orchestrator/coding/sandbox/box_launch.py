"""Start bubblewrap: what a box sees, and how its first process begins.

As root this process gives bwrap an unprivileged user id first. Inside a user namespace the host's root would still own
the host's files, and the kernel exempts it from RLIMIT_NPROC.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from composer_prime.plan.sandboxes import INSTALL, OTHERWISE
from orchestrator.coding.sandbox import seccomp
from orchestrator.coding.sandbox.box import WORK, inside_path
from orchestrator.coding.sandbox.python_image import PythonImage

START_TIMEOUT_S = 100.0
ISOLATION = (
    *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"),
    *("--clearenv", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "box"),
)
"""bwrap's arguments for everything that a sandbox has of its own."""
BOX_UID = 60_999
"""User id of sandboxes when this process is root: outside the ranges that Debian and systemd assign."""
_END_TIMEOUT_S = 10.0
_MIB = 1 << 20
_SHARED_MEMORY_BYTES = 16 * _MIB
_FOLDERS_OUTSIDE_USR = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
_HIDDEN_FOLDERS = ("/usr/local", "/usr/lib/python3/dist-packages", "/usr/src", "/usr/share/doc", "/usr/games")
_INIT = "/opt/box_init.py"


def bwrap_arguments(runtime: RuntimeConfig, image: PythonImage) -> list[str]:
    """Return bwrap's arguments, without those that name descriptors and without the command."""
    disk_bytes = str(int(runtime.limits.disk_mb * _MIB))
    arguments = [*ISOLATION, "--ro-bind", "/usr", "/usr"]
    for name in _FOLDERS_OUTSIDE_USR:
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    for path in _HIDDEN_FOLDERS:
        if os.path.isdir(path):
            arguments += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    arguments += ["--ro-bind", f"{image.folder}/etc", "/etc", "--ro-bind", f"{image.folder}/box_init.py", _INIT]
    # Debian's awk, which and others are links through this folder.
    arguments += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    for folder in (WORK, "/tmp"):
        arguments += ["--size", disk_bytes, "--tmpfs", folder]
    # Behind /tmp, where an interpreter may be installed.
    arguments += ["--ro-bind", f"{image.folder}/python", image.prefix]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def without_root() -> list[str]:
    """Return the words before bwrap that take root's rights away; none when this process has none."""
    if os.geteuid() != 0:
        return []
    program = shutil.which("setpriv") or "setpriv"
    return [program, f"--reuid={BOX_UID}", f"--regid={BOX_UID}", "--clear-groups", "--inh-caps=-all"]


def environment(image: PythonImage, python_path: Sequence[str]) -> dict[str, str]:
    """Return the variables of every command: nothing of the host's."""
    variables = {
        "PATH": f"{image.prefix}/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "USER": "agent",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if python_path:
        variables["PYTHONPATH"] = ":".join(inside_path(folder) for folder in python_path)
    return variables


def launch(
    runtime: RuntimeConfig, image: PythonImage, control: socket.socket, variables: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start bwrap. Return it and the descriptor on which it names the first process's pid.

    bwrap ends with the thread that calls this (--die-with-parent).
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            f"orchestrator.source.runtime.type 'bubblewrap' needs the program bwrap: {INSTALL}, {OTHERWISE}"
        )
    filter_fd = _seccomp_fd()
    try:
        info_read_fd, info_write_fd = os.pipe()
    except OSError:
        if filter_fd is not None:
            os.close(filter_fd)
        raise
    passed = [control.fileno(), info_write_fd, *([filter_fd] if filter_fd is not None else [])]
    arguments = [*without_root(), program, *bwrap_arguments(runtime, image), "--info-fd", str(info_write_fd)]
    if filter_fd is not None:
        arguments += ["--seccomp", str(filter_fd)]
    for name, value in variables.items():
        arguments += ["--setenv", name, value]
    arguments += [image.executable, _INIT, str(control.fileno())]
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=passed,
            env={},
            cwd="/",
        )
    except OSError as error:
        os.close(info_read_fd)
        raise SandboxError(f"{arguments[0]} could not be started: {error}") from error
    finally:
        for fd in passed[1:]:
            os.close(fd)
    return process, info_read_fd


def _seccomp_fd() -> int | None:
    """Return a descriptor of the filter, at its beginning; None if this machine has no filter."""
    content = seccomp.program()
    if not content:
        return None
    read_fd, write_fd = os.pipe()
    os.write(write_fd, content)  # Far less than a pipe holds.
    os.close(write_fd)
    return read_fd


async def first_pid(process: subprocess.Popen[bytes], info_fd: int) -> int:
    """Return the host's pid of the box's first process. The box has not its own root yet. Closes `info_fd`.

    Raises OSError, TimeoutError when bwrap names none.
    """
    # The thread that reads closes it: a caller that is canceled must not free a number that is still polled.
    info = os.fdopen(info_fd, "rb", buffering=0)

    def read_all() -> bytes:
        with info:
            return read_reply()

    def read_reply() -> bytes:
        deadline = time.monotonic() + START_TIMEOUT_S
        content = b""
        # Not select.select, which knows descriptors below 1024 only.
        ready = select.poll()
        ready.register(info_fd, select.POLLIN)
        while not content.rstrip().endswith(b"}"):
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no pid from bwrap after {START_TIMEOUT_S:g} s")
            piece = os.read(info_fd, 4096)
            if not piece:
                raise OSError(_end_of(process))
            content += piece
        return content

    return int(json.loads(await asyncio.to_thread(read_all))["child-pid"])


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        return f"bwrap ended with status {process.wait(timeout=_END_TIMEOUT_S)}"
    except subprocess.TimeoutExpired:
        return f"bwrap named no pid and did not end within {_END_TIMEOUT_S:g} s"


def open_root(init_pid: int) -> int:
    """Open the root folder of a box that has answered. Raises SandboxError when it is this process's own."""
    root_fd = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if os.path.samestat(os.fstat(root_fd), os.stat("/")):
        os.close(root_fd)
        raise SandboxError("the sandbox has the host's root folder: bubblewrap did not isolate it; nothing was run")
    return root_fd
