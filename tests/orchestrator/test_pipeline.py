"""The whole orchestrator between a real node link and a real trainer link."""

import asyncio
import shutil
from unittest.mock import Mock

import pytest
from orch_peers import RUN_ID, PeerTrainer, ScriptedPool, make_config, sample_ids

from composer_prime.errors import CheckpointError, DeadlineError, WireError
from composer_prime.run import ledger
from composer_prime.run.weights import WeightStore
from composer_prime.wire.types import RunFinished, StepRefused, StepRequest
from orchestrator.durability import state_path
from orchestrator.pipeline import Pipeline
from tests.waiting import until


async def test_a_run_from_first_evaluation_to_last_checkpoint(open_run, run_dir, tmp_path):
    """All steps, evaluations, logs and the checkpoint; every sample trained once; the orchestrator ends by itself."""
    config = make_config(tmp_path, max_steps=4, eval={"every_steps": 2, "tasks": 4, "samples": 2, "pass_k": [1, 2]})
    async with open_run(config) as run, run.trainer(0, world_size=2) as trainer:
        for step in range(1, 5):
            await trainer.train(step, work_s=0.05)
            if step == 2:
                # The second time as after a lost answer.
                assert [(await trainer.checkpoint(2)).error for _ in range(2)] == [None, None]
                # The trainer begins the checkpoint anew, in an empty folder: the state is written again.
                shutil.rmtree(run_dir.checkpoint(2))
                assert (await trainer.checkpoint(2)).error is None and state_path(run_dir, 2).is_file()
        saved = await trainer.checkpoint(4)
        assert saved.error is None
        assert isinstance(await trainer.ask(5, 0), RunFinished)
        await asyncio.wait_for(run.task, 60)
        assert ledger.check_ledger(run_dir.ledger) == []
        assert sorted(ledger.effective(run_dir.ledger)) == [1, 2, 3, 4]
        for step in range(1, 5):
            trained = {line["rollout_id"] for line in await run.rollouts(step) if line["status"] == "trained"}
            assert trained == {sample_id.split("/")[0] for sample_id in sample_ids(trainer.steps[step])}
            metrics = trainer.steps[step][0].metrics
            assert {"reward/mean", "policy/staleness_max", "reward/part/correct"} <= metrics.keys()
        evaluations = {line["step"]: line for line in run.lines() if "eval/s/pass@1" in line}
        assert sorted(evaluations) == [0, 2, 4]
        assert evaluations[4]["eval/s/version_min"] == 4
        assert evaluations[0]["eval/s/rollouts"] == 8


async def test_the_orchestrator_does_not_outrun_a_slow_trainer(open_run, run_dir, tmp_path):
    """All batches are formed long before the end: it waits for the last step, its checkpoint and its evaluation."""
    config = make_config(tmp_path, max_steps=2, eval={"every_steps": 2, "tasks": 2})
    async with open_run(config) as run, run.trainer(0) as trainer:
        await trainer.train(1)
        await until(lambda: run.pipeline.batches.formed == 2)
        await trainer.train(2, work_s=0.3)
        await asyncio.sleep(0.3)
        assert not run.task.done()
        assert (await trainer.checkpoint(2)).error is None
        await asyncio.wait_for(run.task, 60)
        assert run_dir.eval_rollouts(2).exists()


async def test_a_trainer_that_vanishes_is_missed_at_a_deadline(open_run, run_dir, tmp_path):
    """A batch is ready and no trainer fetches it: the run ends, and the error names the awaited step."""
    config = make_config(tmp_path, trainer_timeout_s=1.0)
    async with open_run(config) as run:
        async with run.trainer(0) as trainer:
            await trainer.train(1)
        async with asyncio.timeout(60):
            [error] = await asyncio.gather(run.task, return_exceptions=True)
        assert isinstance(error, DeadlineError)
        assert "no message from the trainer for 1 s" in str(error)
        assert "train step 2" in str(error)


async def test_an_announced_version_without_weights_ends_the_run(open_run, run_dir, tmp_path):
    """StepDone without a manifest in the store is an error at once, because no node could ever load it."""
    async with open_run(make_config(tmp_path)) as run, run.trainer(0) as trainer:
        await trainer.train(1)
        trainer.publish = lambda version: None
        await trainer.train(2)
        async with asyncio.timeout(60):
            [error] = await asyncio.gather(run.task, return_exceptions=True)
        assert isinstance(error, CheckpointError)
        assert "announced policy version 2" in str(error)


