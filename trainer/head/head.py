"""The output layer: what it is made of, what it is compared with, what comes out. The computation is in fused.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from composer_prime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """logits(h) = cap * tanh(scale * (h W^T + b) / cap); without a cap, scale * (h W^T + b)."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight_VH.shape[0]

    def detached(self, *, copy: bool = False) -> Head:
        """Without gradient; `copy` takes new memory, for weights that are about to be freed or overwritten."""
        weight, bias = self.weight_VH.detach(), None if self.bias_V is None else self.bias_V.detach()
        if copy:
            weight, bias = weight.clone(), None if bias is None else bias.clone()
        return dataclasses.replace(self, weight_VH=weight, bias_V=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPart:
    """One summand of the teacher's logits: share * head(hidden)."""

    share: float
    hidden_DH: Tensor
    """[D, H], detached: the states that predict the distilled tokens in the hinted context."""
    head: Head


Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(student logits [C, V], teacher logits [C, V], targets [C]) -> [C], differentiable in the student's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """What the last D rows of the head are compared with. The parts' shares add up to 1."""

    teacher: tuple[TeacherPart, ...]
    divergence: Divergence

    @property
    def rows(self) -> int:
        return self.teacher[0].hidden_DH.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """Of the head's R rows, in nats; float32 (float64 for float64 hidden states)."""

    logprobs_R: Tensor
    """[R], with gradient."""
    entropy_R: Tensor
    """[R], with gradient."""
    divergence_D: Tensor | None = None
    """[D], with gradient: the last D rows against their teacher; None without one."""
    teacher_entropy_D: Tensor | None = None
    """[D], detached."""


def head_of(lm: PreTrainedModel) -> Head:
    """The output layer of `lm`, with the scaling or soft cap that some families apply behind it.

    An adapted layer counts as W + (alpha / rank) B A, without the adapters' dropout; switched off, as W. Raises
    ConfigError for an output layer that is not linear.
    """
    module, config = lm.get_output_embeddings(), lm.config.get_text_config()
    layer = getattr(module, "base_layer", module)  # peft's layers; importing peft to ask would take seconds
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"{type(lm).__name__} ends in a {type(layer).__name__}, and the loss needs a linear output layer: train "
            "another model, or leave the output layer out of trainer.lora.target_modules"
        )
    weight = layer.weight
    if layer is not module and not module.disable_adapters:
        for adapter in module.active_adapters:
            weight = weight + module.get_delta_weight(adapter)
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return Head(
        weight_VH=weight,
        bias_V=layer.bias,
        scale=scale,
        cap=getattr(config, "final_logit_softcapping", None),  # Gemma
    )
