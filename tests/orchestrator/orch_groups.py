"""Groups made up for tests."""

from composer_prime.wire.types import Sample, TurnSpan, VersionSpan, pack_flags, pack_floats, pack_ints
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, GroupPlan
from orchestrator.workers.pool import MessageRecord, RolloutFailure


def plan(group: int, *, source: str = "s", task_index: int = 0, size: int = 2) -> GroupPlan:
    return GroupPlan(group=group, source=source, task_index=task_index, seed=1000 + group, size=size)


def sample(sample_id: str, *versions: int, group_id: str = "g") -> Sample:
    """Two prompt tokens, then one sampled token for each version."""
    count = len(versions)
    spans = [VersionSpan(2 + at, 3 + at, version) for at, version in enumerate(versions)]
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        source="s",
        task_id="t",
        input_ids=pack_ints(range(2 + count)),
        loss_mask=pack_flags([0, 0] + [1] * count),
        logprobs=pack_floats([0.0, 0.0] + [-0.5] * count),
        advantages=pack_floats([0.0, 0.0] + [0.5] * count),
        reward=1.0,
        temperature=1.0,
        version_spans=spans,
        turns=[TurnSpan(2, 2 + count, 0)],
    )


def rollout(rollout_id: str, reward: float | None, *, failure: str | None = None, **more) -> FinishedRollout:
    turns = [
        MessageRecord(role="assistant", text="hi", num_tokens=1),
        MessageRecord(role="tool", text="no", error="no"),
    ]
    told = RolloutFailure(kind=failure, message="told so", retryable=True) if failure else None
    return FinishedRollout(
        rollout_id=rollout_id, sibling=0, task_id="t", seed=1, reward=reward, failure=told, turns=turns, **more
    )


def ready(group: int, *versions: int, rewards: tuple[float, ...] = (0.0, 1.0), source: str = "s") -> FinishedGroup:
    """A group of one sample a reward, sampled by `versions`."""
    made = plan(group, source=source, size=len(rewards))
    return FinishedGroup(
        plan=made,
        outcome=GroupOutcome.READY,
        rollouts=[rollout(made.rollout_id(at, 0), reward) for at, reward in enumerate(rewards)],
        samples=[
            sample(f"{made.rollout_id(at, 0)}/0", *(versions or (0,)), group_id=made.group_id)
            for at in range(len(rewards))
        ],
    )


def ended(group: int, outcome: GroupOutcome, *rewards: float | None) -> FinishedGroup:
    """A group that leaves no sample."""
    made = plan(group, size=max(1, len(rewards)))
    rollouts = [
        rollout(made.rollout_id(at, 0), reward, failure=None if reward is not None else "env")
        for at, reward in enumerate(rewards)
    ]
    return FinishedGroup(plan=made, outcome=outcome, rollouts=rollouts)
