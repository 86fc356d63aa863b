"""The bubblewrap box: Linux namespaces, a resident first process, and limits.

    host                                      box (own user, pid, network, mount, ipc, uts, cgroup namespaces)
    BubblewrapBox --socket pair, fds-->       box_init.py (PID 1) --fork--> command
         |  <------- pipes: stdout, stderr ------------------------------------+
         +-- /proc/PID/root/work ------->     tmpfs /work            files are read without the box's help

The box has no network but its own loopback. Its first process opens a listening socket there and hands it over.
bwrap dies with this process (--die-with-parent), and the box dies with bwrap.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import resource
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from composer_prime.plan.sandboxes import why_not_started
from orchestrator.coding.sandbox.box import WORK, Box, CommandResult, CommandStreams, inside_path
from orchestrator.coding.sandbox.host_view import HostView, processes_of, read_regular
from orchestrator.coding.sandbox.isolation import box_environment, launch
from orchestrator.coding.sandbox.python_image import NPM, python_image

START_TIMEOUT_S = 100.0
END_TIMEOUT_S = 10.0
_MIB, _GIB = 1 << 20, 1 << 30
_LIMITS_OF_THE_BOX = ("memory_gb", "files")
"""Limits of what all processes hold together, whichever command began them."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.1, 0.5
"""The first and the largest pause between two measurements of a running command."""
_FRAME = struct.Struct(">I")
_MAX_REPLY_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 30.0


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
        super().__init__(runtime.limits, variables)
        self.process = process
        self.view = view
        self.control = control

    @classmethod
    async def open(cls, runtime: RuntimeConfig, python_path: Sequence[str] = ()) -> BubblewrapBox:
        image = await asyncio.to_thread(python_image, tuple(runtime.packages))
        variables = box_environment(python_path)
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
        control, limits = ControlChannel(here), runtime.limits
        # JavaScript engines reserve far more addresses than they use: only what is resident counts then.
        reserves = any(name.startswith(NPM) for name in runtime.packages)
        memory_bytes = resource.RLIM_INFINITY if reserves else int(limits.memory_gb * _GIB)
        amounts = {"memory_bytes": memory_bytes, "file_bytes": int(limits.file_mb * _MIB)}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await control.ask({"op": "limits", "limits": {**amounts, "processes": limits.processes}})
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

    async def _play(self, argv: Sequence[str], env: Mapping[str, str], streams: CommandStreams) -> CommandResult:
        if not argv or any("\0" in word for word in (*argv, *env, *env.values())):
            raise ValueError(f"a command needs words without NUL, but got {list(argv)!r} with {dict(env)!r}")
        request = {
            "op": "run",
            "command": streams.number,
            "argv": list(argv),
            "env": env,
            "stdin": len(streams.child_fds) > 2,
            "cpu_s": math.ceil(streams.limits.cpu_s),
            "keep_others": self.keeps_others,
        }
        answer = asyncio.ensure_future(self.control.ask(request, fds=streams.child_fds))
        try:
            await self._watch(answer, streams)
            reply = await self._last_reply(answer)
        except asyncio.CancelledError:
            self._end_command(streams, "")
            await self._last_reply(answer)
            raise
        await streams.drained(0.2 if self.keeps_others else END_TIMEOUT_S)
        if reply is not None and "error" in reply:
            return streams.result(126, f"the sandbox could not start the command: {reply['error']}\n")
        return streams.result(None if reply is None else int(reply["status"]))

    def _end_command(self, streams: CommandStreams, limit: str) -> None:
        """End a command, with others unless the box keeps them and holds too much."""
        alone = self.keeps_others and limit not in _LIMITS_OF_THE_BOX
        self.control.tell({"op": "kill", "command": streams.number if alone else None})

    async def _last_reply(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                return await answer
        except OSError:  # TimeoutError is one.
            await self.close()
            return None

    async def _watch(self, answer: asyncio.Future[Any], streams: CommandStreams) -> None:
        deadline = time.monotonic() + streams.limits.wall_s
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
                streams.end(limit)
                return
            near = usage["memory_gb"] > self._limits.memory_gb / 4 or usage["processes"] > 16
            pause_s = _FIRST_LOOK_S if near else min(_LAST_LOOK_S, pause_s * 1.5)

    def _passed(self, usage: Mapping[str, float], start: Mapping[str, float]) -> str:
        limits = self._limits
        if usage["memory_gb"] > limits.memory_gb:
            return "memory_gb"
        # It is measured of all commands. Where there are several, the kernel limits each process.
        if usage["cpu_s"] - start["cpu_s"] > limits.cpu_s and not self.keeps_others:
            return "cpu_s"
        return "files" if usage["files"] > max(limits.files, start["files"]) else ""

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self._check_open()
        listed = [(inside_path(path), len(content)) for path, content in files.items()]
        self._given |= {path.removeprefix(f"{WORK}/") for path, _ in listed}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self.control.ask({"op": "write", "files": listed}, payload=b"".join(files.values()))
        except OSError as error:
            await self.close()
            raise SandboxError(f"the sandbox ended while files were written: {error}") from error
        if "error" in reply:
            raise OSError(f"the sandbox could not write a file: {reply['error']}")

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        self._check_open()
        inside = inside_path(path)
        try:
            return read_regular(os.dup(self.view.root_fd), inside, max_bytes)
        except FileNotFoundError:
            with contextlib.suppress(PermissionError):  # Code in the box took its own permission away.
                os.close(self._open_work())
            raise

    def _open_work(self) -> int:
        return self.view.open_work()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.view.kill()
        self.control.close()
        await asyncio.to_thread(self._wait_for_end)

    def _wait_for_end(self) -> None:
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

    def _has_ended(self) -> bool:
        return self._closed or self.control.closed


# The socket to the first process: requests, replies by their ids, and ports.


class ControlChannel:
    """Requests to one box, and its ports. Every pending request fails with ConnectionResetError when the box ends."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._socket = control
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._fds: list[int] = []
        self._buffer = bytearray()
        self._sending = asyncio.Lock()
        self.closed = False
        self._servers: dict[int, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._connections: set[asyncio.Task[None] | None] = set()
        self._loop.add_reader(control.fileno(), self._read)

    async def ask(
        self, request: dict[str, Any], *, fds: list[int] | None = None, payload: bytes = b""
    ) -> dict[str, Any]:
        """Send a request and return its reply. Closes `fds` once they are sent. Raises OSError when the box ends."""
        if self.closed:
            raise ConnectionResetError("the sandbox has ended")
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._pending[number] = answer
        try:
            await self._send({**request, "id": number}, fds or [], payload)
            return await answer
        finally:
            self._pending.pop(number, None)

    def tell(self, request: dict[str, Any]) -> None:
        async def send() -> None:
            with contextlib.suppress(OSError):
                await self._send(request, [], b"")

        if not self.closed:
            self._telling = asyncio.ensure_future(send())

    async def _send(self, request: dict[str, Any], fds: list[int], payload: bytes) -> None:
        data = json.dumps(request).encode()
        message = _FRAME.pack(len(data)) + data
        async with self._sending:
            if fds:
                # Descriptors travel with the first bytes, which fit, as nothing else waits in the socket.
                socket.send_fds(self._socket, [message[:4]], fds)
                message = message[4:]
                while fds:
                    os.close(fds.pop())
            await self._loop.sock_sendall(self._socket, message + payload)

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        self._fds += fds
        self._buffer += data
        if not data or not self._dispatch():
            self.close()

    def _dispatch(self) -> bool:
        while len(self._buffer) >= _FRAME.size:
            (size,) = _FRAME.unpack_from(self._buffer)
            if size > _MAX_REPLY_BYTES:
                return False
            if len(self._buffer) < _FRAME.size + size:
                break
            data = bytes(self._buffer[_FRAME.size : _FRAME.size + size])
            del self._buffer[: _FRAME.size + size]
            try:
                reply = json.loads(data)
                answer = self._pending.get(reply["id"])
            except (ValueError, TypeError, KeyError):
                return False
            if answer is not None and not answer.done():
                answer.set_result(reply)
        return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for server in self._servers.values():
            server.close()
        for task in self._connections:
            if task is not None:
                task.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the sandbox ended"))

    async def forward(self, port: int) -> None:
        async with self._opening:
            if port in self._servers:
                return
            reply = await self.ask({"op": "listen", "port": port})
            if "error" in reply:
                raise SandboxError(f"the sandbox cannot listen on its port {port}: {reply['error']}")
            listening = socket.socket(fileno=self._fds.pop(0))  # It came with the reply.
            self._servers[port] = await asyncio.start_server(functools.partial(self._serve, port), sock=listening)

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    host_reader, host_writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.closing(host_writer):
                    await asyncio.gather(_copy(reader, host_writer), _copy(host_reader, writer))
        finally:
            self._connections.discard(task)
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
