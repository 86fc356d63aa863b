"""Fragments: the trainable parameters, each in exactly one part.

Transformer block i goes to fragment i mod P (arXiv 2501.18512), other parameters to the lightest by then.

A fragment is one flat float32 vector: the local shards of its parameters, in the order of their names.
Tied weights appear once, frozen parameters do not.

The ranks of one cluster cut alike; `Ranks` is what they decide together.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_prime.errors import ConfigError
from composer_prime.model_source import block_of
from diloco.codec import as_bytes
from diloco.transport.messages import TensorLayout

NamedParameter = tuple[str, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    index: int
    parameters: tuple[NamedParameter, ...]
    """Sorted by name."""

    @property
    def numel(self) -> int:
        """Elements of this rank's shards."""
        return sum(local_shard(parameter).numel() for _, parameter in self.parameters)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a copy of the local values, float32 [numel], on the CPU."""
        shards = (local_shard(parameter) for _, parameter in self.parameters)
        return torch.cat([shard.detach().reshape(-1).to("cpu", torch.float32) for shard in shards])

    @torch.no_grad()
    def write(self, values_n: Tensor) -> None:
        at = 0
        for _, parameter in self.parameters:
            shard = local_shard(parameter)
            shard.copy_(values_n[at : at + shard.numel()].view(shard.shape))
            at += shard.numel()

    def rounded(self, values_n: Tensor) -> Tensor:
        """Return what `read` returns after `write(values_n)`."""
        if all(parameter.dtype == torch.float32 for _, parameter in self.parameters):
            return values_n
        sizes = [local_shard(parameter).numel() for _, parameter in self.parameters]
        parts = zip(values_n.split(sizes), self.parameters, strict=True)
        return torch.cat([part_n.to(parameter.dtype).to(torch.float32) for part_n, (_, parameter) in parts])


def local_shard(parameter: Tensor) -> Tensor:
    """Return the part that this rank holds; it shares memory with the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def partition(parameters: Iterable[NamedParameter], count: int) -> list[Fragment]:
    """Return `count` fragments of all trainable parameters.

    Raises ConfigError when none is trainable, two have one name, or a fragment would be empty.
    """
    named = _trainable(parameters)
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("diloco: two different parameters have the same name; give whole models, not lists of parts")
    blocks = {name: block_of(name) for name, _ in named}
    assigned: list[list[NamedParameter]] = [[] for _ in range(count)]
    weights = [0] * count

    def order(each: NamedParameter) -> tuple[bool, int, str]:
        return blocks[each[0]] is None, -_bytes(each[1]), each[0]

    for name, parameter in sorted(named, key=order):
        block = blocks[name]
        target = block[1] % count if block is not None else weights.index(min(weights))
        assigned[target].append((name, parameter))
        weights[target] += _bytes(parameter)
    if not all(assigned):
        parts = len({block or name for name, block in blocks.items()})
        raise ConfigError(
            f"diloco.fragments is {count}, which leaves some empty, for the model has {parts} blocks and single "
            "tensors: lower diloco.fragments"
        )
    return [
        Fragment(index=index, parameters=tuple(sorted(members, key=lambda each: each[0])))
        for index, members in enumerate(assigned)
    ]


def _trainable(parameters: Iterable[NamedParameter]) -> list[NamedParameter]:
    """Return what is trained, a tied parameter under its first name. Raises ConfigError."""
    first_names: dict[int, str] = {}
    trainable = [
        (name, parameter)
        for name, parameter in parameters
        if parameter.requires_grad and first_names.setdefault(id(parameter), name) == name
    ]
    if not trainable:
        raise ConfigError("diloco: no parameter is trainable, so there is nothing to synchronize")
    return trainable


def _bytes(parameter: Tensor) -> int:
    """Return the whole parameter's size: all ranks cut alike."""
    return parameter.numel() * parameter.element_size()


def parameter_layout(fragments: Sequence[Fragment]) -> list[TensorLayout]:
    return [
        TensorLayout(
            name=name,
            shape=list(parameter.shape),
            local_shape=list(local_shard(parameter).shape),
            fragment=fragment.index,
        )
        for fragment in fragments
        for name, parameter in fragment.parameters
    ]


def frozen_digest(parameters: Iterable[NamedParameter]) -> str:
    """Return the hexadecimal blake2b-128 of this rank's frozen shards: peers must agree on them, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
    for name in sorted(frozen):
        shard = local_shard(frozen[name]).detach().cpu()
        digest.update(json.dumps([name, str(shard.dtype), list(shard.shape)]).encode())
        digest.update(as_bytes(shard).numpy().data)
    return digest.hexdigest()


# -- ranks -------------------------------------------------------------------------------------------------------

POLL_S = 0.2


class Ranks:
    """The trainer ranks of this cluster. Every method is a collective."""

    def __init__(self) -> None:
        """The default group must carry CPU tensors (gloo). Without one this rank is alone."""
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.size = dist.get_world_size() if distributed else 1

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest over the ranks, element by element."""
        reduced = torch.tensor(values, dtype=torch.int64)
        if self.size > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN)
        return reduced.tolist()

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum over the ranks, element by element, rounded once."""
        own = torch.tensor(values, dtype=torch.float64)
        parts = [own] if self.size == 1 else [torch.empty_like(own) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(parts, own)
        return [math.fsum(each) for each in zip(*(part.tolist() for part in parts), strict=True)]

    def all(self, flag: bool) -> bool:
        return bool(self.smallest([flag])[0])

    def any(self, flag: bool) -> bool:
        return not self.smallest([not flag])[0]

    def equal(self, values: Sequence[int]) -> bool:
        """Return whether all ranks gave the same values."""
        both = self.smallest([*values, *(-value for value in values)])  # and the largest, negative
        smallest, largest = both[: len(values)], both[len(values) :]
        return all(low == -high for low, high in zip(smallest, largest, strict=True))
