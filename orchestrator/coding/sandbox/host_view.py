"""What the host sees of a box: its files and what its processes use.

Code in a box may put anything in the place of a file.
Each component of a path is opened by itself, with O_NOFOLLOW, relative to the folder before it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Collection, Iterator

from composer_prime.errors import SandboxError

MAX_DEPTH = 64
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a FIFO for reading would wait for its writer without O_NONBLOCK.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# O_PATH needs no permission, which code in the box may take away.
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TICKS = os.sysconf("SC_CLK_TCK")
_GIB = 1 << 30
_SOCKET_BYTES = 212_992
"""The kernel's default size of a socket's buffer, which boxes cannot change (`isolation.py`)."""


class HostView:
    def __init__(self, init_pid: int) -> None:
        """Raises SandboxError when the root folder of a box that has answered is this process's own."""
        self.init_pid = init_pid
        self._init_fd = os.pidfd_open(init_pid)
        self.root_fd = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if os.path.samestat(os.fstat(self.root_fd), os.stat("/")):
            self.close()
            raise SandboxError("the sandbox has the host's root folder: bubblewrap did not isolate it; nothing was run")
        self._work_device = os.stat("work", dir_fd=self.root_fd).st_dev

    def open_work(self) -> int:
        """Open the work folder. Raises SandboxError for a box that was killed.

        Its mounts go before its end is heard of. Then the empty folder below the mount shows.
        """
        work_fd = os.open("work", _FOLDER, dir_fd=self.root_fd)
        if os.fstat(work_fd).st_dev != self._work_device:
            os.close(work_fd)
            raise SandboxError("the sandbox was killed while its files were read; open another one")
        return work_fd

    def measure(self) -> dict[str, float]:
        pids = processes_of(self.init_pid)
        usages = [_memory_and_cpu(pid) for pid in pids]
        with open(f"/proc/{self.init_pid}/net/sockstat", "rb") as file:
            sockets = int(file.readline().split()[2])  # "sockets: used 24"
        return {
            "processes": len(pids),
            "memory_gb": (sum(memory for memory, _ in usages) + _SOCKET_BYTES * sockets) / _GIB,
            "cpu_s": sum(cpu for _, cpu in usages),
            "files": max(_inodes_of(self.root_fd, folder) for folder in ("work", "tmp", "dev/shm")),
        }

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.root_fd)
        os.close(self._init_fd)


def read_regular(folder_fd: int, path: str, max_bytes: int) -> bytes:
    """Return a regular file below a folder, and close the latter. Raises FileNotFoundError or ValueError."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    try:
        for part in parts[:-1]:
            inner_fd = os.open(part, _FOLDER, dir_fd=folder_fd)
            os.close(folder_fd)
            folder_fd = inner_fd
        file_fd = os.open(parts[-1] if parts else ".", _FILE, dir_fd=folder_fd)
    except OSError as error:
        raise FileNotFoundError(f"the sandbox has no regular file {path!r}: {error.strerror}") from error
    finally:
        os.close(folder_fd)
    if not stat.S_ISREG(os.fstat(file_fd).st_mode):
        os.close(file_fd)
        raise FileNotFoundError(f"the sandbox has no regular file {path!r}: it is something else")
    with os.fdopen(file_fd, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"the sandbox's file {path!r} has more than {max_bytes} bytes")
    return content


def list_regular(root_fd: int, max_files: int, given: Collection[str]) -> dict[str, int]:
    known, others = {}, {}
    for path, size in _regular_files(root_fd, "", MAX_DEPTH):
        if path in given:
            known[path] = size
        elif len(others) < max_files:
            others[path] = size
    return {**known, **others}


def _regular_files(folder_fd: int, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    with os.scandir(folder_fd) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        try:
            status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield prefix + name, status.st_size
            elif stat.S_ISDIR(status.st_mode) and depth > 0:
                inner_fd = os.open(name, _FOLDER, dir_fd=folder_fd)
                try:
                    yield from _regular_files(inner_fd, f"{prefix}{name}/", depth - 1)
                finally:
                    os.close(inner_fd)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # It was removed meanwhile, or may not be read. After any other error the list would lack files.


def _inodes_of(root_fd: int, folder: str) -> int:
    folder_fd = os.open(folder, _PLACE, dir_fd=root_fd)
    try:
        status = os.fstatvfs(folder_fd)
        return status.f_files - status.f_ffree
    finally:
        os.close(folder_fd)


def processes_of(init_pid: int) -> list[int]:
    pids, waiting = [], [init_pid]
    while waiting:
        pid = waiting.pop()
        pids.append(pid)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    waiting += [int(word) for word in file.read().split()]
    return pids


def _memory_and_cpu(pid: int) -> tuple[int, float]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = [line.split() for line in file if line.startswith((b"RssAnon:", b"RssShmem:"))]
        # utime, stime, and those of children that were waited for: fields 14 to 17 of proc(5).
        return sum(int(line[1]) for line in lines) * 1024, sum(int(field) for field in fields[11:15]) / _TICKS
    return 0, 0.0
