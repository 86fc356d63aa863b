"""Behavior rewards: the effort penalty's shape, what counts as effort, and the task's own reward beside it."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from composer_prime.config.orchestrator import BehaviorConfig
from composer_prime.errors import ConfigError, RolloutError
from orchestrator.batching.batch_metrics import batch_metrics
from orchestrator.rollouts.behavior import BehaviorRewards, effort_cost
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, GroupPlan, task_reward
from orchestrator.workers.protocol import MessageRecord, RolloutReply, ToolCall

scales = st.floats(1e-6, 10.0)
curvatures = st.floats(0.0, 4.0)
efforts = st.floats(0.0, 1e6)


def cost(x: float, k: float, q: float) -> float:
    """The formula as it is printed (arXiv 2603.24477)."""
    return math.log(1 + k * x) / k if q == 1 else ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


@given(st.floats(0.0, 1e4), st.floats(1e-3, 1.0), st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0]))
def test_the_penalty_is_the_published_formula(x, k, q):
    assert effort_cost(x, k=k, q=q) == pytest.approx(cost(x, k, q), rel=1e-9, abs=1e-9)


@given(efforts, efforts, scales, curvatures)
def test_more_effort_costs_more_but_ever_less_so(x, y, k, q):
    # Non-negative, 0 at 0, increasing, at most linear, and concave: the middle lies above the chord.
    low, high = sorted((x, y))
    at_low, at_high = effort_cost(low, k=k, q=q), effort_cost(high, k=k, q=q)
    slack = 1e-9 * max(1.0, high)
    assert 0 <= at_low <= at_high + slack and at_high <= high + slack
    assert effort_cost((low + high) / 2, k=k, q=q) >= (at_low + at_high) / 2 - slack
    assert effort_cost(0.0, k=k, q=q) == 0


@given(efforts, scales, st.floats(-1e-7, 1e-7))
def test_the_logarithm_is_the_limit_at_q_1(x, k, off):
    assert effort_cost(x, k=k, q=1 + off) == pytest.approx(effort_cost(x, k=k, q=1.0), rel=1e-4, abs=1e-9)


REPLY = RolloutReply(
    rollout_id="r",
    task_id="t",
    reward=1.0,
    parts={"correct": 1.0},
    metrics={"lines": 12.0},
    turns=[
        MessageRecord(role="user", text="q", num_tokens=50),
        MessageRecord(role="assistant", text="", num_tokens=30, reasoning="let me see now", parent=0,
                   tool_calls=[ToolCall(id="a", name="f", arguments="{}"), ToolCall(id="b", name="g", arguments="{}")]),
        MessageRecord(role="tool", text="1", num_tokens=7, parent=1),
        MessageRecord(role="tool", text="bad", num_tokens=8, error="bad", parent=2),
        MessageRecord(role="assistant", text="<tool_call>{", num_tokens=5, parent=3),
        MessageRecord(role="tool", text="Invalid JSON", num_tokens=4, error="Invalid JSON", parent=4),
        MessageRecord(role="assistant", text="done", num_tokens=3, parent=5),
    ],
)  # fmt: skip


def behavior(**settings) -> BehaviorRewards:
    return BehaviorRewards(BehaviorConfig(**settings))


def test_parts_add_up_to_the_reward_and_can_be_told_apart():
    # Linear (q = 0) for a sum by hand: 0.01 * the 38 sampled tokens, and two scalars.
    scalars = [
        {"name": "errors", "scalar": "tool_errors", "weight": -0.1},
        {"name": "short", "scalar": "lines", "weight": 0.01},
    ]
    shaped = behavior(penalty=0.01, q=0.0, k=0.5, auxiliary=scalars).add_to(REPLY)
    assert shaped.parts == pytest.approx(
        {"correct": 1.0, "behavior/effort": -0.38, "behavior/errors": -0.2, "behavior/short": 0.12}
    )
    assert shaped.reward == pytest.approx(1.0 - 0.38 - 0.2 + 0.12)
    assert task_reward(shaped.reward, shaped.parts) == pytest.approx(1.0)


def test_a_scalar_that_no_rollout_has_is_named_with_those_there_are():
    wrong = behavior(auxiliary=[{"name": "a", "scalar": "lins", "weight": 1.0}])
    for _ in range(7):
        with pytest.raises(RolloutError, match="'lins'"):
            wrong.add_to(REPLY)
    with pytest.raises(ConfigError, match=r"'lins', but rollout r has only .*lines.*turn_error_rate"):
        wrong.add_to(REPLY)


def test_a_rollout_without_a_metric_that_others_have_fails_alone():
    # A verifier may give no number now and then; however often, that is no misspelt name.
    shaping = behavior(auxiliary=[{"name": "a", "scalar": "lines", "weight": 0.5}])
    without = msgspec.structs.replace(REPLY, metrics={})
    with pytest.raises(RolloutError, match="'lines'"):
        shaping.add_to(without)
    assert shaping.add_to(REPLY).reward == 7.0
    for _ in range(20):
        with pytest.raises(RolloutError, match="'lines'"):
            shaping.add_to(without)


@given(st.floats(0.0, 3.0), st.floats(1e-4, 1.0))
def test_the_tasks_own_reward_comes_back_exactly(penalty, k):
    # 1.0 is the threshold of passing: a last bit of rounding must not fail anybody.
    shaped = behavior(penalty=penalty, k=k).add_to(REPLY)
    assert task_reward(shaped.reward, shaped.parts) == 1.0


def test_off_by_default_and_names_are_unique():
    assert not BehaviorConfig().active
    assert behavior().add_to(REPLY).reward == REPLY.reward
    with pytest.raises(ValidationError, match="'effort'"):
        BehaviorConfig(auxiliary=[{"name": "effort", "scalar": "turns", "weight": 1.0}])


def test_metrics_show_the_reward_with_and_without():
    shaped = behavior(penalty=0.001).add_to(REPLY)
    rollout = FinishedRollout(rollout_id="r", sibling=0, task_id="t", seed=1, reward=shaped.reward, parts=shaped.parts)
    plan = GroupPlan(group=0, source="s", task_index=0, seed=0, size=1)
    group = FinishedGroup(plan=plan, outcome=GroupOutcome.FILTERED, rollouts=[rollout])
    metrics = batch_metrics(0, [], [group], [])
    assert metrics["reward/mean"] == pytest.approx(shaped.reward) and metrics["reward/task_mean"] == pytest.approx(1.0)
    assert metrics["reward/part/behavior/effort"] < 0
