"""Muon for sharded matrices: torch's orthogonalisation on whole matrices, the work shared out over the ranks.

    rank r: momentum on its shard --gather--> owner rank orthogonalises --scatter--> every rank updates its shard

torch.optim.Muon accepts DTensors, but multiplies the shards of one matrix across ranks inside each of its five
iterations, in bfloat16, so that two ranks end elsewhere than one (measured: 10 % of an update). Here each matrix is
orthogonalised whole, by one rank, and any number of ranks takes the same step.

Muon: Keller Jordan, https://kellerjordan.github.io/posts/muon/; arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class ShardedMuon(torch.optim.Optimizer):
    """torch.optim.Muon (nesterov, learning rate scaled by sqrt(max(1, rows / columns))) for DTensors and tensors."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = _orthogonal(self._lookahead(parameter, group["momentum"]), owner=index)
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                index += 1

    def _lookahead(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's mixture of the gradient and its running mean, sharded like the parameter."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        state["momentum_buffer"].lerp_(parameter.grad, 1.0 - momentum)
        return parameter.grad.lerp(state["momentum_buffer"], momentum)


def _orthogonal(update: Tensor, owner: int) -> Tensor:
    """The scaled orthogonal factor of `update`, with its sharding; computed on one rank of the mesh, by turns."""
    if not isinstance(update, DTensor):
        return _whole(update)
    mesh = update.device_mesh
    source = owner % mesh.size()
    gathered = update.full_tensor()
    result = _whole(gathered) if dist.get_rank(mesh.get_group()) == source else torch.empty_like(gathered)
    return distribute_tensor(result, mesh, update.placements, src_data_rank=source)


def _whole(matrix: Tensor) -> Tensor:
    """What torch's Muon subtracts for a gradient `matrix` at learning rate 1 without momentum: one step from zero."""
    scratch = nn.Parameter(torch.zeros_like(matrix))
    scratch.grad = matrix
    torch.optim.Muon([scratch], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    return -scratch.detach()
