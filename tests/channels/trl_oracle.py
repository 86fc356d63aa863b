"""TRL's trainers, called unbound on bare objects: independent oracles for the policy loss and replay-DPO.

TRL computes these losses from a model; here its forward pass is replaced by given log-probabilities, and nothing else.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():  # TRL warns that its experimental part may change
    warnings.simplefilter("ignore")
    from trl.experimental.sdpo import loss_utils

__all__ = ["Accelerator", "loss_utils", "trl_loss"]


class Accelerator:
    num_processes = 1
    sync_gradients = False
    device = torch.device("cpu")

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value

    def pad_across_processes(self, value: Tensor, dim: int, pad_index: float) -> Tensor:
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """TRL's settings and inputs of GRPOTrainer._compute_loss; `delta` is its upper bound of the ratio."""

    objective: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_length: int = 32
    level: str = "token"
    delta: float | None = None
    importance_BT: Tensor | None = None
    """Its vLLM correction."""
    reference_BT: Tensor | None = None
    kl_weight: float = 0.0
    kl_times_ratio: bool = False
    opsm_threshold: float | None = None
    entropy_BT: Tensor | None = None
    entropy_weight: float = 0.0
    entropy_quantile: float = 1.0

    def trainer(self, logprobs_BT: Tensor) -> SimpleNamespace:
        """What `_compute_loss` reads of a trainer whose forward pass gives these log-probabilities."""
        from trl import GRPOTrainer

        entropy_BT = torch.zeros_like(logprobs_BT) if self.entropy_BT is None else self.entropy_BT
        corrects = self.importance_BT is not None
        trainer = SimpleNamespace(
            accelerator=Accelerator(),
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs_BT, entropy_BT, None),
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            aux_loss_enabled=False,
            top_entropy_quantile=self.entropy_quantile,
            off_policy_mask_threshold=self.opsm_threshold,
            importance_sampling_level=self.level,
            beta=self.kl_weight,
            loss_type=self.objective,
            epsilon_low=self.clip_low,
            epsilon_high=self.clip_high,
            args=SimpleNamespace(delta=self.delta, use_bias_correction_kl=self.kl_times_ratio, steps_per_generation=1),
            use_vllm=corrects,
            vllm_importance_sampling_correction=corrects,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            max_completion_length=self.max_length,
            _entropy_bonus_enabled=self.entropy_weight > 0,
            entropy_coef=self.entropy_weight,
            use_adaptive_entropy=False,
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        )
        trainer.get_high_entropy_mask = lambda *args: GRPOTrainer.get_high_entropy_mask(trainer, *args)
        return trainer


def trl_loss(
    logprobs_BT: Tensor, old_BT: Tensor | None, advantages_B: Tensor, mask_BT: Tensor, **settings: Any
) -> Tensor:
    """The loss that TRL computes from these per-token log-probabilities [B, T] (gradient flows into `logprobs_BT`).

    `old_BT` None means TRL's own choice, the detached log-probabilities; `advantages_B` may be [B] or [B, T];
    `settings` are those of `Grpo`.
    """
    from trl import GRPOTrainer

    grpo = Grpo(**settings)
    batch, length = mask_BT.shape
    inputs = {
        "prompt_ids": torch.zeros(batch, 1, dtype=torch.long),
        "prompt_mask": torch.ones(batch, 1, dtype=torch.long),
        "completion_ids": torch.zeros(batch, length, dtype=torch.long),
        "completion_mask": mask_BT,
        "advantages": advantages_B,
        "old_per_token_logps": old_BT,
        "ref_per_token_logps": grpo.reference_BT,
        "num_items_in_batch": mask_BT.sum(),
    }
    if grpo.importance_BT is not None:
        inputs["importance_sampling_ratio"] = grpo.importance_BT
    return GRPOTrainer._compute_loss(grpo.trainer(logprobs_BT), None, inputs)
