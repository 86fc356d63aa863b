"""kill -9 of the orchestrator in mid-run, then a resume: every trained sample is trained exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from orch_peers import MODEL, RUN_ID, PeerTrainer, RunNode, ScriptedPool, draw, make_config, sample_ids

from composer_prime.config import load
from composer_prime.run import ledger
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir
from composer_prime.wire.types import StepReply, ints
from orchestrator import pipeline
from orchestrator.durability import Finished, Journal


async def serve(root: Path) -> None:
    """Run an orchestrator in a process of its own, to be killed. It reads config.json."""
    run_dir = RunDir(root)
    pool = ScriptedPool(played=root / "played.txt")
    pool.pause_s = lambda request: 0.4 * draw(request.rollout_id)
    config = load.read_config(run_dir.config)
    pipeline.worker_pools = lambda *_: {source.name: pool for source in config.orchestrator.source}
    await pipeline.Pipeline(config, run_dir, RUN_ID, MODEL).run()


def tokens_by_sample(replies: list[StepReply]) -> dict[str, list[int]]:
    found = {}
    for reply in replies:
        for batch in reply.micro_batches:
            start = 0
            for sample_id, length in zip(batch.sample_ids, batch.lengths, strict=False):
                found[sample_id] = ints(batch.input_ids)[start : start + length].tolist()
                start += length
    return found


@asynccontextmanager
async def orchestrator(
    run_dir: RunDir, tmp_path: Path, *, resume: bool, max_steps: int
) -> AsyncIterator[tuple[subprocess.Popen, Any]]:
    """Start an orchestrator, and a node beside it."""
    run_dir.endpoints.unlink(missing_ok=True)
    run_dir.config.write_text(load.dump(make_config(tmp_path, max_steps=max_steps, resume=resume, max_staleness=2)))
    process = subprocess.Popen([sys.executable, __file__, str(run_dir.root)])
    try:
        async with asyncio.timeout(60):
            while not run_dir.endpoints.exists():
                assert process.poll() is None
                await asyncio.sleep(0.02)
        endpoints = json.loads(run_dir.endpoints.read_text())
        async with RunNode(endpoints["node"], RunKeys(run_dir.keys), swap_s=0.05, delay_s=0.01) as node:
            yield process, node
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def trainer(run_dir: RunDir, step: int) -> AsyncIterator[PeerTrainer]:
    endpoint = json.loads(run_dir.endpoints.read_text())["step"]
    async with PeerTrainer(run_dir, endpoint, max_staleness=2) as peer:
        if step:
            ledger.append_rewind(run_dir.ledger, step)
        await peer.attach(step)
        yield peer


@pytest.mark.slow
async def test_a_killed_orchestrator_loses_and_repeats_nothing(run_dir, tmp_path):
    """Killed after step 5 with a checkpoint at 2, and again later: batches come back as they were, groups too.

    Groups that were finished are not played again; those in flight are played with the same task and seeds.
    """
    async with (
        orchestrator(run_dir, tmp_path, resume=False, max_steps=9) as (process, node),
        trainer(run_dir, 0) as first,
    ):
        for step in (1, 2):
            await first.train(step)
        await first.checkpoint(2)
        for step in (3, 4):
            await first.train(step)
        await first.fetch(5)
        node.delay_s, answered = 3600.0, set(node.running)
        await first.finish(5)
        async with asyncio.timeout(100):
            while not node.running - answered:  # A rollout of a later step is in flight.
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = [line.split() for line in (run_dir.root / "played.txt").read_text().splitlines()]
    entries = list(Journal(run_dir.journal))
    finished = {entry.group.plan.group_id for entry in entries if isinstance(entry, Finished)}

    async with orchestrator(run_dir, tmp_path, resume=True, max_steps=9) as (process, _), trainer(run_dir, 2) as second:
        for step in (3, 4, 5, 6):
            await second.train(step)
        for step in (3, 4, 5):
            assert tokens_by_sample(second.steps[step]) == tokens_by_sample(first.steps[step])
            assert second.steps[step][0].metrics == first.steps[step][0].metrics
        await second.checkpoint(6)
        await second.train(7)
        process.send_signal(signal.SIGKILL)
        process.wait()

    # A checkpoint without its marker is none, however new it is.
    (run_dir.checkpoint(8) / "orchestrator").mkdir(parents=True)
    async with orchestrator(run_dir, tmp_path, resume=True, max_steps=9) as (process, _), trainer(run_dir, 6) as third:
        for step in (7, 8, 9):
            await third.train(step)
        assert tokens_by_sample(third.steps[7]) == tokens_by_sample(second.steps[7])
        assert (await third.checkpoint(9)).error is None
        assert await asyncio.to_thread(process.wait, 10) == 0

    assert ledger.check_ledger(run_dir.ledger) == []
    assert sorted(ledger.effective(run_dir.ledger)) == list(range(1, 10))
    after = [line.split() for line in (run_dir.root / "played.txt").read_text().splitlines()][len(before) :]
    assert not {rollout_id.split("-")[0] for rollout_id, _, _ in after} & finished
    known = {rollout_id: rest for rollout_id, *rest in before}
    again = [(rollout_id, rest) for rollout_id, *rest in after if rollout_id in known]
    assert again
    assert all(known[rollout_id] == rest for rollout_id, rest in again)


async def test_a_trainer_that_restarts_alone_gets_its_batches_again(open_run, run_dir, tmp_path):
    """The trainer falls back to its checkpoint while the orchestrator lives on: the same batches are served again."""
    config = make_config(tmp_path, max_steps=6)
    async with open_run(config) as run:
        async with PeerTrainer(run_dir, run.step_endpoint) as first:
            await first.attach(0)
            await first.train(1)
            await first.checkpoint(1)
            for step in (2, 3):
                await first.train(step)
        async with PeerTrainer(run_dir, run.step_endpoint, world_size=2) as second:
            early = asyncio.create_task(second.ask(2, 1))
            await asyncio.sleep(0.2)
            ledger.append_rewind(run_dir.ledger, 1)
            await second.attach(1)
            assert (await early).step == 2
            for step in range(2, 7):
                await second.train(step)
            for step in (2, 3):
                assert tokens_by_sample(second.steps[step]) == tokens_by_sample(first.steps[step])
            await second.checkpoint(6)
            async with asyncio.timeout(60):
                await run.task
    assert ledger.check_ledger(run_dir.ledger) == []


@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_trainer_that_restarts_alone_is_not_served_what_made_a_step_not_finite(
    open_run, run_dir, tmp_path, is_reported
):
    """Step 2 named a sample before the trainer ended, with or without its StepDone: its batch comes without it."""
    async with open_run(make_config(tmp_path, max_steps=6)) as run:
        async with PeerTrainer(run_dir, run.step_endpoint) as first:
            await first.attach(0)
            await first.train(1)
            await first.checkpoint(1)
            served = sample_ids([await first.ask(2, 0)])
            blamed = sorted(served)[0]
            ledger.append_step(run_dir.ledger, 2, [], [blamed])
            if is_reported:
                first.publish(2)
                await first.done(2, sorted(served))
                await first.ask(3, 0)
        async with PeerTrainer(run_dir, run.step_endpoint) as second:
            ledger.append_rewind(run_dir.ledger, 1)
            await second.attach(1)
            assert set(sample_ids(await second.train(2))) == set(served) - {blamed}
            await second.train(3)
    assert ledger.check_ledger(run_dir.ledger) == []


async def run_until_killed(run_dir: RunDir, tmp_path: Path, life_s: float | None, max_steps: int) -> bool:
    """One life of orchestrator and trainer, as the launcher starts them; True when the run came to its end."""
    steps = run_dir.complete_checkpoints()
    start = steps[-1] if steps else 0
    if not start:
        for name in ("journal", "checkpoints", "weights", "rollouts", "ledger.jsonl"):
            path = run_dir.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    async def train(process: subprocess.Popen) -> None:
        async with trainer(run_dir, start) as peer:
            for step in range(start + 1, max_steps + 1):
                await peer.train(step, work_s=0.02)
                if step % 3 == 0 or step == max_steps:
                    await peer.checkpoint(step)
                    for old in run_dir.complete_checkpoints()[:-2]:
                        shutil.rmtree(run_dir.checkpoint(old))
        assert await asyncio.to_thread(process.wait, 10) == 0

    async with orchestrator(run_dir, tmp_path, resume=start > 0, max_steps=max_steps) as (process, _):
        work = asyncio.create_task(train(process))
        await asyncio.wait({work}, timeout=life_s)
        if work.done():
            work.result()
            return True
        process.kill()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return False


@pytest.mark.slow
async def test_any_number_of_crashes_at_any_moment_leaves_a_clean_ledger(run_dir, tmp_path):
    """Twelve kills at random moments, in between checkpoints that come and go: each sample is trained once."""
    moments, ended = random.Random(5), False
    for _ in range(12):
        ended = ended or await run_until_killed(run_dir, tmp_path, moments.uniform(0.2, 2.0), 60)
    assert ended or await run_until_killed(run_dir, tmp_path, None, 60)
    assert ledger.check_ledger(run_dir.ledger) == []
    assert sorted(ledger.effective(run_dir.ledger)) == list(range(1, 61))
    assert len(list(run_dir.journal.iterdir())) <= 6


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
