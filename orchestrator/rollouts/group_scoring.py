"""The end of a group: its rollouts' summaries, advantages, and whether it carries signal. Pure; runs in a thread.

The life of a group without advantage whose wrong turns were hinted:

    dispatch   hints.attach(): distillations on its samples (groups with advantage have them too); not where the group
               is dropped whole, nor where no step that it may join has a weight for channel 2
    here       all rewards equal, hints.filtered_groups -> DISTILLED; it keeps the samples with distillations, their
               loss mask and advantages 0 (compile.untrained): no part of channel 1 or of its denominators
    scheduler   journaled as Finished, counted as filtered, put into the buffer
    buffer     goes along with a batch of READY groups whose step has a weight for channel 2, at most as many as those;
               fills none of its places, opens none for dispatch; older than any batch accepts -> swept out, FILTERED
    batches    packed with the batch: teacher documents beside its rows, channel 2's denominator counts its turns
    log        status "distilled"; batch_metrics: groups/distilled, and in groups/filtered

Advantages inside a group of sibling rollouts. Torch-free: the orchestrator computes them.

    none  A_G = r_G - mean(r)                          Dr. GRPO, arXiv 2503.20783; Composer 2, 2603.24477
    std   A_G = (r_G - mean(r)) / (std(r) + 1e-4)      GRPO, arXiv 2402.03300; std with Bessel's correction, as in TRL

Which one is channels.policy.advantage_scaling; each objective has its own default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.config.policy import AdvantageScaling
from composer_prime.errors import NonFiniteError
from composer_prime.wire.types import Sample
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, GroupPlan
from orchestrator.rollouts.rollout import RolloutResult
from orchestrator.rollouts.samples import untrained, with_advantage
from orchestrator.workers.protocol import RolloutFailure

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


def score_failure(played: RolloutResult) -> RolloutFailure | None:
    """Why a rollout that ended has no usable reward; None when it has one. NaN from a verifier is a failed verifier."""
    reply = played.reply
    if reply.error is not None:
        return reply.error
    if reply.reward is None or not math.isfinite(reply.reward):
        message = f"the environment gave the reward {reply.reward}; a finite number is needed"
        return RolloutFailure(kind="no_reward", message=message, retryable=True)
    return None


def finished_rollout(
    played: RolloutResult,
    *,
    sibling: int,
    seed: int,
    samples: list[Sample],
    failure: RolloutFailure | None,
    earlier: list[RolloutFailure],
) -> FinishedRollout:
    """The rollout as data; `failure` (the reply's, or that of compiling its tokens) leaves it without a reward."""
    reply, versions = played.reply, played.versions
    return FinishedRollout(
        rollout_id=reply.rollout_id,
        sibling=sibling,
        task_id=reply.task_id,
        seed=seed,
        reward=None if failure is not None else reply.reward,
        parts=reply.parts,
        metrics=reply.metrics,
        turns=reply.turns,
        sessions=reply.sessions,
        stop_reason=reply.stop_reason,
        truncated=reply.truncated,
        failure=failure,
        failed_attempts=list(earlier),
        version_min=versions[0] if versions else None,
        version_max=versions[1] if versions else None,
        prompt_tokens=sum(sample.num_tokens - sample.num_trained for sample in samples) if samples else None,
        sampled_tokens=sum(len(record.completion_ids) for record in played.records),
        cpu_s=reply.cpu_s,
        wall_s=reply.wall_s,
    )


def worth_hinting(
    ended: list[tuple[FinishedRollout, list[Sample]]], config: OrchestratorConfig, scaling: AdvantageScaling
) -> bool:
    """Whether `finish_group` keeps hinted samples of such a group: hints may be paid for."""
    rewards = [rollout.reward for rollout, _ in ended if rollout.reward is not None]
    if len(rewards) < config.min_group:
        return False
    kept = not config.filter_zero_advantage or (config.hints is not None and config.hints.filtered_groups)
    return kept or has_signal(group_advantages(rewards, scaling))


def finish_group(
    plan: GroupPlan,
    ended: list[tuple[FinishedRollout, list[Sample]]],
    config: OrchestratorConfig,
    scaling: AdvantageScaling,
) -> FinishedGroup:
    """READY with its samples, FAILED (too few finished), or, where channel 1 learns nothing, FILTERED or DISTILLED.

    A DISTILLED group keeps the samples with hinted turns, with mask 0 everywhere: channel 1 neither learns from them
    nor counts them in a denominator. With `config.train_truncated` off the same holds for rollouts that were cut
    short, whose rewards still count in the group's advantages.
    """
    scored = [(rollout, samples) for rollout, samples in ended if rollout.reward is not None]
    failed = [rollout for rollout, _ in ended if rollout.reward is None]
    if len(scored) < config.min_group:
        return FinishedGroup(plan=plan, outcome=GroupOutcome.FAILED, rollouts=[rollout for rollout, _ in ended])
    advantages_G = group_advantages([rollout.reward for rollout, _ in scored], scaling)
    rollouts, samples = [], []
    for (rollout, own), advantage in zip(scored, advantages_G, strict=True):
        rollouts.append(msgspec.structs.replace(rollout, advantage=advantage))
        left_out = rollout.truncated and not config.train_truncated
        samples += _of_channel_2(own) if left_out else [with_advantage(sample, advantage) for sample in own]
    rollouts = sorted(rollouts + failed, key=lambda rollout: rollout.sibling)
    signal = has_signal(advantages_G) or not config.filter_zero_advantage
    if signal and any(sample.num_trained for sample in samples):
        return FinishedGroup(plan=plan, outcome=GroupOutcome.READY, rollouts=rollouts, samples=samples)
    wanted = config.hints is not None and config.hints.filtered_groups
    kept = _of_channel_2(samples) if wanted else []
    outcome = GroupOutcome.DISTILLED if kept else GroupOutcome.FILTERED
    return FinishedGroup(plan=plan, outcome=outcome, rollouts=rollouts, samples=kept)


def _of_channel_2(samples: list[Sample]) -> list[Sample]:
    """Those with hinted turns, of no part in channel 1."""
    return [untrained(sample) for sample in samples if sample.distillations]
