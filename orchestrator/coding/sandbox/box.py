"""A box: one sandbox with a work folder, in which commands run. `open_box` opens one of the kind that a table names.

bubblewrap     isolated: no host files, no network, own processes, limits
subprocess     limits only; it isolates nothing
module:Class   one of the user's own

What code in a box does is data: a command that fails, floods, hangs or kills everything gives a `CommandResult`.
Only a box that cannot be opened, or has ended, raises SandboxError.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import stat
import time
import types
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath

from composer_prime.config.sandbox import RuntimeConfig, SandboxLimits
from composer_prime.errors import ConfigError, SandboxError
from orchestrator.coding.sandbox.host_view import list_regular

SANDBOXES = {
    "auto": "orchestrator.coding.sandbox.bubblewrap:BubblewrapBox",
    "bubblewrap": "orchestrator.coding.sandbox.bubblewrap:BubblewrapBox",
    "subprocess": "orchestrator.coding.sandbox.subprocess_box:SubprocessBox",
}
"""Short name -> class. The module of each is imported on first use."""
NOTHING: Mapping[str, str] = types.MappingProxyType({})
NO_FILES: Mapping[str, bytes] = types.MappingProxyType({})
WORK = "/work"
_SLACK_BYTES = 1 << 18
_NUMBERS = itertools.count(1)
_SIGNAL_LIMITS: dict[int, str] = {signal.SIGXCPU: "cpu_s", signal.SIGXFSZ: "file_mb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended."""

    exit_code: int | None
    """128 + n after signal n, as in a shell; None when a limit ended the command."""
    stdout: bytes
    stderr: bytes
    ended_by: str = ""
    """Name of the limit that ended the command; `box` when the whole box ended."""
    wall_s: float


class Box(contextlib.AbstractAsyncContextManager["Box"]):
    """One sandbox. Paths are relative to the work folder, or absolute inside the box. Commands run one at a time.

    A kind of box has `_play`, which `run` calls, and `_open_work`; or methods of its own in their place.
    """

    _closed = False
    keeps_others = False
    """Whether commands may run beside others, and leave processes."""

    def __init__(self, limits: SandboxLimits, env: Mapping[str, str]) -> None:
        self._limits = limits
        self._env = env
        self._one_at_a_time = asyncio.Lock()
        self._given: set[str] = set()
        """Files that came from the host, by their paths below the work folder."""

    @classmethod
    @abstractmethod
    async def open(cls, runtime: RuntimeConfig, python_path: Sequence[str] = ()) -> Box:
        """Open a box with an empty work folder. `python_path`: folders below it. Raises SandboxError."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = NOTHING,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        cpu_s: float | None = None,
    ) -> CommandResult:
        """Run a command to its end, then end what it left. Raises SandboxError for a box that has ended."""
        changes = {"wall_s": timeout_s or self._limits.wall_s, "cpu_s": cpu_s or self._limits.cpu_s}
        async with contextlib.nullcontext() if self.keeps_others else self._one_at_a_time:
            self._check_open()
            streams = CommandStreams(self._limits.model_copy(update=changes), output_bytes, self._end_command)
            try:
                await streams.connect(stdin)
                return await self._play(argv, {**self._env, **env}, streams)
            finally:
                streams.close()

    async def _play(self, argv: Sequence[str], env: Mapping[str, str], streams: CommandStreams) -> CommandResult:
        raise NotImplementedError

    def _end_command(self, streams: CommandStreams, limit: str) -> None:
        raise NotImplementedError

    def _has_ended(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._has_ended():
            raise SandboxError("the sandbox has ended: a limit or its own code ended it; open another one")

    @abstractmethod
    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files and the folders above them. Raises OSError for what does not fit or cannot be written."""

    @abstractmethod
    async def read_file(self, path: str, max_bytes: int) -> bytes:
        """Read one regular file, no link. Raises FileNotFoundError, or ValueError beyond `max_bytes`."""

    async def list_files(self) -> dict[str, int]:
        """Return the size in bytes of regular files below the work folder: of all that the host wrote, and others."""
        self._check_open()
        try:
            work_fd = self._open_work()
        except (PermissionError, FileNotFoundError, NotADirectoryError):  # A command took it away.
            return {}
        try:
            return await asyncio.to_thread(list_regular, work_fd, self._limits.files, self._given)
        finally:
            os.close(work_fd)

    def _open_work(self) -> int:
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None:
        """End every process of the box and remove its files. A second call does nothing."""

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def open_box(
    runtime: RuntimeConfig, *, files: Mapping[str, bytes] = NO_FILES, python_path: Sequence[str] = ()
) -> Box:
    """Open a box whose work folder holds `files`. Raises SandboxError, ConfigError."""
    box = await box_class(runtime.type).open(runtime, tuple(python_path))
    try:
        if files:
            await box.write_files(files)
        return box
    except BaseException as error:
        await box.close()
        if not isinstance(error, OSError):
            raise
        raise SandboxError(
            f"the sandbox's files, {sum(map(len, files.values())) / 2**20:.1f} MiB, could not be written: {error}; "
            "raise orchestrator.source.runtime.limits.disk_mb if they do not fit"
        ) from error


