"""Low-rank adapters: peft puts them into the model, `merged_parameters` takes them out of the published weights.

A parameter's adapter is found by the parameter's name: peft wraps fused experts once for each tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from composer_prime.config.trainer import LoraConfig
from composer_prime.errors import ConfigError

_ADAPTER = "default"
_WRAPPER = re.compile(r"\.base_layer(?=\.|$)")
_FACTOR = re.compile(r"\.lora_\w+\.")


def inject_adapters(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Replace the target modules of `lm` by adapted ones; only the adapters still require gradients.

    Raises ConfigError when no module matches, or when one cannot be adapted.
    """
    import peft  # it takes seconds to import

    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  any number will do
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        peft.inject_adapter_in_model(peft_config, lm, _ADAPTER, low_cpu_mem_usage=next(lm.parameters()).is_meta)
    except ValueError as error:
        raise ConfigError(
            f"trainer.lora.target_modules {config.target_modules!r} cannot be adapted: {error}; name modules of the "
            "model, or use 'all-linear'"
        ) from None
    names = {_plain(name) for name, _ in lm.named_parameters()}
    lost = sorted(_adapted(lm).keys() - names)
    if lost:
        raise ConfigError(
            f"trainer.lora.target_modules {config.target_modules!r}: the adapters of {', '.join(lost[:3])} "
            f"({len(lost)} in all) belong to no parameter, so no published weights can hold them: name other modules"
        )


def merged_parameters(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of `lm` under their names without adapters: W + (alpha / rank) B A where adapted.

    The update of a linear layer is added in float64, as a node does that gets the factors: both round the same values
    to the published type. A collective where parameters are sharded: every rank must call it.
    """
    layers = _adapted(lm)
    for name, parameter in lm.named_parameters():
        if not _FACTOR.search(name):
            layer = layers.get(_plain(name))
            yield _plain(name), parameter if layer is None else parameter + _delta(layer, parameter)


def factors(lm: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return a float32 copy on the CPU of NAME.lora_A [rank, in] and NAME.lora_B [out, rank] of each adapted parameter.

    None where an adapter is not that of a plain linear layer, such as one of fused experts. A collective where
    parameters are sharded.
    """
    layers = _adapted(lm)
    if not all(map(_is_linear, layers.values())):
        return None
    parts = {}
    for name, layer in layers.items():
        for side in ("A", "B"):
            factor = _whole(layer.get_parameter(f"lora_{side}.{_ADAPTER}.weight"))
            parts[f"{name}.lora_{side}"] = factor.detach().to("cpu", torch.float32, copy=True)
    return parts


def _is_linear(layer: Any) -> bool:
    return isinstance(layer.get_base_layer(), nn.Linear) and not hasattr(layer, "parameter_name")


def _plain(name: str) -> str:
    return _WRAPPER.sub("", name)


def _adapted(lm: PreTrainedModel) -> dict[str, Any]:
    """Return peft's layers by the plain name of the parameter that each adapts."""
    from peft.tuners.lora import LoraLayer  # peft takes seconds to import

    layers = ((name, module) for name, module in lm.named_modules() if isinstance(module, LoraLayer))
    return {f"{_plain(name)}.{getattr(layer, 'parameter_name', 'weight')}": layer for name, layer in layers}


def _delta(layer: Any, parameter: Tensor) -> Tensor:
    """Return (alpha / rank) B A, sharded as `parameter`."""
    if _is_linear(layer):
        a_ri, b_or = (factor[_ADAPTER].weight.double() for factor in (layer.lora_A, layer.lora_B))
        return b_or @ a_ri * layer.scaling[_ADAPTER]
    if parameter.ndim == 2:
        return layer.get_delta_weight(_ADAPTER)
    # Shards cut the one matrix of all experts' factors between experts: gather both.
    a_ri, b_or = (_whole(factor[_ADAPTER].weight) for factor in (layer.lora_A, layer.lora_B))
    experts = parameter.shape[0]
    a_eri, b_ore = a_ri.view(experts, -1, a_ri.shape[1]), b_or.view(b_or.shape[0], -1, experts)
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    delta = torch.einsum("ore,eri->eio" if is_transposed else "ore,eri->eoi", b_ore, a_eri) * layer.scaling[_ADAPTER]
    if not isinstance(parameter, DTensor):
        return delta
    return distribute_tensor(delta, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
