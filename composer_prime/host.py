"""This machine: memory, cores, GPUs, ports, installed modules, and which GPUs each process gets. Loads no torch."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_prime.errors import ConfigError

if TYPE_CHECKING:
    from composer_prime.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a plan is measured against."""

    cores: int
    memory_bytes: int
    """Physical memory, or a lower limit of the control group."""
    gpus: tuple[int, ...]
    """Memory of each visible GPU, bytes."""


_CGROUP = Path("/sys/fs/cgroup")


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cores=cores, memory_bytes=memory()[0], gpus=visible_gpus())


def memory() -> tuple[int, int]:
    """Return (bytes of memory, free ones) of this machine, or of a smaller control group."""
    import psutil

    total, free = psutil.virtual_memory()[:2]
    for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):  # of version 2 and 1
        group = _CGROUP if limit == "max" else _CGROUP / "memory"
        with suppress(OSError, ValueError, IndexError):
            total = min(total, most := int((group / f"memory.{limit}").read_text()))
            cached = re.findall(r"inactive_file (\d+)", (group / "memory.stat").read_text())[-1]
            free = min(free, most - int((group / f"memory.{used}").read_text()) + int(cached))
    return total, free


def _cuda_driver() -> Any:
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            return driver
    return None


def visible_gpus() -> tuple[int, ...]:
    """Return the memory of each visible CUDA device."""
    driver = _cuda_driver()
    count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    sizes = []
    for index in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        sizes.append(size.value)
    return tuple(sizes)


def gpu_name() -> str:
    """Return the first visible CUDA device's name, or `GPU`."""
    driver = _cuda_driver()
    name, device = ctypes.create_string_buffer(100), ctypes.c_int()
    if driver is not None and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDeviceGetName(name, 100, device)
    return name.value.decode(errors="replace") or "GPU"


def driver_cuda() -> str:
    """Return the newest CUDA that the driver knows, such as `12.8`, or ""."""
    driver, version = _cuda_driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def module_file(name: str) -> Path | None:
    """Return the file of an installed module without running any of its packages.

    A folder without __init__.py does not count: wandb/, which a tracker writes, would look like its package.
    """
    top, *parts = name.split(".")
    spec = importlib.util.find_spec(top)
    for part in parts:
        folders = spec.submodule_search_locations if spec is not None else None
        spec = importlib.machinery.PathFinder.find_spec(part, list(folders)) if folders else None
    return Path(spec.origin) if spec is not None and spec.origin else None


def free_bytes(path: Path) -> int:
    """Return the free space where `path` is or will be."""
    return shutil.disk_usage(existing_folder(path)).free


def own_folder(variable: str, *below_home: str) -> Path:
    """Return the folder of an environment variable, else one below the home. Raises ConfigError."""
    try:
        return Path(os.environ.get(variable) or Path.home().joinpath(*below_home))
    except RuntimeError:
        raise ConfigError(f"user {os.geteuid()} has no home folder: set HOME or {variable} to a folder") from None


def existing_folder(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def why_not_writable(path: Path) -> str | None:
    """Return why no folder can be made at `path`, if so, by writing a nameless file."""
    existing = existing_folder(path)
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return f"cannot write to {existing}: {error.strerror}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Indices of visible GPUs. Empty tuples mean the CPU."""

    nodes: tuple[tuple[int, ...], ...]
    """One entry a local node."""
    ranks: tuple[int, ...]
    """One entry a local trainer rank."""

    @property
    def shared(self) -> bool:
        """Whether a node and a rank compute on one GPU."""
        return bool(set(self.ranks) & {index for node in self.nodes for index in node})


def place_processes(config: Config, gpus: int) -> Placement:
    """Give each process its devices. Raises ConfigError for too few GPUs."""
    inference, trainer = config.inference, config.trainer
    nodes = inference.nodes
    gpus_per_node = inference.vllm.tensor_parallel if inference.engine.name == "vllm" else 1
    ranks = 0 if trainer.address or config.run.max_steps == 0 else trainer.ranks
    node_cuda, rank_cuda = uses_cuda(inference.device, gpus), uses_cuda(trainer.device, gpus)
    for_nodes, for_ranks = nodes * gpus_per_node * node_cuda, ranks * rank_cuda
    if (node_cuda and nodes and gpus_per_node > gpus) or for_ranks > gpus:
        raise ConfigError(
            f"the configuration asks for {for_nodes} GPU(s) for inference ({nodes} node(s) of {gpus_per_node}) "
            f"and {for_ranks} for trainer.ranks, but this machine has {gpus}: lower inference.nodes, "
            "inference.vllm.tensor_parallel or trainer.ranks, or set inference.device / trainer.device to 'cpu'"
        )
    first_rank = for_nodes if for_nodes + for_ranks <= gpus else 0
    return Placement(
        nodes=tuple(
            tuple((node * gpus_per_node + part) % gpus for part in range(gpus_per_node)) if node_cuda else ()
            for node in range(nodes)
        ),
        ranks=tuple(first_rank + rank for rank in range(ranks)) if rank_cuda else (),
    )


def uses_cuda(device: str, gpus: int) -> bool:
    """Return whether a device setting means CUDA with so many visible GPUs."""
    return device == "cuda" or (device == "auto" and gpus > 0)


def cuda_visible_devices(indices: tuple[int, ...]) -> str:
    """Return CUDA_VISIBLE_DEVICES for `indices` within this process's own value."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(visible[index] if visible else str(index) for index in indices)
