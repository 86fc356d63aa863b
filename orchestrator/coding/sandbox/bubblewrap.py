"""The bubblewrap box: Linux namespaces, a resident first process, and limits.

    host                                      box (own user, pid, network, mount, ipc, uts, cgroup namespaces)
    BubblewrapBox --socket pair, fds-->       box_init.py (PID 1) --fork--> command
         |  <------- pipes: stdout, stderr ------------------------------------+
         +-- /proc/PID/root/work ------->     tmpfs /work            files are read without the box's help

Work folder and /tmp are tmpfs: their sizes are bounded by the kernel, and they vanish with the box. Nothing of the box
is on the host's disk. bwrap dies with this process (--die-with-parent), and the box dies with bwrap.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from composer_prime.plan.sandboxes import why_not_started
from orchestrator.coding.sandbox.box import NOTHING, Box, CommandResult, CommandStreams, inside_path
from orchestrator.coding.sandbox.control import ControlChannel, LoopbackPorts
from orchestrator.coding.sandbox.host_view import HostView, list_regular, processes_of, read_regular
from orchestrator.coding.sandbox.isolation import environment, launch
from orchestrator.coding.sandbox.python_image import python_image

START_TIMEOUT_S = 100.0
END_TIMEOUT_S = 10.0
_MIB, _GIB = 1 << 20, 1 << 30
_LIMITS_OF_THE_BOX = ("memory_gb", "files")
"""Limits of what all processes hold together, whichever command began them."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.1, 0.5
"""The first and the largest pause between two measurements of a running command."""


