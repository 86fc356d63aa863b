"""Groups under way: retries, failures as data, deadlines, long rollouts over several versions, no waiting on others."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from orch_groups import ended, plan
from orch_peers import ScriptedPool, draw, make_config, sample_ids

from composer_prime.errors import EnvironmentWorkerError, RolloutError
from composer_prime.monitor.events import EventFile, EventHandler, read_events
from orchestrator.durability import Dropped, Journal
from orchestrator.gateway.http import RolloutRecords
from orchestrator.rollouts.groups import GroupOutcome
from orchestrator.rollouts.rollout import Permits, RolloutRunner
from orchestrator.scheduler import DroppedGroups
from orchestrator.workers.pool import RolloutFailure, RolloutReply, RunRollout
from tests.waiting import until

BROKEN = RolloutFailure(kind="sandbox", message="the sandbox is gone", retryable=True)
HOPELESS = RolloutFailure(kind="context_overflow", message="the prompt is too long", retryable=False)


def sibling(request: RunRollout) -> int:
    return int(request.rollout_id.split("-")[1].split("r")[0])


def attempt(request: RunRollout) -> int:
    return int(request.rollout_id.partition("r")[2] or 0)


def mixed(request: RunRollout) -> float:
    return float(sibling(request) % 2)


async def test_a_failed_environment_is_retried_with_a_fresh_id_and_seed(open_run, run_dir, tmp_path):
    """The first try of every sibling 0 fails: the second one's reward counts, the first is on record."""
    pool = ScriptedPool(lambda request: BROKEN if sibling(request) == 0 and attempt(request) == 0 else mixed(request))
    async with open_run(make_config(tmp_path), pool) as run, run.trainer(0) as trainer:
        [reply] = await trainer.train(1)
        lines = await run.rollouts(1)
        assert len(lines) == 8
        assert all(line["reward"] is not None for line in lines)
        first = [line for line in lines if line["failed_attempts"]]
        assert [line["failed_attempts"][0]["kind"] for line in first] == ["sandbox", "sandbox"]
        assert reply.metrics["rollout/failed/sandbox"] == 2
        seeds = [request.seed for request in pool.requests if request.rollout_id.startswith("g000000")]
        assert len(set(seeds)) == len(seeds) == 5


async def test_a_sibling_that_keeps_failing_is_left_out_and_never_scored_zero(open_run, run_dir, tmp_path):
    """Its group goes on with the others; the failed rollout has no reward and no sample, but a line in the log."""
    pool = ScriptedPool(lambda request: BROKEN if sibling(request) == 3 else mixed(request))
    config = make_config(tmp_path, max_retries=1)
    async with open_run(config, pool) as run, run.trainer(0) as trainer:
        replies = await trainer.train(1)
        assert {sample_id.split("-")[1][0] for sample_id in sample_ids(replies)} == {"0", "1", "2"}
        failed = [line for line in await run.rollouts(1) if line["status"] == "failed"]
        assert [line["reward"] for line in failed] == [None, None]
        assert [line["error"]["kind"] for line in failed] == ["sandbox", "sandbox"]
        assert replies[0].metrics["reward/mean"] == 1 / 3


async def test_a_group_with_too_few_rollouts_is_dropped_and_counted(open_run, run_dir, tmp_path):
    """Every other task fails without hope: no retry, the group is dropped, batches are made of the others."""
    pool = ScriptedPool(lambda request: HOPELESS if request.task_index % 2 else mixed(request))
    async with open_run(make_config(tmp_path), pool) as run, run.trainer(0) as trainer:
        for step in range(1, 5):
            await trainer.train(step)
        counters = run.pipeline.watchdog.scheduler.dropped.counters
        assert counters["failed"] > 0
        assert all(reply.metrics["batch/groups"] == 2 for [reply] in trainer.steps.values())


class HackingPool(ScriptedPool):
    async def run(self, *words: Any, **options: Any) -> RolloutReply:
        reply = await super().run(*words, **options)
        verdict = {"findings": [{"rule": "process-exit", "place": "m.py:3"}]}
        return msgspec.structs.replace(reply, metrics={"hacks/rollouts": 1.0}, verdict=verdict)


async def test_the_place_of_a_hack_is_named(open_run, run_dir, tmp_path, caplog):
    """With its rule; not the line of ours that reports it."""
    async with open_run(make_config(tmp_path), HackingPool(mixed)) as run, run.trainer(0) as trainer:
        await trainer.train(1)
    found = [record for record in caplog.records if getattr(record, "event_kind", "") == "hack"]
    assert {record.event_where for record in found} == {"m.py:3"} and "process-exit" in found[0].getMessage()