async def test_a_checkpoint_that_cannot_be_written_is_answered_and_the_run_goes_on(open_run, run_dir, tmp_path):
    """The disk refuses: the trainer gets the reason, and training continues without the checkpoint."""
    async with open_run(make_config(tmp_path)) as run, run.trainer(0) as trainer:
        await trainer.train(1)
        run_dir.checkpoint(1).mkdir(parents=True)
        (run_dir.checkpoint(1) / "orchestrator").touch()
        assert "state.json cannot be written" in (await trainer.checkpoint(1)).error
        await trainer.train(2)
        assert (await trainer.checkpoint(2)).error is None
        assert "checkpoint 1 was asked for, the orchestrator stands after step 2" in (await trainer.checkpoint(1)).error


async def test_samples_that_were_not_served_are_refused(open_run, run_dir, tmp_path):
    """A trainer that claims other samples than its batch's has trained something else: it gets an error."""
    async with open_run(make_config(tmp_path)) as run, run.trainer(0) as trainer:
        await trainer.ask(1, 0)
        trainer.publish(1)
        await trainer.done(1, ["g000000-0/0", "stranger"])
        refused = await trainer.receive()
        assert isinstance(refused, StepRefused)
        assert "step 1 trained 2 samples" in refused.error
        await trainer.done(3, [])
        assert "stands after step 0" in (await trainer.receive()).error


async def test_evaluation_only(open_run, tmp_path):
    """run.max_steps = 0 evaluates version 0 without any trainer and ends."""
    config = make_config(tmp_path, max_steps=0, eval={"every_steps": 1, "tasks": 3})
    async with open_run(config) as run:
        await asyncio.wait_for(run.task, 60)
        [line] = [line for line in run.lines() if "eval/s/reward_mean" in line]
        assert line["step"] == 0
        assert line["eval/s/version_max"] == 0


class LoadingPool(ScriptedPool):
    """Workers that are ready when the test says so."""

    players = ()

    def __init__(self) -> None:
        super().__init__()
        self.ready = asyncio.Event()

    async def start(self) -> None:
        await super().start()
        await self.ready.wait()
        self.players = (1,)


async def test_a_starting_run_says_what_is_really_missing(open_run, run_dir, tmp_path):
    """Workers that load and a node that has not come are named; workers that are ready are not."""
    pool = LoadingPool()
    request = StepRequest(run_id=RUN_ID, step=1, rank=0, world_size=1, max_tokens=512)
    no_node = "no inference node has connected yet: it loads its model first (logs/node-*.log)"
    waits = []
    config = make_config(tmp_path)
    async with open_run(config, pool, node=False) as run, PeerTrainer(run_dir, run.step_endpoint) as peer:
        async with asyncio.timeout(20):
            while "0 of 2 groups" not in "".join(waits[-1:]):
                await peer.send(request)
                waits.append((await peer.receive()).waiting_for)
                pool.ready.set()
    assert waits[0] == f"batch 1: the environment workers of s are loading; {no_node}"
    assert all(said.endswith(no_node) for said in waits) and "workers" not in "".join(waits[1:])


async def test_a_batch_that_never_fills_ends_the_run_with_its_reason(open_run, tmp_path):
    """Without a node the run fails at its deadline, and the error names the missing node."""
    config = make_config(tmp_path, batch_timeout_s=1.0)
    async with open_run(config, node=False) as run:
        async with asyncio.timeout(15):
            result = (await asyncio.gather(run.task, return_exceptions=True))[0]
        assert isinstance(result, DeadlineError)
        assert "batch 1: 0 of 2 groups" in str(result)
        assert "no inference node has connected yet" in str(result)


# At the start the store's newest manifest may be of an earlier release; one that the trainer announces may not.
def test_an_old_manifest_is_left_to_the_trainer(tmp_path, caplog):
    run = Pipeline.__new__(Pipeline)  # without a run's parts
    run.store, run.gateway = WeightStore(tmp_path), Mock()
    run.gateway.publish.side_effect = WireError("not a signed message")
    run.store.put_manifest(3, b"old")
    asyncio.run(run._publish(3, required=False))
    assert "weights v3" in caplog.text
    with pytest.raises(WireError):
        asyncio.run(run._publish(3))
