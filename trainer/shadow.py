"""Other weights for the same policy: a second set of values that takes the parameters' place for a while.

    Shadow          a moving average of the trained parameters, or their start; sharded like them, float32
    AdaptersOff     with low-rank adapters the start weights are the base: the adapters count for nothing

No second model is built: values are exchanged with the shards, a forward pass gathers them as it would the policy's,
and the exchange is undone to the last bit. Nothing of a backward pass may be under way meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Weights(Protocol):
    """Something that can take the place of the policy's weights."""

    @contextmanager
    def in_place(self) -> Iterator[None]: ...


class Shadow:
    """A second value for each trained parameter of `module`, at first the parameter's own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = {name: parameter.detach().clone() for name, parameter in _trained(module)}

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move by `rate` of the way towards the parameters: the moving average of one step."""
        for name, parameter in _trained(self._module):
            _local(self._values[name]).lerp_(_local(parameter), rate)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module computes with these values inside the block, and with its own again after it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self._module.modules():
            if isinstance(module, FSDPModule):  # whole parameters that a forward pass left behind would still be used
                module.reshard()
        for name, parameter in _trained(self._module):
            own, other = _local(parameter), _local(self._values[name])
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)

    def state(self) -> dict[str, Tensor]:
        """The values by parameter name, to be saved and loaded in place."""
        return self._values

    def reset(self) -> None:
        """Take the parameters' values."""
        self.follow(1.0)


class AdaptersOff:
    """The base model below the adapters of `module`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Adapters are scaled to 0 inside the block; switching them off through peft would change what is trained."""
        from peft.tuners.lora import LoraLayer  # peft takes seconds to import

        layers = [module for module in self._module.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.scale_layer(0.0)
        try:
            yield
        finally:
            for layer in layers:
                layer.unscale_layer()


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
