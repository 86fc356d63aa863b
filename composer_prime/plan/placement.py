"""Which GPUs each local process gets: nodes first, then trainer ranks. A process sees only its own devices."""

from __future__ import annotations

import os
from dataclasses import dataclass

from composer_prime.config import Config
from composer_prime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device indices, counted among the visible GPUs. Empty tuples mean the CPU."""

    nodes: tuple[tuple[int, ...], ...]
    """One entry a local node."""
    ranks: tuple[int, ...]
    """One entry a local trainer rank."""

    @property
    def shared(self) -> bool:
        """Whether a node and a rank compute on the same GPU."""
        return bool(set(self.ranks) & {index for node in self.nodes for index in node})


def place_processes(config: Config, gpus: int) -> Placement:
    """Give each process its devices. Raises ConfigError when the configuration needs more than `gpus` GPUs."""
    inference, trainer = config.inference, config.trainer
    nodes = inference.nodes
    gpus_per_node = inference.vllm.tensor_parallel if inference.engine == "vllm" else 1
    ranks = 0 if trainer.address or config.run.max_steps == 0 else trainer.ranks
    node_cuda, rank_cuda = uses_cuda(inference.device, gpus), uses_cuda(trainer.device, gpus)
    for_nodes, for_ranks = nodes * gpus_per_node * node_cuda, ranks * rank_cuda
    if (node_cuda and nodes and gpus_per_node > gpus) or for_ranks > gpus:
        raise ConfigError(
            f"the configuration asks for {for_nodes} GPU(s) for inference ({nodes} node(s) of {gpus_per_node}) and "
            f"{for_ranks} for trainer.ranks, and this machine shows {gpus}: lower inference.nodes, "
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
    """Return whether `auto`, `cpu` or `cuda` means CUDA on a machine with this many visible GPUs."""
    return device == "cuda" or (device == "auto" and gpus > 0)


def cuda_visible_devices(indices: tuple[int, ...]) -> str:
    """Return a value of CUDA_VISIBLE_DEVICES for `indices`, which count within this process's own value."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(visible[index] if visible else str(index) for index in indices)
