"""The optimizer (AdamW, or Muon for matrices and AdamW for the rest), and its learning rate.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/; arXiv 2502.16982) works on whole matrices; a tensor of
fused experts [experts, rows, columns] is a matrix an expert. The ranks share the work, as many matrices at a time:

    all ranks: momentum on their shards --gather--> rank r orthogonalizes matrix r --scatter--> updates of the shards

torch.optim.Muon multiplies shards of one matrix across ranks in each of its five iterations, in bfloat16, so two ranks
end elsewhere than one (measured: 10 % of an update). Here one rank orthogonalizes each matrix whole, and any number of
ranks takes the same step. With replicas of the weights, each does this for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from composer_prime.config.trainer import OptimConfig, ScheduleConfig
from composer_prime.errors import ConfigError
from composer_prime.import_path import build_part
from trainer.model.build import blocks
from trainer.model.policy_model import Policy

_MUON_MOMENTUM = 0.95


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
        self.skipped = 0
        """How many of the latest steps in a row were skipped."""

    def scale_rates(self, ratio: float) -> None:
        """Set each learning rate to `ratio` of its peak."""
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * ratio

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.groups() for parameter in group["params"])

    def groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def settings(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each group but its rate, which each step sets."""
        left_out = ("params", "param_names", "lr")
        return [{name: value for name, value in group.items() if name not in left_out} for group in self.groups()]

    def grad_norm(self) -> Tensor:
        """Return the global L2 norm of the gradients over all ranks; a scalar on the device. A collective."""
        grads = [[each.grad for each in own if each.grad is not None] for own in self._by_mesh()]
        norms = [get_total_norm(of_mesh) for of_mesh in grads]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))

    def _by_mesh(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each mesh: torch neither adds up nor clips norms over several."""
        meshes: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.parameters():
            meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        return [*meshes.values()]

    def step(self, norm: Tensor) -> float:
        """Clip by `norm`, update, drop the gradients. Return AdamW's rate."""
        if self._max_grad_norm is not None:
            for parameters in self._by_mesh():
                clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        for part in self.parts:
            part.step()
        self.skipped = 0
        self.zero_grad()
        return self.parts[0].param_groups[0]["lr"]

    def skip(self) -> None:
        """Run the hooks of a step without changing anything: other clusters count the steps of this one."""
        self.skipped += 1
        self.zero_grad()
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)


def build_optimizer(policy: Policy, config: OptimConfig) -> Optimizer:
    """Return AdamW for all trainable parameters, Muon for the matrices of the blocks and AdamW for the rest, or the
    user's optimizer for all.

    Raises ConfigError when nothing is trainable, or an optimizer of the user's cannot be built.
    """
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("no parameter of the model is trainable: check trainer.lora.target_modules")
    matrices = []
    if config.type.name == "muon":
        matrices = _matrices(policy.lm)
    matrix_ids = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trainable if id(parameter) not in matrix_ids]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},  # norms and biases keep their scale
    ]
    filled = [group for group in groups if group["params"]]
    if config.type.is_own:
        given = {"params": filled, "lr": config.lr}
        own = build_part(config.type.name, config.type.settings, {}, "trainer.optim.type", given)
        return Optimizer([own], config.max_grad_norm)
    adamw = torch.optim.AdamW(filled, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    parts: list[torch.optim.Optimizer] = [adamw]
    if matrices:
        parts.append(ShardedMuon(matrices, config.muon_lr, _MUON_MOMENTUM, config.weight_decay))
    return Optimizer(parts, config.max_grad_norm)


def _matrices(lm: PreTrainedModel) -> list[nn.Parameter]:
    """Return the blocks' matrices and stacks of them; kernels of convolutions are none."""
    return [
        parameter
        for block in blocks(lm)
        for module in block.modules()
        if not isinstance(module, nn.Conv1d)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim in (2, 3) and parameter.requires_grad
    ]


class ShardedMuon(torch.optim.Optimizer):
    """torch.optim.Muon (nesterov, rate times sqrt(max(1, rows / columns))) for DTensors and tensors.

    A tensor [experts, rows, columns] is a stack of matrices, each taken for itself.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            first = _within_replica(parameters[0]) if parameters else None
            ranks = first.device_mesh.size() if isinstance(first, DTensor) else 1
            for start in range(0, len(parameters), ranks):
                self._step_together(parameters[start : start + ranks], group)

    def _step_together(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update at most as many matrices as there are ranks of a replica: each orthogonalizes one."""
        updates = [_within_replica(self._lookahead(parameter, group["momentum"])) for parameter in parameters]
        for parameter, direction in zip(map(_within_replica, parameters), _orthogonal(updates), strict=True):
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(direction, alpha=-group["lr"])

    def _lookahead(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Return Nesterov's mixture of the gradient and its running mean, sharded alike."""
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        state["momentum_buffer"].lerp_(grad, 1.0 - momentum)
        return grad.lerp(state["momentum_buffer"], momentum)


def _within_replica(tensor: Tensor) -> Tensor:
    """Return `tensor` as its replica's ranks alone hold it; it shares memory with it."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return tensor
    shards, (*_, placement) = tensor.device_mesh["shard"], tensor.placements
    return DTensor.from_local(tensor.to_local(), shards, [placement], shape=tensor.shape, stride=tensor.stride())


def _orthogonal(updates: list[Any]) -> list[Tensor]:
    """Return the scaled orthogonal factor of each update; rank i computes that of update i."""
    first = updates[0]
    if not isinstance(first, DTensor):
        return [_whole(update) for update in updates]
    mesh, rank, own = first.device_mesh, first.device_mesh.get_local_rank(), first.to_local()
    for index, update in enumerate(updates):
        gathered = update.full_tensor()
        own = gathered if index == rank else own
    if rank < len(updates):
        own = _whole(own)
    results = []
    for index, update in enumerate(updates):  # Another rank's matrix is whole here for this long only.
        whole = own if index == rank else own.new_empty(update.shape)
        results.append(distribute_tensor(whole, mesh, update.placements, src_data_rank=index))
    return results


def _whole(matrix: Tensor) -> Tensor:
    """Return what torch's Muon subtracts for a gradient `matrix` at rate 1 without momentum: one step from zero.

    A tensor with three dimensions is a stack of matrices, each taken for itself.
    """
    if matrix.ndim == 3:
        return torch.stack([_whole(each) for each in matrix])
    scratch = nn.Parameter(torch.zeros_like(matrix))
    scratch.grad = matrix
    torch.optim.Muon([scratch], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    return -scratch.detach()
