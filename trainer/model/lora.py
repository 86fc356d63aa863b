"""Low-rank adapters through peft: injected in place, merged for publication, absent from published names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from composer_prime.config.trainer import LoraConfig
from composer_prime.errors import ConfigError

ADAPTER = "default"


def inject(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Replace the target modules of `lm` by adapted ones; only the adapters still require gradients.

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


@torch.no_grad()
def merged_parameters(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain model's parameters under their Hugging Face names: W + (alpha / rank) B A where adapted.

    They have the masters' type, and are DTensors when the model is sharded.
    """
    layers = {f"{name}.weight": module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in lm.named_parameters():
        if re.search(r"\.lora_\w+\.", name):
            continue
        plain = name.replace(".base_layer.", ".")
        yield plain, parameter + layers[plain].get_delta_weight(ADAPTER) if plain in layers else parameter
