"""The optimizer (AdamW, or Muon for matrices and AdamW for the rest), and its learning rate.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/; arXiv 2502.16982) works on whole matrices. A matrix is
an expert of fused experts [experts, rows, columns], and the rows of a head in a projection to queries, keys or values,
as Composer 2.5 splits them. The output projection mixes heads and stays whole, as in Microsoft's dion.

    shards of whole experts or heads:  momentum -> orthogonalize all at once -> update; no communication
    shards that cut matrices:          as many matrices at a time as there are ranks
        all ranks: momentum on their shards --all-to-all--> rank r orthogonalizes matrix r --all-to-all--> updates

torch.optim.Muon multiplies shards of one matrix across ranks in each of its five iterations, in bfloat16, so two ranks
end elsewhere than one (measured: 10 % of an update). Here one rank orthogonalizes each matrix whole, and any number of
ranks takes the same step. With replicas of the weights, each does this for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from composer_prime.config.trainer import OptimConfig, ScheduleConfig
from composer_prime.errors import ConfigError
from composer_prime.import_path import build_part
from diloco.fragments import local_shard
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


def build_optimizer(policy: Policy, config: OptimConfig, *, offloads: bool = False) -> Optimizer:
    """Return AdamW for all trainable parameters, Muon for the matrices of the blocks and AdamW for the rest, or the
    user's optimizer for all.

    `offloads`: moments lie on the host. Each block has optimizers of its own then, and its moments visit the device
    while those step. Raises ConfigError when nothing is trainable, or an optimizer of the user's cannot be built.
    """
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("no parameter of the model is trainable: check trainer.lora.target_modules")
    if config.type.is_own:
        given = {"params": _decayed(trainable, config), "lr": config.lr}
        parts = [build_part(config.type.name, config.type.settings, {}, "trainer.optim.type", given)]
    else:
        parts = _parts(policy.lm, trainable, config, by_block=offloads)
    for part in parts if offloads else ():
        part.register_step_pre_hook(lambda part, *_: _move_moments(part, to_host=False))
        part.register_step_post_hook(lambda part, *_: _move_moments(part, to_host=True))
        part.register_load_state_dict_post_hook(partial(_move_moments, to_host=True))
    return Optimizer(parts, config.max_grad_norm)


def _parts(
    lm: PreTrainedModel, trainable: list[nn.Parameter], config: OptimConfig, *, by_block: bool
) -> list[torch.optim.Optimizer]:
    """Return AdamW, then perhaps Muon; `by_block`: for each block its own."""
    portions = partial(_by_block, lm) if by_block else lambda parameters: [parameters]
    matrices = _matrices(lm) if config.type.name == "muon" else []
    matrix_ids = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trainable if id(parameter) not in matrix_ids]
    adamw = partial(torch.optim.AdamW, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    muon = partial(ShardedMuon, lr=config.muon_lr, momentum=_MUON_MOMENTUM, weight_decay=config.weight_decay,
                   head_rows=_head_rows(lm))  # fmt: skip
    parts = [adamw(_decayed(portion, config)) for portion in portions(rest)]
    return [*parts, *(muon(portion) for portion in portions(matrices) if portion)]


def _decayed(parameters: list[nn.Parameter], config: OptimConfig) -> list[dict[str, Any]]:
    """Return the groups of AdamW: norms and biases keep their scale."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _by_block(lm: PreTrainedModel, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return what belongs to no block, then each block's own of `parameters`."""
    block_of = {id(parameter): index for index, block in enumerate(blocks(lm)) for parameter in block.parameters()}
    portions: dict[int, list[nn.Parameter]] = {-1: []}
    for parameter in parameters:
        portions.setdefault(block_of.get(id(parameter), -1), []).append(parameter)
    return [portion for portion in portions.values() if portion]


def _move_moments(part: torch.optim.Optimizer, *, to_host: bool) -> None:
    """Move the moments of `part` to pinned host memory or to the device; counts of steps stay on the device."""
    for parameter, state in part.state.items():
        device = torch.device("cpu") if to_host else parameter.device
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value.to(device, non_blocking=True)
    if to_host and part.state:
        torch.get_device_module(parameter.device).synchronize()


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


_PER_HEAD = ("q_proj", "k_proj", "v_proj", "qkv_proj")
"""Projections of an attention module with a `head_dim`: so many rows are a head."""


def _head_rows(lm: PreTrainedModel) -> dict[nn.Parameter, int]:
    """Return the rows of a head, for each weight that is cut into heads."""
    return {
        projection.get_parameter("weight"): rows
        for module in lm.modules()
        if isinstance(rows := getattr(module, "head_dim", None), int)
        and getattr(module, "v_head_dim", rows) == rows  # Else values have heads of their own width.
        for name, projection in module.named_children()
        if name in _PER_HEAD
    }


