"""The bubblewrap box: Linux namespaces, a resident first process, and limits.

    host                                      box (own user, pid, network, mount, ipc, uts, cgroup namespaces)
    BubblewrapBox --socket pair, fds-->       box_init.py (PID 1) --fork--> command
         |  <------- pipes: stdout, stderr ------------------------------------+
         +-- /proc/PID/root/work ------->     tmpfs /work            files are read without the box's help

Work folder and /tmp are tmpfs: their sizes are bounded by the kernel, and they vanish with the box. Nothing of the box
is on the host's disk. bwrap dies with this process (--die-with-parent), and the box dies with bwrap.

As root this process gives bwrap an unprivileged user id first. Inside a user namespace the host's root would still own
the host's files, and the kernel exempts it from RLIMIT_NPROC.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from orchestrator.sandbox.box import NOTHING, WORK, Box, Finished, inside_path
from orchestrator.sandbox.files import list_regular, read_regular
from orchestrator.sandbox.output import CommandStreams
from orchestrator.sandbox.python_image import PythonImage, python_image

BOX_UID = 60_999
"""User id of boxes when this process is root: outside the ranges that Debian and systemd assign."""
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
_FRAME = struct.Struct(">I")
_MAX_REPLY_BYTES = 1 << 16
_MIB = 1 << 20
_READ_ONLY = ("/usr",)
_HIDDEN_FOLDERS = ("/usr/local", "/usr/lib/python3/dist-packages", "/usr/src", "/usr/share/doc", "/usr/games")
_LINKS = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
_SIGNAL_LIMITS = {signal.SIGXCPU: "cpu_s", signal.SIGXFSZ: "file_mb"}


class BubblewrapBox(Box):
    """A box of Linux namespaces. Make one with `open`."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        init_pid: int,
        env: Mapping[str, str],
    ) -> None:
        self.runtime = runtime
        self.init_pid = init_pid
        self._process = process
        self._control = control
        self._env = dict(env)
        self._root_fd: int | None = None
        self._one_at_a_time = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(cls, runtime: RuntimeConfig, python_path: Sequence[str] = ()) -> BubblewrapBox:
        """Start a box. Raises SandboxError with the remedy where bubblewrap does not work."""
        image = await asyncio.to_thread(python_image, runtime.packages)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        here.setblocking(False)
        process, info_fd = _launch(runtime, image, there)
        box = None
        try:
            there.close()
            init_pid = await _init_pid(process, info_fd)
            box = cls(runtime, process, here, init_pid, _environment(image, python_path))
            async with asyncio.timeout(START_TIMEOUT_S):
                await box._ask({"op": "limits", "limits": _limits(runtime)})
            # bwrap names the pid before the box has its own root. The first process's answer comes after.
            box._root_fd = _box_root(init_pid)
        except BaseException as error:
            process.kill()
            stderr = process.communicate()[1].decode(errors="replace").strip()
            here.close()
            if box is not None:
                await box.close()
            if isinstance(error, TimeoutError | OSError | SandboxError):
                raise SandboxError(f"bubblewrap did not start a sandbox: {stderr or error}") from error
            raise
        return box

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = NOTHING,
        stdin: bytes = b"",
        cwd: str = ".",
        timeout_s: float | None = None,
        output_bytes: int | None = None,
    ) -> Finished:
        limits = self.runtime.limits
        ended_by: list[str] = []

        def end(limit: str) -> None:
            ended_by.append(limit)
            self._tell({"op": "kill"})

        async with self._one_at_a_time:
            self._check_open()
            started = time.monotonic()
            streams = CommandStreams(
                stdin,
                keep_bytes=int(limits.output_kb * 1024) if output_bytes is None else output_bytes,
                end_bytes=int(limits.output_mb * _MIB),
                on_flood=lambda: end("output_mb"),
            )
            request = {
                "op": "run",
                "argv": list(argv),
                "env": {**self._env, **env},
                "cwd": inside_path(cwd),
                "stdin": streams.has_stdin,
                "keep_others": False,
            }
            try:
                reply = await self._run_to_end(request, streams, timeout_s or limits.wall_s, end)
                await streams.drained(END_TIMEOUT_S)
                return self._finished(reply, streams, ended_by, time.monotonic() - started)
            finally:
                streams.close()

    async def _run_to_end(
        self, request: dict[str, Any], streams: CommandStreams, timeout_s: float, end: Any
    ) -> dict[str, Any] | None:
        """Return the first process's reply, or None when the box ended."""
        try:
            answer = asyncio.ensure_future(self._ask(request, streams=streams))
            try:
                done, _ = await asyncio.wait([answer], timeout=timeout_s)
                if not done:
                    end("wall_s")
                    await asyncio.wait([answer], timeout=END_TIMEOUT_S)
            finally:
                if not answer.done():
                    # The caller gave up, or the first process does not answer: the control stream is of no more use.
                    answer.cancel()
                    await self.close()
            return answer.result() if not answer.cancelled() else None
        except (OSError, SandboxError):
            await self.close()
            return None

    def _finished(
        self, reply: dict[str, Any] | None, streams: CommandStreams, ended_by: list[str], wall_s: float
    ) -> Finished:
        stderr = streams.stderr.value()
        status: int | None = None
        if reply is None:
            ended_by.append("box")
        elif "error" in reply:
            stderr += f"the sandbox could not start the command: {reply['error']}\n".encode()
            status = 126
        else:
            status = int(reply["status"])
            limit = _SIGNAL_LIMITS.get(-status) if status < 0 else None
            if limit:
                ended_by.append(limit)
        code = None if ended_by or status is None else status if status >= 0 else 128 - status
        return Finished(
            exit_code=code,
            stdout=streams.stdout.value(),
            stderr=stderr,
            ended_by=ended_by[0] if ended_by else "",
            wall_s=wall_s,
        )

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        async with self._one_at_a_time:
            self._check_open()
            listed = [(inside_path(path), len(content)) for path, content in files.items()]
            try:
                reply = await self._ask({"op": "write", "files": listed}, payload=b"".join(files.values()))
            except OSError as error:
                raise SandboxError(f"the sandbox ended while files were written: {error}") from error
        if "error" in reply:
            raise OSError(f"the sandbox could not write a file: {reply['error']}")

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        self._check_open()
        assert self._root_fd is not None
        return read_regular(self._root_fd, inside_path(path), max_bytes)

    async def list_files(self) -> dict[str, int]:
        self._check_open()
        work_fd = os.open(WORK.lstrip("/"), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._root_fd)
        try:
            return await asyncio.to_thread(list_regular, work_fd, self.runtime.limits.files)
        finally:
            os.close(work_fd)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init_pid, signal.SIGKILL)  # Its end ends all processes of its namespace.
        self._process.kill()
        self._control.close()
        if self._root_fd is not None:
            os.close(self._root_fd)
        await asyncio.to_thread(self._process.wait)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox has ended: a limit or its own code ended it; open another one")

    def _tell(self, request: dict[str, Any]) -> None:
        """Send a small request without an answer."""
        data = json.dumps(request).encode()
        with contextlib.suppress(OSError):
            self._control.send(_FRAME.pack(len(data)) + data)

    async def _ask(
        self, request: dict[str, Any], *, streams: CommandStreams | None = None, payload: bytes = b""
    ) -> dict[str, Any]:
        """Send a request and return the first process's answer. Raises OSError when the box ends."""
        loop = asyncio.get_running_loop()
        data = json.dumps(request).encode()
        message = _FRAME.pack(len(data)) + data
        if streams is not None:
            # Descriptors travel with the first bytes, which always fit into an idle socket.
            socket.send_fds(self._control, [message[:4]], streams.child_fds)
            streams.handed_over()
            message = message[4:]
        await loop.sock_sendall(self._control, message + payload)
        (size,) = _FRAME.unpack(await self._receive(4))
        if size > _MAX_REPLY_BYTES:
            raise ConnectionError(f"the sandbox's first process sent {size} bytes instead of a reply")
        return json.loads(await self._receive(size))

    async def _receive(self, count: int) -> bytes:
        content = b""
        while len(content) < count:
            piece = await asyncio.get_running_loop().sock_recv(self._control, count - len(content))
            if not piece:
                raise ConnectionResetError("the sandbox's first process ended")
            content += piece
        return content


