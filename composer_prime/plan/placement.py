"""Which GPU each local process gets: nodes first, then trainer ranks; a process sees only its own devices."""

from __future__ import annotations

import os
from dataclasses import dataclass

from composer_prime.config import Config
from composer_prime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device indices, counted among the visible GPUs. Empty lists mean the CPU."""

    nodes: tuple[tuple[int, ...], ...]
    """One entry a local node."""
    ranks: tuple[int, ...]
    """One entry a local trainer rank."""

    @property
    def shared(self) -> bool:
        """Whether a node and a rank compute on the same GPU."""
        return bool(set(self.ranks) & {index for node in self.nodes for index in node})


def place_processes(config: Config, gpus: int) -> Placement:
    """Raises ConfigError when the configuration asks for more GPUs than the machine has."""
    nodes, width = config.inference.nodes, _node_width(config)
    ranks = 0 if config.trainer.address or config.run.max_steps == 0 else config.trainer.ranks
    node_cuda, rank_cuda = uses_cuda(config.inference.device, gpus), uses_cuda(config.trainer.device, gpus)
    on_nodes, on_ranks = nodes * width * node_cuda, ranks * rank_cuda
    if (node_cuda and nodes and width > gpus) or on_ranks > gpus:
        raise ConfigError(
            f"the configuration asks for {on_nodes} GPU(s) for inference ({nodes} node(s) of {width}) and {on_ranks} "
            f"for trainer.ranks, and this machine shows {gpus}: lower inference.nodes, "
            "inference.vllm.tensor_parallel or trainer.ranks, or set inference.device / trainer.device to 'cpu'"
        )
    disjoint = on_nodes + on_ranks <= gpus
    start = on_nodes if disjoint else 0
    return Placement(
        nodes=tuple(
            tuple((node * width + part) % gpus for part in range(width)) if node_cuda else () for node in range(nodes)
        ),
        ranks=tuple(start + rank for rank in range(ranks)) if rank_cuda else (),
    )


def uses_cuda(device: str, gpus: int) -> bool:
    """What `auto`, `cpu` or `cuda` means on a machine with this many visible GPUs."""
    return device == "cuda" or (device == "auto" and gpus > 0)


def cuda_visible_devices(indices: tuple[int, ...]) -> str:
    """`indices` as a value of CUDA_VISIBLE_DEVICES, counted within the one that this process was given."""
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(given[index] if given else str(index) for index in indices)


def _node_width(config: Config) -> int:
    return config.inference.vllm.tensor_parallel if config.inference.engine == "vllm" else 1
