"""Evaluation: unbiased pass@k, intervals, failures left out, the version range, the schedule."""

import asyncio
import itertools
import json
import time
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orch_groups import rollout
from orch_peers import PeerTrainer, RunNode, ScriptedPool, draw, make_config, sample_ids

from composer_prime.config.orchestrator import EvalConfig
from composer_prime.errors import DeadlineError
from composer_prime.run import ledger
from composer_prime.run.keys import RunKeys
from composer_prime.stats.intervals import pass_at_k
from composer_prime.wire.node_messages import NodeHello
from composer_prime.wire.types import StepReply
from orchestrator.evals import eval_summary
from orchestrator.workers.pool import EVAL, RolloutFailure
from tests.waiting import until


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_pass(samples, data):
    """The estimator equals the plain count over all subsets of k samples."""
    passed, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    outcomes = [True] * passed + [False] * (samples - passed)
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_failed_rollouts_are_left_out_and_counted():
    """A verifier that broke is not a wrong answer: two tasks are scored; without a score there is no mean."""
    tasks = [
        [rollout("a", 1.0, version_min=3, version_max=4), rollout("b", None, failure="env")],
        [rollout("c", 0.0, version_min=4, version_max=5), rollout("d", 0.5, version_min=4, version_max=4)],
        [rollout("e", None, failure="env")],
    ]
    figures = eval_summary("s", tasks, EvalConfig(every_steps=1, samples=2, pass_k=[1, 2]))
    assert figures["eval/s/tasks"] == 2
    assert figures["eval/s/failed"] == 2
    assert figures["eval/s/reward_mean"] == fmean([1.0, 0.25])
    assert figures["eval/s/pass@1"] == 0.5
    assert figures["eval/s/pass@2"] == 0.0
    assert (figures["eval/s/version_min"], figures["eval/s/version_max"]) == (3, 5)
    figures = eval_summary("s", tasks[2:], EvalConfig(every_steps=1))
    assert "eval/s/reward_mean" not in figures and figures["eval/s/failed"] == 1


async def test_every_evaluation_plays_the_same_tasks_with_the_same_seeds(open_run, run_dir, tmp_path):
    """Steps 0, 2 and 3 (the last): held-out tasks, equal seeds, own rollout ids, failures retried, all logged."""

    def reward(request):
        flaky = request.taskset == EVAL and request.task_index == 1 and "r1" not in request.rollout_id
        return RolloutFailure(kind="env", message="flaky", retryable=True) if flaky else draw(request.seed)

    pool = ScriptedPool(reward)
    config = make_config(tmp_path, max_steps=3, eval={"every_steps": 2, "tasks": 3, "samples": 2})
    async with open_run(config, pool) as run, run.trainer(0) as trainer:
        for step in (1, 2, 3):
            await trainer.train(step, work_s=0.3)
        await trainer.checkpoint(3)
        await asyncio.wait_for(run.task, 60)
    asked = [request for request in pool.requests if request.taskset == EVAL]
    by_step = {}
    for request in asked:
        step, rest = request.rollout_id.removeprefix("eval").split("-", 1)
        by_step.setdefault(int(step), set()).add((rest, request.seed, request.temperature))
    assert sorted(by_step) == [0, 2, 3]
    assert by_step[0] == by_step[2] == by_step[3]
    assert len({seed for _, seed, _ in by_step[0]}) == len(by_step[0]) == 8
    for step in (0, 2, 3):
        lines = [json.loads(line) for line in run_dir.eval_rollouts(step).read_text().splitlines()]
        assert len(lines) == 6
        assert all(line["reward"] is not None for line in lines)
        assert sum(bool(line["failed_attempts"]) for line in lines) == 2
    last = [json.loads(line) for line in run_dir.eval_rollouts(3).read_text().splitlines()]
    assert {tuple(line["policy_versions"]) for line in last} == {(3, 3)}


async def test_what_keeps_failing_gets_a_pause_between_tries_and_a_message(open_run, run_dir, tmp_path, caplog):
    """A broken environment is not tried again at once, not for ever, and the log says what is wrong with it."""
    tried: list[float] = []

    def broken(request):
        if request.taskset != EVAL:
            return draw(request.rollout_id)
        tried.append(time.monotonic())
        return RolloutFailure(kind="sandbox", message="no disk left", retryable=True)

    config = make_config(tmp_path, max_steps=1, max_retries=1, eval={"every_steps": 1, "tasks": 1})
    async with open_run(config, ScriptedPool(broken)):
        await until(lambda: run_dir.eval_rollouts(0).exists() and "after at most" in caplog.text)
    assert len(tried) == 2 and tried[1] - tried[0] >= 0.5
    assert "evaluation of step 0: 1 of 1 rollouts have no reward after at most 2 tries" in caplog.text
    assert "sandbox: no disk left" in caplog.text


async def test_the_last_evaluation_waits_for_the_last_version_or_says_why_not(open_run, run_dir, tmp_path, monkeypatch):
    """A node that never swaps: no figures under the wrong version, but an error that names the version."""
    monkeypatch.setattr("orchestrator.evals._VERSION_TIMEOUT_S", 1.0)
    evaluation = {"every_steps": 5, "tasks": 2}
    config = make_config(tmp_path, max_steps=1, eval=evaluation)
    async with open_run(config, swap_s=60) as run, run.trainer(0) as trainer:
        await trainer.train(1)
        [error] = await asyncio.gather(run.task, return_exceptions=True)
        assert isinstance(error, DeadlineError)
        assert "evaluation of step 1 waited 1 s" in str(error)
        assert "policy version 1" in str(error)
        assert not run_dir.eval_rollouts(1).exists()


