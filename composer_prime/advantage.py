"""Advantages inside a group of sibling rollouts. Torch-free: the orchestrator computes them.

    none  A_G = r_G - mean(r)                          Dr. GRPO, arXiv 2503.20783; Composer 2, 2603.24477
    std   A_G = (r_G - mean(r)) / (std(r) + 1e-4)      GRPO, arXiv 2402.03300; std with Bessel's correction, as in TRL

Which one is channels.policy.advantage_scaling; each objective has its own default.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from composer_prime.config.policy import AdvantageScaling
from composer_prime.errors import NonFiniteError

STD_FLOOR = 1e-4


def group_advantages(rewards_G: Sequence[float], scaling: AdvantageScaling) -> list[float]:
    """The advantage of each rollout of one group, [G]. A group of one has advantage 0.

    Raises NonFiniteError when a reward is NaN or infinite: a failed verifier must be recorded as failed, not scored.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise NonFiniteError(
            f"a group has rewards {list(rewards_G)}: mark failed rollouts as failed, do not score them"
        )
    if rewards.size < 2 or rewards.min() == rewards.max():  # a mean of equal numbers may be off by a last bit
        return [0.0] * rewards.size
    centred = rewards - rewards.mean()
    if scaling == "std":
        centred = centred / (rewards.std(ddof=1) + STD_FLOOR)
    return centred.tolist()


def has_signal(advantages_G: Sequence[float]) -> bool:
    """Whether a group moves the policy at all: all-equal rewards give only zeros."""
    return any(abs(value) > 1e-12 for value in advantages_G)
