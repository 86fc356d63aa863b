"""A batch's figures and the rollout log's lines."""

import json

import msgspec
import pytest
from orch_groups import ended, ready

from composer_prime.run.run_dir import RunDir
from orchestrator.batching.batch_metrics import batch_metrics
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import GroupOutcome
from orchestrator.scheduler import _warn_of_filtered


def test_reward_mean_counts_filtered_groups_but_not_failed_or_stale_ones():
    """The learning curve must not hide the groups in which everyone passed, nor count failures as zeros."""
    dropped = [
        ended(1, GroupOutcome.FILTERED, 1.0, 1.0),
        ended(2, GroupOutcome.FAILED, None, None),
        ended(3, GroupOutcome.STALE, 0.0),
    ]
    metrics = batch_metrics(4, [ready(0, 4, rewards=(0.0, 1.0))], dropped)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/s/mean"] == 0.75
    assert metrics["groups/filtered"] == 1
    assert metrics["groups/filtered_share"] == 0.5
    assert (metrics["groups/failed"], metrics["groups/stale"]) == (1, 1)
    assert metrics["rollout/failed/env"] == 2


# Where nearly all rollouts are cut, groups without advantage come from a limit, which is named.
@pytest.mark.parametrize("is_cut", [True, False])
def test_rollouts_that_are_cut_are_named(is_cut, caplog):
    group = ended(1, GroupOutcome.FILTERED, 0.0, 0.0)
    rollouts = [msgspec.structs.replace(each, truncated=is_cut) for each in group.rollouts]
    _warn_of_filtered(1.0, [msgspec.structs.replace(group, rollouts=rollouts)])
    assert "every reward was 0" in caplog.text
    assert ("orchestrator.sampling.max_tokens" in caplog.text) is is_cut


def test_staleness_is_in_steps_behind_the_weights_that_are_trained():
    """Batch 5 trains weights 4: tokens of versions 2 and 4 are 2 and 0 steps stale; the mean is over tokens."""
    metrics = batch_metrics(4, [ready(0, 2, 4, 4)], [])
    assert metrics["policy/staleness_max"] == 2
    assert metrics["policy/staleness_mean"] == pytest.approx(2 / 3)


def test_a_line_holds_what_the_contract_promises(tmp_path):
    """Task, source, reward, parts, versions, turns with role, text, token count, error, hint, and cost."""
    path = RunDir(tmp_path).rollouts(1)
    groups = [ready(0, 0), ended(1, GroupOutcome.FAILED, None, 1.0)]
    rollout_log.write(path, [line for group in groups for line in rollout_log.group_lines(1, group)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["status"] for line in lines] == ["trained", "trained", "failed", "failed"]
    promised = {"task_id", "source", "reward", "parts", "policy_versions", "turns", "cost", "rollout_id", "error"}
    assert all(promised <= line.keys() for line in lines)
    assert {"role", "text", "token_count", "error", "hint"} <= lines[0]["turns"][0].keys()
    assert lines[2]["error"]["kind"] == "env"
    assert lines[2]["reward"] is None
