"""Sharded masters to whole tensors under Hugging Face names, one at a time, on rank 0's CPU.

    for each parameter, all ranks: cast the shard (half the traffic for bfloat16) -> gather -> rank 0 copies to the CPU

At no moment does a device hold more than one whole tensor besides its shards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.policy import Policy
from trainer.world import World


def publication_dtype(inference_dtype: str, compute_dtype: torch.dtype) -> torch.dtype:
    """What published weights are cast to: what the nodes were told to use, else the trainer's compute type."""
    return compute_dtype if inference_dtype == "auto" else getattr(torch, inference_dtype)


@torch.no_grad()
def whole_tensors(policy: Policy, world: World, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Rank 0: every parameter of the plain model (adapters merged, tied ones once) on the CPU in `dtype`; else None.

    A collective: all ranks call it. On one CPU rank the tensors may be the masters themselves: read, never write.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):  # a forward pass without a backward leaves whole parameters behind
            module.reshard()
    kept = {}
    for name, tensor in _plain_parameters(policy):
        cast = tensor.to(dtype)
        gathered = cast.full_tensor() if isinstance(cast, DTensor) else cast
        if world.first:
            kept[name] = gathered.detach().to("cpu").contiguous()
    return kept if world.first else None


def _plain_parameters(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    if not policy.adapted:
        return policy.lm.named_parameters()
    from trainer.lora import merged_parameters  # peft takes seconds to import

    return merged_parameters(policy.lm)
