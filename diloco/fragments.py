"""Fragments: the trainable parameters, each in exactly one part, and the layout that all peers must share.

    strided     transformer block i goes to fragment i mod P (arXiv 2501.18512); what stands outside the
                blocks (embeddings, last norm, head) goes to the fragment that is lightest by then
    balanced    blocks and single tensors go, largest first, to the fragment that is lightest by then

A fragment lives here as one flat float32 vector: its parameters' local shards, end to end, in the order of their names.
Tied weights are one parameter and appear once; frozen parameters (all but the adapters under LoRA) do not appear.

What adapters are trained on: peers that average them must have the same frozen parameters, bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_prime.errors import ConfigError
from composer_prime.model_source import block_of
from diloco.codec.base import as_bytes
from diloco.transport.messages import TensorLayout

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One part of the model on this rank."""

    index: int
    parameters: tuple[Named, ...]
    """Sorted by name."""

    @property
    def numel(self) -> int:
        """Elements of this rank's shards."""
        return sum(local_shard(parameter).numel() for _, parameter in self.parameters)

    @torch.no_grad()
    def read(self) -> Tensor:
        """The local values, float32 [numel], a copy on the CPU."""
        parts = [
            local_shard(parameter).detach().reshape(-1).to("cpu", torch.float32) for _, parameter in self.parameters
        ]
        return torch.cat(parts)

    def held(self, values_n: Tensor) -> Tensor:
        """What `read` returns after `write(values_n)`, float32 [numel]; `values_n` itself where nothing is rounded."""
        if all(parameter.dtype == torch.float32 for _, parameter in self.parameters):
            return values_n
        sizes = [local_shard(parameter).numel() for _, parameter in self.parameters]
        parts = zip(values_n.split(sizes), self.parameters, strict=True)
        return torch.cat([part_n.to(parameter.dtype).to(torch.float32) for part_n, (_, parameter) in parts])

    @torch.no_grad()
    def write(self, values_n: Tensor) -> None:
        """Set the local values from float32 [numel]."""
        at = 0
        for _, parameter in self.parameters:
            own = local_shard(parameter)
            own.copy_(values_n[at : at + own.numel()].view(own.shape))
            at += own.numel()


def local_shard(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank holds; it shares memory with the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def trainable(modules: Iterable[Named]) -> list[Named]:
    """Trainable parameters by name, a tied one under its first name.

    Raises ConfigError when there is none.
    """
    seen: dict[int, str] = {}
    found = [
        (name, parameter)
        for name, parameter in modules
        if parameter.requires_grad and seen.setdefault(id(parameter), name) == name
    ]
    if not found:
        raise ConfigError("diloco: no parameter is trainable, so there is nothing to synchronise")
    return found


def partition(parameters: Iterable[Named], count: int, kind: str) -> list[Fragment]:
    """`count` fragments that together hold every trainable parameter exactly once.

    Raises ConfigError when the model has fewer parts than `count`, or a name occurs twice.
    """
    named = trainable(parameters)
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("diloco: two different parameters have the same name; give whole models, not lists of parts")
    units = _units(named)
    if len(units) < count:
        raise ConfigError(
            f"diloco.fragments is {count}, but the model has only {len(units)} blocks and single tensors: "
            f"use fragments <= {len(units)}"
        )
    taken: list[list[Named]] = [[] for _ in range(count)]
    weights = [0] * count
    for number, members in _in_order(units, kind):
        target = number % count if number is not None else min(range(count), key=lambda index: (weights[index], index))
        taken[target] += members
        weights[target] += _bytes(members)
    if not all(taken):
        empty = [index for index, members in enumerate(taken) if not members]
        raise ConfigError(
            f"diloco.fragments is {count}, but diloco.partition = '{kind}' leaves fragments {empty} empty: lower "
            "fragments or use partition = 'balanced'"
        )
    return [
        Fragment(index=index, parameters=tuple(sorted(members, key=lambda each: each[0])))
        for index, members in enumerate(taken)
    ]


def _units(named: Sequence[Named]) -> list[tuple[int | None, list[Named]]]:
    """(block number, its parameters) for each block, (None, [parameter]) for each that stands outside."""
    blocks: dict[str, tuple[int, list[Named]]] = {}
    single: list[tuple[int | None, list[Named]]] = []
    for name, parameter in named:
        block = block_of(name)
        if block is None:
            single.append((None, [(name, parameter)]))
        else:
            blocks.setdefault(block[0], (block[1], []))[1].append((name, parameter))
    return [*blocks.values(), *single]


def _in_order(units: list[tuple[int | None, list[Named]]], kind: str) -> Iterable[tuple[int | None, list[Named]]]:
    by_size = sorted(units, key=lambda unit: (-_bytes(unit[1]), unit[1][0][0]))
    if kind == "balanced":
        return ((None, members) for _, members in by_size)
    blocks = (unit for unit in units if unit[0] is not None)
    return itertools.chain(blocks, (unit for unit in by_size if unit[0] is None))


def _bytes(members: Sequence[Named]) -> int:
    """Of whole parameters, so that all ranks cut alike."""
    return sum(parameter.numel() * parameter.element_size() for _, parameter in members)


def parameter_layout(fragments: Sequence[Fragment]) -> list[TensorLayout]:
    """What this rank and its counterpart in every other cluster must have in common."""
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


def frozen_digest(parameters: Iterable[Named]) -> str:
    """Of this rank's shards of the parameters that are not trained, in order of their names: blake2b-128, hexadecimal.

    Equal for equal values, types and sharding. Takes about a second a gigabyte, and memory for one parameter.
    """
    digest = hashlib.blake2b(digest_size=16)
    frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
    for name in sorted(frozen):
        own = local_shard(frozen[name]).detach().cpu()
        digest.update(json.dumps([name, str(own.dtype), list(own.shape)]).encode())
        digest.update(memoryview(as_bytes(own).numpy()))
    return digest.hexdigest()
