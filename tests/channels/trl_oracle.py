"""TRL's GRPOTrainer._compute_loss, called unbound on a bare object: an independent oracle for channel 1."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import Tensor


class _Accelerator:
    num_processes = 1
    sync_gradients = False

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


def trl_loss(
    logprobs_BT: Tensor,
    old_BT: Tensor | None,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    objective: str,
    clip_low: float,
    clip_high: float,
    max_length: int,
    importance_BT: Tensor | None = None,
) -> Tensor:
    """The loss that TRL computes from these per-token log-probabilities [B, T] (gradient flows into `logprobs_BT`).

    `old_BT` None means TRL's own choice, the detached log-probabilities. `importance_BT` is its vLLM correction.
    """
    from trl import GRPOTrainer

    trainer = SimpleNamespace(
        accelerator=_Accelerator(),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs_BT, torch.zeros_like(logprobs_BT), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type=objective,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        use_vllm=importance_BT is not None,
        vllm_importance_sampling_correction=importance_BT is not None,
        model=SimpleNamespace(training=False),
        current_gradient_accumulation_steps=1,
        max_completion_length=max_length,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    batch, length = mask_BT.shape
    inputs = {
        "prompt_ids": torch.zeros(batch, 1, dtype=torch.long),
        "prompt_mask": torch.ones(batch, 1, dtype=torch.long),
        "completion_ids": torch.zeros(batch, length, dtype=torch.long),
        "completion_mask": mask_BT,
        "advantages": advantages_B,
        "old_per_token_logps": old_BT,
    }
    if importance_BT is not None:
        inputs["importance_sampling_ratio"] = importance_BT
    return GRPOTrainer._compute_loss(trainer, None, inputs)