def test_failures_in_a_row_are_counted_by_source(monkeypatch):
    """A healthy source beside a broken one does not keep the run going; a group that ends well starts its own anew."""
    monkeypatch.setattr("orchestrator.scheduler._MAX_FAILED_GROUPS", 3)
    dropped = DroppedGroups()

    def end(source: str, *, well: bool) -> None:
        group = ended(0, GroupOutcome.FILTERED if well else GroupOutcome.FAILED, 1.0 if well else None)
        dropped.count_failures(msgspec.structs.replace(group, plan=plan(0, source=source)))

    for well in (False, False, True, False, False):
        end("broken", well=well)
        end("healthy", well=True)
    with pytest.raises(RolloutError, match=r"3 groups in a row of source 'broken' failed .*told so"):
        end("broken", well=False)


RAISED = RolloutFailure(
    kind="task",
    message="reward 'right': KeyError: 'answer'",
    retryable=True,
    where="my_env.py:12, in right",
    detail="  File \"my_env.py\", line 12, in right\nKeyError: 'answer'",
)


async def test_a_reward_that_always_raises_stops_the_run(open_run, run_dir, tmp_path, monkeypatch):
    """The first cause is shown at once, every failed rollout is on disk, and the error ends with file and line."""
    pool = ScriptedPool(lambda request: RAISED)
    monkeypatch.setattr("orchestrator.scheduler._MAX_FAILED_GROUPS", 4)
    handler = EventHandler(EventFile(run_dir, "orchestrator"), logging.INFO)
    logging.getLogger().addHandler(handler)
    async with open_run(make_config(tmp_path, max_retries=1), pool) as run:
        [error] = await asyncio.gather(run.task, return_exceptions=True)
        logging.getLogger().removeHandler(handler)
        assert isinstance(error, RolloutError)
        assert str(error).endswith("task: reward 'right': KeyError: 'answer' (my_env.py:12, in right)")
    [failure] = [each for each in read_events(run_dir.root / "events.jsonl") if each.kind == "failure"]
    assert failure.text == "a rollout of 's' failed: task: reward 'right': KeyError: 'answer' (my_env.py:12, in right)"
    assert failure.where == "my_env.py:12, in right"
    failed = [json.loads(line) for line in run_dir.failed_rollouts.read_text().splitlines()]
    assert len(failed) >= 8 and not run_dir.rollouts(1).exists()
    assert failed[0]["status"] == "failed" and failed[0]["step"] == 1
    assert failed[0]["error"]["where"] == "my_env.py:12, in right"
    assert "line 12, in right" in failed[0]["error"]["detail"]
    # The groups are journaled. Else a resume would start the same broken tasks first and end again.
    entries = list(Journal(run_dir.journal))
    ended = {entry.group.plan.group for entry in entries if isinstance(entry, Dropped)}
    assert len(ended) >= 4  # others may end while the run does


async def test_workers_that_are_gone_for_good_end_the_run(open_run, tmp_path):
    """An error of the pool itself is not a rollout's: no retry, the run fails with it."""

    class Gone(ScriptedPool):
        async def run(self, request: RunRollout, **options: Any):
            raise EnvironmentWorkerError("it was started 6 times")

    async with open_run(make_config(tmp_path), Gone(), node=False) as run:
        [error] = await asyncio.gather(run.task, return_exceptions=True)
        assert isinstance(error, EnvironmentWorkerError)


async def test_groups_without_advantage_are_left_out_but_counted(open_run, run_dir, tmp_path):
    """All-equal rewards: not trained, but in reward/mean, in the log and in the filtered share."""
    pool = ScriptedPool(lambda request: 1.0 if request.task_index % 2 else mixed(request))
    async with open_run(make_config(tmp_path), pool) as run, run.trainer(0) as trainer:
        filtered = []
        for step in range(1, 5):
            [reply] = await trainer.train(step)
            statuses = {line["status"] for line in await run.rollouts(step)}
            filtered += [line for line in await run.rollouts(step) if line["status"] == "filtered"]
            assert statuses <= {"trained", "filtered"}
            rewards = [line["reward"] for line in await run.rollouts(step)]
            assert reply.metrics["reward/mean"] == sum(rewards) / len(rewards)
            assert reply.metrics["groups/filtered"] * 4 == sum(reward == 1.0 for reward in rewards) - 4
        assert filtered
        assert all(line["advantage"] == 0 for line in filtered)


