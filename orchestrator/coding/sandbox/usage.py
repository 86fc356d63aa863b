"""What the processes of a box use, measured from the host, where code in the box cannot change it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from composer_prime.config.sandbox import SandboxLimits

_TICKS = os.sysconf("SC_CLK_TCK")
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxUsage:
    processes: int
    memory_bytes: int
    """Anonymous and shared memory of all processes. Pages that a fork shares with its parent count for both."""
    cpu_s: float
    """Of all processes that ever ran in the box."""
    files: int
    """Files and folders in the work folder, or in /tmp where those are more."""

    def beyond(self, limits: SandboxLimits, start: BoxUsage) -> str:
        """Return the name of the limit that a command passed which began at `start`; "" for none."""
        if self.memory_bytes > limits.memory_gb * _GIB:
            return "memory_gb"
        if self.cpu_s - start.cpu_s > limits.cpu_s:
            return "cpu_s"
        if self.files > max(limits.files, start.files):
            return "files"
        return ""


def measure(init_pid: int, root_fd: int) -> BoxUsage:
    """Measure a box by its first process's pid and its root folder. Raises OSError when there is no such folder."""
    pids = processes_of(init_pid)
    usages = [_memory_and_cpu(pid) for pid in pids]
    files = [_files_below(root_fd, folder) for folder in ("work", "tmp")]
    return BoxUsage(
        processes=len(pids),
        memory_bytes=sum(memory for memory, _ in usages),
        cpu_s=sum(cpu for _, cpu in usages),
        files=max(files),
    )


def _files_below(root_fd: int, folder: str) -> int:
    """Return the inodes in use on the file system of a folder."""
    # O_PATH needs no permission, which code in the box may take away.
    folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        status = os.fstatvfs(folder_fd)
        return status.f_files - status.f_ffree
    finally:
        os.close(folder_fd)


def processes_of(init_pid: int) -> list[int]:
    """Return the host's pids of a box. Orphans become children of its first process, so its tree is complete."""
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
    """Return bytes and seconds of one process; zeros for one that has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = [line.split() for line in file if line.startswith((b"RssAnon:", b"RssShmem:"))]
        # utime, stime, and those of children that were waited for: fields 14 to 17 of proc(5).
        return sum(int(line[1]) for line in lines) * 1024, sum(int(field) for field in fields[11:15]) / _TICKS
    return 0, 0.0
