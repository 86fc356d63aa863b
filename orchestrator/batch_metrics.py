"""A batch's figures, for the trainer's line in metrics.jsonl.

Rewards are those of every rollout that ended since the batch before, filtered groups included: the groups without
advantage are the ones where all siblings passed or all failed, and a mean without them would hide both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from orchestrator.conversation import turn_error_rate
from orchestrator.groups import BEHAVIOUR_PART, FinishedGroup, FinishedRollout, Outcome


def batch_metrics(
    version: int, groups: Sequence[FinishedGroup], dropped: Sequence[FinishedGroup]
) -> dict[str, float]:
    """Figures of a batch: `groups` are trained (some perhaps for channel 2 alone) from policy version `version` on,
    `dropped` ended otherwise since the last batch."""
    scored = [*groups, *(group for group in dropped if group.outcome is Outcome.FILTERED)]
    everything = [*groups, *dropped]
    rollouts = [rollout for group in scored for rollout in group.rollouts if rollout.failure is None]
    metrics = _rewards(scored)
    metrics |= _staleness(version, groups)
    metrics |= _shapes(groups, rollouts)
    metrics |= _tools(rollouts)
    metrics |= _hints(rollout for group in everything for rollout in group.rollouts)
    filtered = sum(group.outcome in (Outcome.FILTERED, Outcome.DISTILLED) for group in everything)
    metrics["groups/filtered"] = float(filtered)
    metrics["groups/distilled"] = float(sum(group.outcome is Outcome.DISTILLED for group in groups))
    metrics["groups/filtered_share"] = filtered / max(1, len(scored))
    metrics["groups/stale"] = float(sum(group.outcome is Outcome.STALE for group in dropped))
    metrics["groups/failed"] = float(sum(group.outcome is Outcome.FAILED for group in dropped))
    return metrics | _failures(rollout for group in everything for rollout in group.rollouts)


def _rewards(scored: Sequence[FinishedGroup]) -> dict[str, float]:
    rewards = [reward for group in scored for reward in group.rewards]
    metrics: dict[str, float] = {}
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        spreads = [pstdev(group.rewards) for group in scored if group.rewards]
        metrics["reward/group_std"] = fmean(spreads)
    by_source: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for group in scored:
        by_source[group.plan.source] += group.rewards
        for rollout in group.rollouts:
            for name, value in rollout.parts.items() if rollout.failure is None else ():
                parts[name].append(value)
    if any(name.startswith(BEHAVIOUR_PART) for name in parts):
        metrics["reward/task_mean"] = fmean(reward for group in scored for reward in group.task_rewards)
    metrics |= {f"reward/{source}/mean": fmean(values) for source, values in by_source.items() if values}
    return metrics | {f"reward/part/{name}": fmean(values) for name, values in parts.items()}


def _staleness(version: int, groups: Sequence[FinishedGroup]) -> dict[str, float]:
    spans = [span for group in groups for sample in group.samples for span in sample.version_spans]
    tokens = sum(span.end - span.start for span in spans)
    if not tokens:
        return {}
    ages = sum((version - span.version) * (span.end - span.start) for span in spans)
    return {
        "policy/staleness_max": float(max(version - span.version for span in spans)),
        "policy/staleness_mean": ages / tokens,
    }


def _shapes(groups: Sequence[FinishedGroup], rollouts: Sequence[FinishedRollout]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    metrics = {
        "batch/groups": float(sum(group.outcome is Outcome.READY for group in groups)),
        "batch/samples": float(len(samples)),
        "batch/tokens": float(sum(sample.num_tokens for sample in samples)),
    }
    if rollouts:
        turns = [sum(turn.role == "assistant" for turn in rollout.turns) for rollout in rollouts]
        metrics["rollout/turns_mean"] = fmean(turns)
        metrics["rollout/sampled_tokens_mean"] = fmean(rollout.sampled_tokens for rollout in rollouts)
        metrics["rollout/truncated_share"] = fmean(rollout.truncated for rollout in rollouts)
        walls = [rollout.wall_s for rollout in rollouts if rollout.wall_s is not None]
        if walls:
            metrics["rollout/wall_s_mean"], metrics["rollout/wall_s_max"] = fmean(walls), max(walls)
    return metrics


def _tools(rollouts: Sequence[FinishedRollout]) -> dict[str, float]:
    """Errors by tool message, and by assistant turn: what hints are to bring down."""
    metrics: dict[str, float] = {}
    answers = [turn for rollout in rollouts for turn in rollout.turns if turn.role == "tool"]
    if answers:
        metrics["rollout/tool_error_rate"] = fmean(turn.error is not None for turn in answers)
    if (rate := turn_error_rate(rollouts)) is not None:
        metrics["rollout/turn_error_rate"] = rate
    return metrics


def _hints(rollouts: Iterable[FinishedRollout]) -> dict[str, float]:
    """hints/found, hints/hinted, hints/skipped/<reason>, hints/kind/<kind of error>, hints/layer/<generator> …"""
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        counts.update(rollout.hints)
    if counts:
        counts.update({"found": 0, "hinted": 0})
    return {f"hints/{name}": float(count) for name, count in sorted(counts.items())}


def _failures(rollouts: Iterable[FinishedRollout]) -> dict[str, float]:
    """Failed tries by kind, retried ones included."""
    counts: dict[str, int] = defaultdict(int)
    for rollout in rollouts:
        for failure in [*rollout.failed_attempts, *([rollout.failure] if rollout.failure else [])]:
            counts[failure.kind] += 1
    return {"rollout/failed": float(sum(counts.values()))} | {
        f"rollout/failed/{kind}": float(count) for kind, count in sorted(counts.items())
    }
