"""This machine: memory, cores, GPUs, ports, installed modules. Loads no torch and runs none of these modules."""

from __future__ import annotations

import ctypes
import errno
import importlib.machinery
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from composer_prime.address import tcp_address
from composer_prime.errors import ConfigError, PortInUseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a plan is measured against."""

    cores: int
    memory_bytes: int
    """Physical memory, or the control group's limit when that is lower."""
    gpus: tuple[int, ...]
    """Memory of each visible GPU, bytes."""
    imagined: bool = False
    """Whether the GPUs are another machine's; this one's memory and disk are then irrelevant."""


def this_machine() -> Machine:
    return Machine(cores=usable_cores(), memory_bytes=memory_limit_bytes(), gpus=visible_gpus())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_limit_bytes() -> int:
    import psutil

    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def visible_gpus() -> tuple[int, ...]:
    """Return the memory of each CUDA device that CUDA_VISIBLE_DEVICES leaves visible; empty without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    sizes = []
    for index in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        sizes.append(size.value)
    return tuple(sizes)


def module_file(name: str) -> Path | None:
    """Return the file of module `name` without running any of its packages; None when it is not installed."""
    search: list[str] | None = None
    spec = None
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None and search is None and part in sys.builtin_module_names:
            return Path(part)
        if spec is None:
            return _editable(name) if search is None else None
        search = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin else Path(search[0]) if search else None


def _editable(name: str) -> Path | None:
    """Ask import hooks, as some editable installs have, about the top package only."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name.partition(".")[0], None) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.origin:
            return Path(spec.origin)
    return None


def check_address(address: str, key: str) -> None:
    """Raise PortInUseError when the fixed port of a tcp address cannot be bound, ConfigError when it is malformed."""
    host, port = tcp_address(address, key, bind=True)
    if port:
        check_port("0.0.0.0" if host == "*" else host, port, key)


def check_port(host: str, port: int, key: str) -> None:
    """Raise PortInUseError when `port` cannot be bound at `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"{key}: port {port} at {host} is held by another process; stop it, or set another port "
                    "(0 takes a free one)"
                ) from None
            reason = error.strerror
            if error.errno == errno.EADDRNOTAVAIL:
                reason = f"this machine has no such address ({reason}); `ip address` lists those it has"
            raise ConfigError(f"{key}: cannot listen at {host}, port {port}: {reason}") from None


def free_bytes(path: Path) -> int:
    """Return the free space of the file system that `path` is or will be on."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free