def _box_root(init_pid: int) -> int:
    """Open the root folder of a box. Raises SandboxError when it is this process's own."""
    root_fd = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if os.path.samestat(os.fstat(root_fd), os.stat("/")):
        os.close(root_fd)
        raise SandboxError("the sandbox has the host's root folder: bubblewrap did not isolate it; nothing was run")
    return root_fd


def _limits(runtime: RuntimeConfig) -> dict[str, int]:
    limits = runtime.limits
    return {
        "cpu_s": limits.cpu_s,
        "memory_bytes": int(limits.memory_gb * (1 << 30)),
        "file_bytes": int(limits.file_mb * _MIB),
        "processes": limits.processes,
    }


def _environment(image: PythonImage, python_path: Sequence[str]) -> dict[str, str]:
    env = {
        "PATH": f"{image.prefix}/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "USER": "agent",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if python_path:
        env["PYTHONPATH"] = ":".join(inside_path(folder) for folder in python_path)
    return env


def bwrap_arguments(runtime: RuntimeConfig, image: PythonImage) -> list[str]:
    """Return bwrap's arguments, without those that name descriptors and without the command."""
    disk_bytes = str(int(runtime.limits.disk_mb * _MIB))
    arguments = ["--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"]
    arguments += [
        "--as-pid-1",
        "--clearenv",
        "--cap-drop",
        "ALL",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "box",
    ]
    for folder in _READ_ONLY:
        arguments += ["--ro-bind", folder, folder]
    for name in _LINKS:
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    for folder in _HIDDEN_FOLDERS:
        if os.path.isdir(folder):
            arguments += ["--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    for path in runtime.hide:
        if os.path.isdir(path):
            arguments += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", "/dev/null", path]
    arguments += ["--ro-bind", f"{image.folder}/python", image.prefix]
    arguments += ["--ro-bind", f"{image.folder}/etc", "/etc"]
    arguments += ["--ro-bind", f"{image.folder}/box_init.py", "/opt/box_init.py"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(16 * _MIB), "--tmpfs", "/dev/shm"]
    arguments += ["--size", disk_bytes, "--tmpfs", WORK, "--size", disk_bytes, "--perms", "1777", "--tmpfs", "/tmp"]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]


def _launch(runtime: RuntimeConfig, image: PythonImage, control: socket.socket) -> tuple[subprocess.Popen[bytes], int]:
    """Start bwrap. Return it and the descriptor on which it tells the first process's pid."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "orchestrator.source.runtime.type 'bubblewrap' needs the program bwrap: install it (`apt-get install "
            "bubblewrap`), or choose another type (`composer doctor` lists those that work here)"
        )
    info_read_fd, info_write_fd = os.pipe()
    arguments = [program, *bwrap_arguments(runtime, image), "--info-fd", str(info_write_fd)]
    arguments += [image.executable, "-I", "-S", "/opt/box_init.py", str(control.fileno())]
    other_user = {"user": BOX_UID, "group": BOX_UID, "extra_groups": []} if os.geteuid() == 0 else {}
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(control.fileno(), info_write_fd),
            env={},
            cwd="/",
            **other_user,
        )
    except BaseException:
        os.close(info_read_fd)
        raise
    finally:
        os.close(info_write_fd)
    return process, info_read_fd


async def _init_pid(process: subprocess.Popen[bytes], info_fd: int) -> int:
    """Return the host's pid of the box's first process."""

    def read_all() -> bytes:
        deadline = time.monotonic() + START_TIMEOUT_S
        content = b""
        while not content.rstrip().endswith(b"}"):
            if not select.select([info_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no pid from bwrap after {START_TIMEOUT_S:g} s")
            piece = os.read(info_fd, 4096)
            if not piece:
                raise OSError(f"bwrap ended with {process.wait(timeout=END_TIMEOUT_S)}")
            content += piece
        return content

    try:
        return int(json.loads(await asyncio.to_thread(read_all))["child-pid"])
    finally:
        os.close(info_fd)
