"""The optimizer of a configuration: AdamW, or one of the user's."""

from __future__ import annotations

import torch

from composer_prime.config.trainer import OptimConfig
from composer_prime.errors import ConfigError
from composer_prime.import_path import build_part
from trainer.model.policy_model import Policy
from trainer.step import Optimizer


def build_optimizer(policy: Policy, config: OptimConfig) -> Optimizer:
    """Return the optimizer of all trainable parameters; norms and biases keep their scale.

    Raises ConfigError when nothing is trainable, or an optimizer of the user's cannot be built.
    """
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("no parameter of the model is trainable: check trainer.lora.target_modules")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    if ":" in config.type:
        given = {"params": filled, "lr": config.lr}
        own = build_part(config.type, config.settings, {}, "trainer.optim.type", given)
        return Optimizer(own, config.max_grad_norm)
    adamw = torch.optim.AdamW(filled, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return Optimizer(adamw, config.max_grad_norm)
