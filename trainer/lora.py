"""Low-rank adapters through peft: injected in place, merged for publication, never part of a published name."""

from __future__ import annotations

import re

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from composer_prime.config.trainer import LoraConfig
from composer_prime.errors import ConfigError

ADAPTER = "default"


def inject(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Replace the target modules of `lm` by adapted ones; only the adapters keep requiring gradients.

    Raises ConfigError when no module matches.
    """
    meta = next(lm.parameters()).is_meta
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(peft_config, lm, ADAPTER, low_cpu_mem_usage=meta)
    except ValueError as error:
        raise ConfigError(
            f"trainer.lora.target_modules {config.target_modules!r} cannot be adapted: {error}; name modules of the "
            "model, or use 'all-linear'"
        ) from None


def adapted(lm: nn.Module) -> dict[str, LoraLayer]:
    """Adapted modules by the name of the weight they replace."""
    return {f"{name}.weight": module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}


def plain_name(name: str) -> str | None:
    """The Hugging Face name of a parameter of an adapted model; None for the adapters' own."""
    return None if re.search(r"\.lora_\w+\.", name) else name.replace(".base_layer.", ".")


@torch.no_grad()
def merged(layer: LoraLayer) -> torch.Tensor:
    """base + (alpha / rank) B A, in the masters' dtype (a DTensor when the layer is sharded)."""
    return layer.get_base_layer().weight + layer.get_delta_weight(ADAPTER)
