"""Optimizer (`build_optimizer`) and learning rate schedule (`rate`).

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/; arXiv 2502.16982) works on whole matrices, and the
ranks share the work:

    rank r: momentum on its shard --gather--> owner rank orthogonalizes --scatter--> every rank updates its shard

torch.optim.Muon accepts DTensors. But it multiplies the shards of one matrix across ranks inside each of its five
iterations, in bfloat16, so two ranks end elsewhere than one (measured: 10 % of an update). Here one rank orthogonalizes
each matrix whole, and any number of ranks takes the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from composer_prime.config.trainer import OptimConfig, ScheduleConfig
from composer_prime.errors import ConfigError
from trainer.model.build import blocks
from trainer.model.policy import Policy


def build_optimizer(policy: Policy, config: OptimConfig) -> Optimizer:
    """Return AdamW for all trainable parameters, or Muon for the matrices of the blocks and AdamW for the rest.

    Raises ConfigError when nothing is trainable.
    """
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("no parameter of the model is trainable: check trainer.lora.target_modules")
    matrices = []
    if config.type == "muon":
        matrices = [p for block in blocks(policy.lm) for p in block.parameters() if p.ndim == 2 and p.requires_grad]
    matrix_ids = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trainable if id(parameter) not in matrix_ids]
    parts: list[torch.optim.Optimizer] = [_adamw(rest, config)]
    if matrices:
        parts.append(ShardedMuon(matrices, config.muon_lr, config.momentum, config.weight_decay))
    return Optimizer(parts, config.max_grad_norm)


def _adamw(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices only: norms and biases keep their scale."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def rate(step: int, schedule: ScheduleConfig, max_steps: int) -> float:
    """Return the learning rate of step `step` (from 1), relative to the peak.

    Linear warm-up that reaches 1 at step warmup_steps, then constant, or a cosine down to final_ratio at max_steps.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.type == "constant":
        return 1.0
    done = min(1.0, (step - schedule.warmup_steps) / max(1, max_steps - schedule.warmup_steps))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


class Optimizer:
    """One or two torch optimizers that step together. It keeps the peak rates, so each step can set its own."""

    def __init__(self, parts: list[torch.optim.Optimizer], max_grad_norm: float | None) -> None:
        self.parts = parts
        self._peaks = [[group["lr"] for group in part.param_groups] for part in parts]
        self._max_grad_norm = max_grad_norm

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for part in self.parts for group in part.param_groups for parameter in group["params"])

    def grad_norm(self) -> Tensor:
        """Return the global L2 norm of the gradients over all ranks; a scalar on the device."""
        norm = get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, ratio: float, norm: Tensor) -> float:
        """Clip by `norm`, set each rate to `ratio` of its peak, update, drop the gradients. Returns AdamW's rate."""
        if self._max_grad_norm is not None:
            clip_grads_with_norm_(list(self.parameters()), self._max_grad_norm, norm)
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * ratio
            part.step()
        self.zero_grad()
        return self.parts[0].param_groups[0]["lr"]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)


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
        """Return Nesterov's mixture of the gradient and its running mean, sharded like the parameter."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        state["momentum_buffer"].lerp_(parameter.grad, 1.0 - momentum)
        return parameter.grad.lerp(state["momentum_buffer"], momentum)


def _orthogonal(update: Tensor, owner: int) -> Tensor:
    """Return the scaled orthogonal factor of `update`, with its sharding; one rank computes it, by turns."""
    if not isinstance(update, DTensor):
        return _whole(update)
    mesh = update.device_mesh
    source = owner % mesh.size()
    gathered = update.full_tensor()
    result = _whole(gathered) if dist.get_rank(mesh.get_group()) == source else torch.empty_like(gathered)
    return distribute_tensor(result, mesh, update.placements, src_data_rank=source)


def _whole(matrix: Tensor) -> Tensor:
    """Return what torch's Muon subtracts for a gradient `matrix` at rate 1 without momentum: one step from zero."""
    scratch = nn.Parameter(torch.zeros_like(matrix))
    scratch.grad = matrix
    torch.optim.Muon([scratch], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    return -scratch.detach()