class BubblewrapBox(Box):
    """A box of Linux namespaces. Make one with `open`."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        process: subprocess.Popen[bytes],
        control: ControlChannel,
        view: HostView,
        variables: Mapping[str, str],
    ) -> None:
        self.runtime = runtime
        self.process = process
        """bwrap."""
        self.view = view
        self.ports = LoopbackPorts(control)
        self.keeps_others = False
        """Whether processes may outlive the command that started them; background processes set it."""
        self._control = control
        self._variables = dict(variables)
        self._num_given = 0
        """Files that came from the host."""
        self._one_at_a_time = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._closed = False

    @classmethod
    async def open(cls, runtime: RuntimeConfig, python_path: Sequence[str] = ()) -> BubblewrapBox:
        """Start a box. Raises SandboxError with the remedy where bubblewrap does not work."""
        image = await asyncio.to_thread(python_image, tuple(runtime.packages))
        variables = environment(python_path)
        try:
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with there, contextlib.ExitStack() as on_failure:
                on_failure.enter_context(here)
                process = launch(runtime, image, there)
                on_failure.pop_all()
        except OSError as error:
            raise SandboxError(
                f"a sandbox could not be opened: {error}; if descriptors ran out, raise `ulimit -n` or lower the "
                "number of sandboxes open at one time"
            ) from error
        control = ControlChannel(here)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await control.ask({"op": "limits", "limits": _limits(runtime)})
            children = processes_of(process.pid)[1:]  # It has answered, so bwrap has this one child.
            if not children:
                raise ValueError("the kernel lists no children of a process (CONFIG_PROC_CHILDREN)")
            box = cls(runtime, process, control, HostView(children[0]), variables)
            assert process.stderr is not None
            process.stderr.close()  # Open boxes are many, and descriptors are few.
            return box
        except BaseException as error:
            control.close()
            process.kill()
            stderr = (await asyncio.to_thread(process.communicate))[1].decode(errors="replace").strip()
            if isinstance(error, TimeoutError | OSError | ValueError):
                raise SandboxError(why_not_started(stderr or str(error))) from error
            raise

    @property
    def init_pid(self) -> int:
        return self.view.init_pid

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = NOTHING,
        stdin: bytes = b"",
        cwd: str = ".",
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        cpu_s: float | None = None,
    ) -> CommandResult:
        """Run a command, beside others where this box keeps them. `cpu_s` replaces limits.cpu_s."""
        words = [*argv, *(f"{name}={value}" for name, value in env.items())]
        if not argv or any("\0" in word for word in words):
            raise ValueError(f"a command needs words without NUL, but got {list(argv)!r} with {dict(env)!r}")
        async with contextlib.nullcontext() if self.keeps_others else self._one_at_a_time:
            self._check_open()
            number = next(self._numbers)
            request = {
                "op": "run",
                "command": number,
                "argv": list(argv),
                "env": {**self._variables, **env},
                "cwd": inside_path(cwd),
                "stdin": bool(stdin),
                "cpu_s": math.ceil(cpu_s or self.runtime.limits.cpu_s),
                "keep_others": self.keeps_others,
            }
            streams = CommandStreams(self.runtime.limits, output_bytes, lambda limit: self._kill(number, limit))
            try:
                await streams.connect(stdin)
                reply = await self._run_to_end(request, streams, timeout_s or self.runtime.limits.wall_s)
                await streams.drained(0.2 if self.keeps_others else END_TIMEOUT_S)
                if reply is None:
                    return streams.result(None)
                if "error" in reply:
                    return streams.result(126, f"the sandbox could not start the command: {reply['error']}\n")
                return streams.result(int(reply["status"]))
            finally:
                streams.close()

    def _kill(self, number: int, limit: str = "") -> None:
        """End a command. Of a box that keeps others, end its session only, unless what the box holds is too much."""
        alone = self.keeps_others and limit not in _LIMITS_OF_THE_BOX
        self._control.tell({"op": "kill", "command": number if alone else None})

    async def _run_to_end(
        self, request: dict[str, Any], streams: CommandStreams, timeout_s: float
    ) -> dict[str, Any] | None:
        """Return the first process's reply, or None when the box ended."""
        answer = asyncio.ensure_future(self._control.ask(request, fds=streams.child_fds))
        try:
            await self._watch(answer, timeout_s, streams.end)
            return await self._last_reply(answer)
        except asyncio.CancelledError:
            self._kill(request["command"])
            await self._last_reply(answer)
            raise

    async def _last_reply(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the reply to a command that ended or was killed. A box without one is closed, and gives None."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                return await answer
        except OSError:  # TimeoutError is one.
            await self.close()
            return None

    async def _watch(self, answer: asyncio.Future[Any], timeout_s: float, end: Callable[[str], None]) -> None:
        """Return when the command has ended, or had to be."""
        deadline = time.monotonic() + timeout_s
        pause_s, start = _FIRST_LOOK_S, None
        while True:
            left_s = deadline - time.monotonic()
            done, _ = await asyncio.wait([answer], timeout=max(0.0, min(pause_s, left_s)))
            if done:
                return
            try:
                usage = self.view.measure()
            except OSError:  # What cannot be measured cannot be limited.
                await self.close()
                return
            start = start or usage
            limit = "wall_s" if left_s <= 0 else self._passed(usage, start)
            if limit:
                end(limit)
                return
            near = usage["memory_gb"] > self.runtime.limits.memory_gb / 4 or usage["processes"] > 16
            pause_s = _FIRST_LOOK_S if near else min(_LAST_LOOK_S, pause_s * 1.5)

    def _passed(self, usage: Mapping[str, float], start: Mapping[str, float]) -> str:
        """Return the name of the limit that a command passed which began at `start`; "" for none."""
        limits = self.runtime.limits
        if usage["memory_gb"] > limits.memory_gb:
            return "memory_gb"
        # It is measured of all commands. Where there may be several, the kernel limits each process of this one.
        if usage["cpu_s"] - start["cpu_s"] > limits.cpu_s and not self.keeps_others:
            return "cpu_s"
        return "files" if usage["files"] > max(limits.files, start["files"]) else ""

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self._check_open()
        listed = [(inside_path(path), len(content)) for path, content in files.items()]
        self._num_given += len(listed)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self._control.ask({"op": "write", "files": listed}, payload=b"".join(files.values()))
        except OSError as error:
            await self.close()
            raise SandboxError(f"the sandbox ended while files were written: {error}") from error
        if "error" in reply:
            raise OSError(f"the sandbox could not write a file: {reply['error']}")

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        self._check_open()
        try:
            return read_regular(self.view.root_fd, inside_path(path), max_bytes)
        except FileNotFoundError:
            with contextlib.suppress(PermissionError):  # Code in the box took its own permission away.
                os.close(self.view.open_work())
            raise

    async def list_files(self) -> dict[str, int]:
        self._check_open()
        try:
            work_fd = self.view.open_work()
        except PermissionError:  # Code in the box took its own permission away.
            return {}
        try:
            return await asyncio.to_thread(list_regular, work_fd, self.runtime.limits.files + self._num_given)
        finally:
            os.close(work_fd)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.view.kill()
        self.ports.close()
        self._control.close()
        await asyncio.to_thread(self._wait_for_end)

    def _wait_for_end(self) -> None:
        """Wait for bwrap, which waits for the first process. The kernel ends that after all others of the box."""
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.view.close()

    def __del__(self) -> None:
        """End a box that was not closed because its event loop ended first."""
        if not getattr(self, "_closed", True):
            self.process.kill()

    def _check_open(self) -> None:
        if self._closed or self._control.closed:
            raise SandboxError("the sandbox has ended: a limit or its own code ended it; open another one")


def _limits(runtime: RuntimeConfig) -> dict[str, int]:
    limits = runtime.limits
    return {
        "memory_bytes": int(limits.memory_gb * _GIB),
        "file_bytes": int(limits.file_mb * _MIB),
        "processes": limits.processes,
    }