async def test_tasks_without_advantage_are_said_before_the_first_batch(open_run, tmp_path, caplog):
    """Where every group gets equal rewards no batch forms, so the dropped groups themselves warn."""
    async with open_run(make_config(tmp_path), ScriptedPool(lambda request: 0.0)), asyncio.timeout(60):
        await until(lambda: any(getattr(record, "event_kind", "") == "groups" for record in caplog.records))
    assert "100 % of the groups" in caplog.text and "every reward was 0" in caplog.text


async def test_a_long_rollout_goes_on_over_versions_and_its_new_tokens_are_trained(open_run, run_dir, tmp_path):
    """Group 1 plays until step 4 is trained: batches go on without it, then its last turn is trained."""
    pool = ScriptedPool(mixed)
    release = asyncio.Event()
    pool.gates["g000001", 1] = release
    async with open_run(make_config(tmp_path, max_steps=8), pool) as run, run.trainer(0) as trainer:
        for step in range(1, 9):
            if step == 5:
                release.set()
            await trainer.train(step)
        trained = {name.split("-")[0] for replies in trainer.steps.values() for name in sample_ids(replies)}
        assert "g000001" in trained
        assert run.pipeline.watchdog.scheduler.dropped.counters["stale"] == 0
        metrics = [replies[0].metrics for replies in trainer.steps.values()]
        assert all(figures["policy/staleness_max"] <= 1 for figures in metrics)


async def test_a_rollout_past_its_deadline_is_a_failure_of_kind_timeout(tmp_path):
    """A worker that never replies costs its deadline plus a grace, then the rollout counts as failed."""
    pool, records = ScriptedPool(mixed), RolloutRecords()
    gateway: Any = SimpleNamespace(http_url="http://127.0.0.1:1", records=records, audits=None)
    pools: Any = {"s": pool}
    pool.pause_s = lambda request: 60.0
    source = {"name": "s", "taskset": {"id": "x"}, "timeout_s": 0.1}
    config = make_config(tmp_path, source=[source]).orchestrator
    runner = RolloutRunner(config=config, gateway=gateway, seed=1, pools=pools, permits=Permits(1), grace_s=0.1)
    reply, sampled = await runner.run("s", runner.training_request(plan(0), 0, 0), order=0)
    failure = reply.failure
    assert failure is not None and failure.kind == "timeout" and failure.retryable
    assert records.find(reply.rollout_id) is None and not sampled


async def test_a_displaced_rollout_is_played_again_and_counts_as_no_failure(open_run, run_dir, tmp_path):
    """Its worker was blocked by another: with no retry allowed it is played twice more, and nothing is on record."""
    displaced = RolloutFailure(kind="displaced", message="another rollout blocked the worker")
    pool = ScriptedPool(lambda request: displaced if attempt(request) < 2 else mixed(request))
    config = make_config(tmp_path, max_retries=0)
    async with open_run(config, pool) as run, run.trainer(0) as trainer:
        await trainer.train(1)
        lines = await run.rollouts(1)
        assert {(line["status"], len(line["failed_attempts"])) for line in lines} == {("trained", 0)}
        assert not run_dir.failed_rollouts.exists()


async def test_synchronous_training_uses_only_the_newest_version(open_run, run_dir, tmp_path):
    """max_staleness 0 with a node that swaps late: every token of batch N is of version N - 1."""
    pool = ScriptedPool(lambda request: draw(request.rollout_id))
    config = make_config(tmp_path, max_staleness=0, max_steps=5)
    async with open_run(config, pool, swap_s=0.1, delay_s=0.01) as run, run.trainer(0, max_staleness=0) as trainer:
        for step in range(1, 6):
            [reply] = await trainer.train(step, work_s=0.05)
            versions = {v for batch in reply.micro_batches for v in batch.versions}
            assert versions == {step - 1}
            assert reply.metrics["policy/staleness_max"] == 0
        assert len({request.rollout_id.split("-")[0] for request in pool.requests}) == 10


async def test_the_next_batch_is_played_while_the_trainer_works(open_run, run_dir, tmp_path):
    """max_staleness 1: batch N + 1 is there before step N is done, and never more than one step stale."""
    pool = ScriptedPool(lambda request: draw(request.rollout_id))
    async with open_run(make_config(tmp_path, max_steps=6), pool, swap_s=0.05) as run, run.trainer(0) as trainer:
        replies = {1: await trainer.ask(1, 0)}
        for step in range(1, 6):
            replies[step + 1] = await trainer.ask(step + 1, 0)
            trainer.publish(step)
            await trainer.done(step, sorted(sample_ids([replies[step]])))
        assert all(reply.metrics["policy/staleness_max"] <= 1 for reply in replies.values())
        assert max(reply.metrics["policy/staleness_max"] for reply in replies.values()) == 1