def box_class(kind: str) -> type[Box]:
    """Return the class of a kind of box. Raises ConfigError where there is none."""
    if ":" not in kind and kind not in SANDBOXES:
        raise ConfigError(
            f"orchestrator.source.runtime.type is {kind!r}, which only programs of harnesses can have: what opens its "
            "own sandboxes, such as coding tasks, has 'bubblewrap', 'subprocess' and `module:Class`"
        )
    module, _, name = SANDBOXES.get(kind, kind).partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"orchestrator.source.runtime.type {kind!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Box)):
        raise ConfigError(f"orchestrator.source.runtime.type {kind!r} is no subclass of {__name__}.Box")
    return found


def environment(programs: str, home: str, python_path: Sequence[str]) -> dict[str, str]:
    variables = {"PATH": programs, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    if python_path:
        variables["PYTHONPATH"] = os.pathsep.join(python_path)
    return variables


def read_tree(tree: Path) -> dict[str, bytes]:
    """Return the regular files of a folder, by POSIX path, without Python's caches."""
    content = {}
    for folder, subfolders, names in os.walk(tree):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            if stat.S_ISREG(path.lstat().st_mode):
                content[path.relative_to(tree).as_posix()] = path.read_bytes()
    return content


def inside_path(path: str) -> str:
    if "\0" in path or ".." in path.split("/"):
        raise ValueError(f"a path inside a sandbox has no '..' and no NUL, but got {path!r}")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(f"a path inside a sandbox can be written as UTF-8, but got {path!r}") from None
    return str(PurePosixPath(WORK, path))


class CommandStreams:
    """The three standard streams of one command, seen from the host, and what it came to."""

    def __init__(
        self, limits: SandboxLimits, keep_bytes: int | None, kill: Callable[[CommandStreams, str], None]
    ) -> None:
        self.limits = limits
        self.number = next(_NUMBERS)
        self.child_fds: list[int] = []
        self._kill = kill
        self._ended_by = ""
        self._started = time.monotonic()
        self._stdin: asyncio.WriteTransport | None = None
        self._readers: list[asyncio.ReadTransport] = []
        keep_bytes = int(limits.output_kb * 1024) if keep_bytes is None else keep_bytes
        most_bytes = max(keep_bytes, int(limits.output_mb * 2**20))
        self._stdout, self._stderr = (
            _BoundedOutput(keep_bytes, most_bytes, lambda: self.end("output_mb")) for _ in range(2)
        )

    async def connect(self, stdin: bytes) -> None:
        loop = asyncio.get_running_loop()
        if stdin:
            read_fd, write_fd = os.pipe()
            self.child_fds.append(read_fd)
            self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(write_fd, "wb", 0))
            self._stdin.write(stdin)
            self._stdin.write_eof()
        for output in (self._stdout, self._stderr):
            read_fd, write_fd = os.pipe()
            self.child_fds.append(write_fd)
            reader, _ = await loop.connect_read_pipe(lambda output=output: output, os.fdopen(read_fd, "rb", 0))
            self._readers.append(reader)

    def end(self, limit: str) -> None:
        self._ended_by = self._ended_by or limit
        self._kill(self, limit)

    def result(self, status: int | None, note: str = "") -> CommandResult:
        by_status = "box" if status is None else _SIGNAL_LIMITS.get(-status, "")
        limit = self._ended_by or by_status
        return CommandResult(
            exit_code=None if limit or status is None else status if status >= 0 else 128 - status,
            stdout=self._stdout.value(),
            stderr=self._stderr.value() + note.encode(),
            ended_by=limit,
            wall_s=time.monotonic() - self._started,
        )

    def handed_over(self) -> None:
        while self.child_fds:
            os.close(self.child_fds.pop())

    async def drained(self, timeout_s: float) -> None:
        await asyncio.wait([self._stdout.ended, self._stderr.ended], timeout=timeout_s)

    def close(self) -> None:
        self.handed_over()
        if self._stdin is not None and self._stdin.get_write_buffer_size():
            self._stdin.abort()
        for reader in self._readers:
            reader.close()


class _BoundedOutput(asyncio.Protocol):
    def __init__(self, keep_bytes: int, end_bytes: int, on_flood: Callable[[], None]) -> None:
        """`on_flood`: called once, beyond `end_bytes`."""
        self._first_bytes, self._last_bytes = (keep_bytes + 1) // 2, keep_bytes // 2
        self._end_bytes = end_bytes
        self._on_flood = on_flood
        self._first, self._last = bytearray(), bytearray()
        self._total = 0
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        before = self._total
        self._total += len(data)
        free = self._first_bytes - len(self._first)
        self._first += data[:free]
        self._last += data[free:]
        if len(self._last) > self._last_bytes + _SLACK_BYTES:
            del self._last[: -self._last_bytes or None]
        if before <= self._end_bytes < self._total:
            self._on_flood()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def value(self) -> bytes:
        last = bytes(self._last[-self._last_bytes :]) if self._last_bytes else b""
        cut = self._total - len(self._first) - len(last)
        note = b"\n[... %d bytes cut ...]\n" % cut if cut else b""
        return bytes(self._first) + note + last