class ShardedMuon(torch.optim.Optimizer):
    """torch.optim.Muon (nesterov, rate times sqrt(max(1, rows / columns))) for DTensors and tensors.

    A tensor [experts, rows, columns] is a stack of matrices, each taken for itself, and so is one cut into heads.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float,
        head_rows: Mapping[nn.Parameter, int] | None = None,
    ) -> None:  # fmt: skip
        """`head_rows`: the rows of a head, for each parameter that is cut into heads."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._head_rows = head_rows or {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            cut_by: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
            for parameter in sorted(group["params"], key=Tensor.numel):  # Ranks get equal work at a time.
                if parameter.grad is not None:
                    cut_by.setdefault(_cut_by(parameter, self._rows(parameter)), []).append(parameter)
            for ranks, parameters in cut_by.items():
                count = 1 if ranks is None else ranks.size()
                for start in range(0, len(parameters), count):
                    self._step_together(parameters[start : start + count], group, ranks)

    def _step_together(
        self, parameters: list[nn.Parameter], group: dict[str, Any], ranks: dist.ProcessGroup | None
    ) -> None:
        """Update as many parameters as the shards of `ranks` cut; one that none cut."""
        updates = [self._lookahead(parameter, group["momentum"]) for parameter in parameters]
        if ranks is None:
            _orthogonalize(updates[0].view(-1, self._rows(parameters[0]), updates[0].shape[-1]))
        else:
            pieces = [piece for each in zip(parameters, updates, strict=True) for piece in self._pieces(*each)]
            for start in range(0, len(pieces), ranks.size()):
                _orthogonalize_cut(pieces[start : start + ranks.size()], ranks)
        for parameter, update in zip(parameters, updates, strict=True):
            scale = math.sqrt(max(1, self._rows(parameter) / parameter.shape[-1]))
            shard = local_shard(parameter)
            shard.mul_(1.0 - group["lr"] * group["weight_decay"])
            shard.add_(update, alpha=-group["lr"] * scale)

    def _rows(self, parameter: nn.Parameter) -> int:
        """Return the rows of one matrix."""
        return self._head_rows.get(parameter, parameter.shape[-2])

    def _pieces(self, parameter: nn.Parameter, update: Tensor) -> list[tuple[Tensor, int, int]]:
        """Return this rank's rows of each expert, or of the one matrix, as `_orthogonalize_cut` takes them."""
        pieces = update if update.ndim == 3 else update[None]
        return [(piece, self._rows(parameter), parameter.shape[-2]) for piece in pieces]

    def _lookahead(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Return this rank's shard of Nesterov's mixture of the gradient and its running mean, in bfloat16."""
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        mean, grad = local_shard(state["momentum_buffer"]), local_shard(grad)
        mean.lerp_(grad, 1.0 - momentum)
        return grad.lerp(mean, momentum).bfloat16()


def _cut_by(parameter: Tensor, rows: int) -> dist.ProcessGroup | None:
    """Return the ranks whose shards cut matrices of `rows` rows; None where each shard has whole ones."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for index, placement in enumerate(parameter.placements):
            if placement.is_shard(parameter.ndim - 2) and -(-parameter.shape[-2] // mesh.size(index)) % rows:
                return mesh.get_group(index)
    return None


def _orthogonalize_cut(pieces: list[tuple[Tensor, int, int]], ranks: dist.ProcessGroup) -> None:
    """Replace each piece, this rank's rows of a matrix, by those of the orthogonal factor. A collective of `ranks`.

    A piece comes with the rows of one head and those of the whole matrix. There are at most as many as ranks: each
    takes one matrix.
    """
    rank, size = ranks.rank(), ranks.size()
    sent = [piece.numel() for piece, *_ in pieces] + [0] * (size - len(pieces))
    received = [0] * size
    if rank < len(pieces):
        piece, _, rows = pieces[rank]
        ends = [min(rows, -(-rows // size) * index) for index in range(size + 1)]
        received = [(end - start) * piece.shape[1] for start, end in pairwise(ends)]
    flat = torch.cat([piece.flatten() for piece, *_ in pieces])
    matrix = flat.new_empty(sum(received))
    dist.all_to_all_single(matrix, flat, received, sent, ranks)
    if rank < len(pieces):
        piece, head_rows, _ = pieces[rank]
        _orthogonalize(matrix.view(-1, head_rows, piece.shape[1]))
    dist.all_to_all_single(flat, matrix, sent, received, ranks)
    for (piece, *_), result in zip(pieces, flat.split(sent), strict=False):
        piece.copy_(result.view_as(piece))


def _orthogonalize(stack: Tensor) -> None:
    """Replace each matrix of bfloat16 [matrices, rows, columns] by torch.optim.Muon's orthogonal factor of it.

    Five steps of Newton and Schulz, x <- a x + (b G + c G G) x with G = x x^T.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.mT if stack.shape[1] > stack.shape[2] else stack
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    stack.copy_(x.mT if stack.shape[1] > stack.shape[2] else x)
