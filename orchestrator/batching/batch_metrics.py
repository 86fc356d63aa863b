"""A batch's figures for the trainer's line in metrics.jsonl; rewards of filtered groups are included."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from composer_prime.wire.types import Sample
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, turn_error_rate


def batch_metrics(version: int, groups: Sequence[FinishedGroup], dropped: Sequence[FinishedGroup]) -> dict[str, float]:
    """Return the figures of a batch that is trained from policy version `version` on.

    `groups` are trained, some perhaps for SDPO alone; `dropped` ended otherwise since the batch before.
    """
    scored = [*groups, *(group for group in dropped if group.outcome is GroupOutcome.FILTERED)]
    everything = [*groups, *dropped]
    rollouts = [rollout for group in scored for rollout in group.rollouts if rollout.failure is None]
    filtered = sum(group.outcome in (GroupOutcome.FILTERED, GroupOutcome.DISTILLED) for group in everything)
    lost = Counter(group.outcome for group in dropped)
    samples = [sample for group in groups for sample in group.samples]
    return {
        **_rewards(scored),
        **_staleness(version, samples),
        "batch/groups": float(sum(group.outcome is GroupOutcome.READY for group in groups)),
        "batch/samples": float(len(samples)),
        "batch/tokens": float(sum(sample.num_tokens for sample in samples)),
        **_rollouts(rollouts),
        **_hints(rollout for group in everything for rollout in group.rollouts),
        "groups/filtered": float(filtered),
        "groups/distilled": float(sum(group.outcome is GroupOutcome.DISTILLED for group in groups)),
        "groups/filtered_share": filtered / max(1, len(scored)),
        "groups/stale": float(lost[GroupOutcome.STALE]),
        "groups/failed": float(lost[GroupOutcome.FAILED]),
        **_failures(rollout for group in everything for rollout in group.rollouts),
    }


def _rewards(scored: Sequence[FinishedGroup]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if rewards := [reward for group in scored for reward in group.rewards]:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
    figures: dict[str, list[float]] = defaultdict(list)
    for group in scored:
        figures[f"reward/{group.plan.source}/mean"] += group.rewards
        for rollout in group.rollouts:
            for name, value in rollout.parts.items() if rollout.failure is None else ():
                figures[f"reward/part/{name}"].append(value)
    return metrics | _means(figures)


def _means(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: fmean(values) for name, values in figures.items() if values}


def _staleness(version: int, samples: Sequence[Sample]) -> dict[str, float]:
    spans = [span for sample in samples for span in sample.version_spans]
    tokens = sum(span.end - span.start for span in spans)
    if not tokens:
        return {}
    ages = sum((version - span.version) * (span.end - span.start) for span in spans)
    return {
        "policy/staleness_max": float(max(version - span.version for span in spans)),
        "policy/staleness_mean": ages / tokens,
    }


def _rollouts(rollouts: Sequence[FinishedRollout]) -> dict[str, float]:
    walls_s = [rollout.wall_s for rollout in rollouts if rollout.wall_s is not None]
    tool_messages = [turn for rollout in rollouts for turn in rollout.turns if turn.role == "tool"]
    metrics = _means(
        {
            "rollout/turns_mean": [sum(turn.role == "assistant" for turn in rollout.turns) for rollout in rollouts],
            "rollout/sampled_tokens_mean": [rollout.sampled_tokens for rollout in rollouts],
            "rollout/truncated_share": [rollout.truncated for rollout in rollouts],
            "rollout/wall_s_mean": walls_s,
            "rollout/tool_error_rate": [turn.error is not None for turn in tool_messages],
        }
    )
    if walls_s:
        metrics["rollout/wall_s_max"] = max(walls_s)
    if (rate := turn_error_rate(rollouts)) is not None:
        metrics["rollout/turn_error_rate"] = rate
    return metrics


def _hints(rollouts: Iterable[FinishedRollout]) -> dict[str, float]:
    """Count found, hinted, skipped/<reason>, kind/<error>, layer/<generator>."""
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        counts.update(rollout.hints)
    if counts:
        counts.update({"found": 0, "hinted": 0})
    return {f"hints/{name}": float(count) for name, count in sorted(counts.items())}


def _failures(rollouts: Iterable[FinishedRollout]) -> dict[str, float]:
    """Count failed tries by kind, retried ones included."""
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        counts.update(failure.kind for failure in rollout.failed_attempts)
        if rollout.failure is not None:
            counts[rollout.failure.kind] += 1
    by_kind = {f"rollout/failed/{kind}": float(count) for kind, count in sorted(counts.items())}
    return {"rollout/failed": float(counts.total()), **by_kind}