async def test_a_node_stuck_at_an_old_version_fails_neither_evaluation_nor_dispatch(
    open_run, run_dir, tmp_path, monkeypatch
):
    """One of three nodes never swaps: training goes on, and the last evaluation is answered by the other two."""
    monkeypatch.setattr("orchestrator.evals._VERSION_TIMEOUT_S", 30.0)
    evaluation = {"every_steps": 5, "tasks": 4}
    config = make_config(tmp_path, max_steps=3, max_staleness=4, eval=evaluation)
    async with (
        open_run(config) as run,
        RunNode(run.pipeline.gateway.node_endpoint, RunKeys(run_dir.keys), "node-1"),
        RunNode(run.pipeline.gateway.node_endpoint, RunKeys(run_dir.keys), "stuck", swap_s=600),
        PeerTrainer(run_dir, run.step_endpoint) as trainer,
    ):
        trainer.max_staleness = 4
        await trainer.attach(0)
        for step in (1, 2, 3):
            await trainer.train(step)
        await trainer.checkpoint(3)
        await asyncio.wait_for(run.task, 60)
        assert run.pipeline.gateway.router.policy.oldest == 0
    lines = [json.loads(line) for line in run_dir.eval_rollouts(3).read_text().splitlines()]
    assert {tuple(line["policy_versions"]) for line in lines} == {(3, 3)}


async def test_rollouts_start_at_the_version_that_half_of_the_nodes_serve(open_run, tmp_path):
    """The slowest node does not set the version that dispatch counts with."""
    async with open_run(make_config(tmp_path), node=False) as run:
        router = run.pipeline.gateway.router
        router.policy.newest = 9
        for number, version in enumerate([9, 9, 9, 8, 8, 8, 8, 2]):
            hello = NodeHello(node_id=f"n{number}", engine="test", run_id=None, version=version, max_concurrent=8)
            router.attach(str(number).encode(), hello)
        training = await run.pipeline._loaded
        assert training.scheduler.serving_version() == 8


async def test_evaluation_does_not_stop_training(open_run, run_dir, tmp_path):
    """Slow evaluation rollouts run beside training; the trainer is fed meanwhile."""
    pool = ScriptedPool(lambda request: draw(request.rollout_id))
    pool.pause_s = lambda request: 100.0 if request.taskset == EVAL else 0.0
    config = make_config(tmp_path, max_steps=4, eval={"every_steps": 4, "tasks": 5}, max_concurrent=8)
    async with open_run(config, pool) as run, run.trainer(0) as trainer:
        for step in (1, 2, 3):
            await trainer.train(step)
        assert run.pipeline.watchdog.evaluator.running == 0
        assert not run_dir.eval_rollouts(0).exists()


async def stop_with_batch_2_formed(trainer: PeerTrainer) -> list[str]:
    """Take step 1, write its checkpoint, have batch 2 formed, and return that batch's samples."""
    await trainer.attach(0)
    await trainer.train(1)
    await trainer.checkpoint(1)
    reply = await trainer.ask(2, 0)
    assert isinstance(reply, StepReply)
    return sample_ids([reply])


async def test_evaluation_goes_on_while_a_batch_is_formed_ahead(open_run, run_dir, tmp_path):
    """At max_staleness 0 the batch after a formed one needs weights that do not exist yet: the newest ones serve."""
    pool = ScriptedPool()
    pool.gates["eval1", 1] = asyncio.Event()
    options = {"max_steps": 2, "max_staleness": 0, "eval": {"every_steps": 1, "tasks": 2}}
    async with (
        open_run(make_config(tmp_path, **options), pool) as run,
        PeerTrainer(run_dir, run.step_endpoint, max_staleness=0) as trainer,
    ):
        await stop_with_batch_2_formed(trainer)
    assert not run_dir.eval_rollouts(1).exists()
    async with open_run(make_config(tmp_path, resume=True, **options)):
        await until(run_dir.eval_rollouts(1).exists)


async def test_a_step_whose_samples_are_all_left_out_is_evaluated(open_run, run_dir, tmp_path):
    """Its StepDone names no samples, as that of a trainer that attaches; the run waits for its last evaluation."""
    options = {"max_steps": 2, "eval": {"every_steps": 1, "tasks": 2}}
    async with open_run(make_config(tmp_path, **options)) as run, PeerTrainer(run_dir, run.step_endpoint) as trainer:
        blamed = await stop_with_batch_2_formed(trainer)
        ledger.append_step(run_dir.ledger, 2, [], left_out=blamed)
        ledger.append_rewind(run_dir.ledger, 1)
    async with open_run(make_config(tmp_path, resume=True, **options)) as run, run.trainer(1) as trainer:
        reply = await trainer.ask(2, 0)
        assert isinstance(reply, StepReply) and not sample_ids([reply])
        trainer.publish(2)
        ledger.append_step(run_dir.ledger, 2, [])
        await trainer.done(2, [])
        await trainer.checkpoint(2)
        await asyncio.wait_for(run.task, 30)
        assert run_dir.eval_rollouts(2).exists()
