"""The end of a group: advantages, and whether the group carries signal. Pure functions that run in a thread.

Advantages inside a group of sibling rollouts; channels.policy.advantage_scaling chooses, each objective has a default:

    none  A_G = r_G - mean(r)                          Dr. GRPO, arXiv 2503.20783; Composer 2, 2603.24477
    std   A_G = (r_G - mean(r)) / (std(r) + 1e-4)      GRPO, arXiv 2402.03300; std with Bessel's correction, as in TRL

The life of a group without advantage whose error turns were hinted:

    dispatch   hints.attach() adds hinted turns to its samples. Groups that are dropped whole get none, nor do groups
               that can only join steps at which SDPO has no weight.
    here       all rewards equal, hints.filtered_groups -> DISTILLED; it keeps the samples with hinted turns, their loss
               mask and advantages 0 (`sdpo_only`): no part of the policy loss or of its denominators
    scheduler  journaled as Finished, counted as filtered, put into the buffer
    buffer     joins a batch of READY groups whose step has a weight for SDPO, at most as many as those; takes none of
               their places and opens none for dispatch; older than any batch accepts -> swept out, FILTERED
    batches    packed with the batch: teacher documents beside its rows; SDPO's denominator counts its turns
    log        status "distilled"; batch_metrics: groups/distilled, and in groups/filtered
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.policy import AdvantageScaling
from composer_prime.errors import NonFiniteError
from composer_prime.wire.types import Sample
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, GroupPlan
from orchestrator.rollouts.samples import sdpo_only, with_advantage

STD_FLOOR = 1e-4


def score_group(
    plan: GroupPlan,
    ended: list[tuple[FinishedRollout, list[Sample]]],
    config: OrchestratorConfig,
    scaling: AdvantageScaling,
) -> FinishedGroup:
    """Return the group as READY with its samples, FAILED (too few finished), FILTERED or DISTILLED (no advantage).

    A DISTILLED group keeps the samples with hinted turns, with mask 0 everywhere: the policy loss neither trains on
    them nor counts them. With `config.train_truncated` off the same holds for rollouts that were cut short; their
    rewards still count in the group's advantages.
    """
    scored = [(rollout, samples) for rollout, samples in ended if rollout.reward is not None]
    failed = [rollout for rollout, _ in ended if rollout.reward is None]
    if len(scored) < config.min_group:
        return FinishedGroup(plan=plan, outcome=GroupOutcome.FAILED, rollouts=[rollout for rollout, _ in ended])
    advantages_G = group_advantages([rollout.reward for rollout, _ in scored], scaling)
    rollouts, samples = [], []
    for (rollout, rollout_samples), advantage in zip(scored, advantages_G, strict=True):
        rollouts.append(msgspec.structs.replace(rollout, advantage=advantage))
        if rollout.truncated and not config.train_truncated:
            samples += _hinted_only(rollout_samples)
        else:
            samples += [with_advantage(sample, advantage) for sample in rollout_samples]
    rollouts = sorted(rollouts + failed, key=lambda rollout: rollout.sibling)
    signal = has_signal(advantages_G) or not config.filter_zero_advantage
    if signal and any(sample.num_trained for sample in samples):
        return FinishedGroup(plan=plan, outcome=GroupOutcome.READY, rollouts=rollouts, samples=samples)
    hinted = _hinted_only(samples) if config.hints is not None and config.hints.filtered_groups else []
    outcome = GroupOutcome.DISTILLED if hinted else GroupOutcome.FILTERED
    return FinishedGroup(plan=plan, outcome=outcome, rollouts=rollouts, samples=hinted)


def worth_hinting(
    ended: list[tuple[FinishedRollout, list[Sample]]], config: OrchestratorConfig, scaling: AdvantageScaling
) -> bool:
    """Whether `score_group` keeps hinted samples of such a group, so that hints may be paid for."""
    rewards = [rollout.reward for rollout, _ in ended if rollout.reward is not None]
    if len(rewards) < config.min_group:
        return False
    always_kept = not config.filter_zero_advantage or (config.hints is not None and config.hints.filtered_groups)
    return always_kept or has_signal(group_advantages(rewards, scaling))


def group_advantages(rewards_G: Sequence[float], scaling: AdvantageScaling) -> list[float]:
    """Return the advantage of each rollout of one group, [G]. A group of one has advantage 0.

    Raises NonFiniteError when a reward is NaN or infinite: a failed verifier must be recorded as failed, not scored.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise NonFiniteError(
            f"a group has rewards {list(rewards_G)}: mark failed rollouts as failed, do not score them"
        )
    if rewards.size < 2 or rewards.min() == rewards.max():  # a mean of equal numbers may be off by a last bit
        return [0.0] * rewards.size
    centered = rewards - rewards.mean()
    if scaling == "std":
        centered = centered / (rewards.std(ddof=1) + STD_FLOOR)
    return centered.tolist()


def has_signal(advantages_G: Sequence[float]) -> bool:
    """Whether a group moves the policy: equal rewards give only zeros."""
    return any(abs(value) > 1e-12 for value in advantages_G)


def _hinted_only(samples: list[Sample]) -> list[Sample]:
    """Return the samples with hinted turns, without a part in the policy loss."""
    return [sdpo_only(sample) for sample in samples if sample.distillations]
