"""Worker processes against a real HTTP peer: dispatch, cancellation, deadlines, crashes, hangs, orphans."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from peer import Peer

from composer_prime.errors import ConfigError, EnvironmentWorkerError
from composer_prime.run.scratch import Scratch
from orchestrator.workers.pool import RolloutFailure, RunRollout, SourceSpec, WorkerPool
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("worker pool")]

START_S = 280.0
"""Importing verifiers takes seconds of CPU: let a busy machine have its time."""


def source(model_path: str, taskset: dict[str, Any] | None = None, turns: int = 1, **spec: Any) -> SourceSpec:
    tasksets = {"train": {"id": "bench_env", **(taskset or {})}}
    harness = {"id": "bench_env", "turns": turns}
    return SourceSpec(name="bench", **{"tasksets": tasksets, "harness": harness, "model_path": model_path} | spec)


def rollout(peer: Peer, rollout_id: str, task_index: int = 0, timeout_s: float = 120.0, **more: Any) -> RunRollout:
    request = {"rollout_id": rollout_id, "task_index": task_index, "timeout_s": timeout_s, **more}
    return RunRollout(**{"model": "policy", "gateway_url": peer.url, "max_tokens": 16} | request)


@asynccontextmanager
async def started(pool: WorkerPool) -> AsyncIterator[WorkerPool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture(scope="module")
def played(model_path: str) -> Iterator[tuple[asyncio.Runner, WorkerPool]]:
    """A pool of two workers, three turns a rollout, that several tests use: starting one takes seconds."""
    tasksets = {
        "train": {"id": "bench_env", "fail_at": 7},
        "eval": {"id": "bench_env", "num_tasks": 3, "prompt": "held"},
    }
    with asyncio.Runner() as runner:
        spec = source(model_path, tasksets=tasksets, turns=3)
        pool = WorkerPool(spec, workers=2, start_timeout_s=START_S)
        runner.run(pool.start())
        yield runner, pool
        runner.run(pool.close())


Played = tuple[asyncio.Runner, WorkerPool]


def test_rollouts_of_two_workers_and_task_sets(played: Played) -> None:
    """Every rollout runs under its given id, on either worker, from either task set, with its own seed."""
    runner, pool = played

    async def scenario() -> None:
        assert (pool.num_tasks(), pool.num_tasks("eval")) == (8, 3)
        async with Peer(delay_s=0.05) as peer:
            requests = [rollout(peer, f"r{i}", i % 7, seed=i, temperature=0.5, top_k=7) for i in range(24)]
            requests.append(rollout(peer, "held-out", 2, taskset="eval"))
            replies = await asyncio.gather(*map(pool.run, requests))
        assert [reply.failure for reply in replies] == [None] * 25
        assert [reply.rollout_id for reply in replies] == [request.rollout_id for request in requests]
        assert {len(peer.sessions[request.rollout_id]) for request in requests} == {3}
        assert [peer.params["r5"][key] for key in ("seed", "temperature", "top_k")] == [5, 0.5, 7]
        assert replies[-1].turns[0].text == "held 2"
        first = replies[0]
        assert (first.reward, first.parts, first.metrics) == (2.0, {"length": 1.0}, {"turns": 3.0})
        assert first.wall_s > 0.15

    runner.run(scenario())


def test_cancelling_stops_the_inference(played: Played) -> None:
    """A cancelled caller closes the rollout's connection to the gateway; another rollout goes on."""
    runner, pool = played

    async def scenario() -> None:
        async with Peer(delay_s=60) as peer:
            calls = [asyncio.create_task(pool.run(rollout(peer, name))) for name in ("first", "second")]
            await until(lambda: peer.running == 2)
            for cancelled, call in enumerate(calls, start=1):
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await until(lambda expected=cancelled: peer.cancelled == expected)
            assert peer.running == 0

    runner.run(scenario())


def test_a_deadline_is_an_error_with_the_turns_so_far(played: Played) -> None:
    """A rollout past timeout_s has an error and no reward, and its request at the gateway is cancelled."""
    runner, pool = played

    async def scenario() -> None:
        async with Peer(hang_after=2) as peer:
            reply = await pool.run(rollout(peer, "r", timeout_s=2.5))
            assert (reply.reward, reply.failure.kind, reply.failure.retryable) == (None, "timeout", True)
            assert "2.5 s" in reply.failure.message
            assert sum(turn.role == "assistant" for turn in reply.turns) == 2
            await until(lambda: peer.running == 0)

    runner.run(scenario())


def test_failures_never_become_a_zero_reward(played: Played) -> None:
    """A reward function that raises, a gateway that refuses or is gone, a prompt too long: each has its kind."""
    runner, pool = played

    async def scenario() -> dict[str, RolloutFailure]:
        replies = []
        async with Peer() as peer:
            replies += [await pool.run(rollout(peer, "task", 7)), await pool.run(rollout(peer, "request", 99))]
        replies.append(await pool.run(rollout(peer, "gone")))
        async with Peer(fail_status=503) as peer:
            replies.append(await pool.run(rollout(peer, "refused")))
        async with Peer(max_model_len=8) as peer:
            replies += [await pool.run(rollout(peer, "overflow"))]
        assert [reply.reward for reply in replies] == [None] * 5
        return {reply.rollout_id: reply.failure for reply in replies}

    failures = runner.run(scenario())
    assert {name: (failure.kind, failure.retryable) for name, failure in failures.items()} == {
        "task": ("task", True),
        "request": ("request", False),
        "gone": ("provider", True),
        "refused": ("provider", True),
        "overflow": ("context_overflow", False),
    }
    assert "the reward function broke" in failures["task"].message
    assert "no inference node is connected" in failures["refused"].message


@pytest.mark.slow
async def test_a_crash_fails_the_rollouts_and_the_worker_comes_back(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts of a crashed worker get a retryable error with its last words. The next one runs on its successor.

    Neither a crash nor `close` leaves a folder. A closed worker has the time to clean up after its rollouts.
    """
    temporary, mark, logs = tmp_path / "temporary", tmp_path / "mark", tmp_path / "logs"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("orchestrator.workers.pool._STOP_GRACE_S", 60.0)
    spec = source(model_path, {"crash_at": 3, "sleep_at": 5, "sleep_s": 600, "mark": str(mark)})
    async with Peer(delay_s=1) as peer, started(WorkerPool(spec, start_timeout_s=START_S, log_dir=logs)) as pool:
        bystander = asyncio.create_task(pool.run(rollout(peer, "bystander")))
        await until(lambda: peer.running == 1)
        crashed = await pool.run(rollout(peer, "crash", 3))
        for reply in (crashed, await bystander):
            assert reply.reward is None
            assert (reply.failure.kind, reply.failure.retryable) == ("worker", True)
            assert "exit status 41" in reply.failure.message
            assert "the engine room is on fire" in reply.failure.detail
        again = await pool.run(rollout(peer, "again"))
        assert again.reward == 2.0
        assert pool.restarts == 1
        playing = asyncio.create_task(pool.run(rollout(peer, "cut short", 5)))
        await until(lambda: mark.exists() and mark.read_text() == "waiting", timeout_s=START_S)
        assert len(list(temporary.iterdir())) == 1
    assert (await playing).failure.kind == "worker"
    assert "the engine room is on fire" in (logs / "worker_bench_0.log").read_text()
    assert mark.read_text() == "cleaned up"
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
async def test_a_silent_worker_is_killed_and_a_pool_gives_up(model_path: str, caplog) -> None:
    """A blocked event loop is named by the line, and killed after hang_timeout_s. Then every `run` raises why."""
    spec = source(model_path, {"hang_at": 0})
    pool = WorkerPool(spec, start_timeout_s=START_S, hang_timeout_s=9, max_restarts=0)
    async with Peer() as peer, started(pool):
        reply = await pool.run(rollout(peer, "hang", 0))
        assert reply.failure.kind == "hang"
        assert "no heartbeat" in reply.failure.message
        assert re.search(r"bench_env\.py:\d+, in setup", reply.failure.message)
        (event,) = [record for record in caplog.records if "bench_env.py" in record.event_where]
        assert event.levelname == "WARNING"
        with pytest.raises(EnvironmentWorkerError, match=r"'bench'.*no heartbeat.*max_restarts = 0"):
            await pool.run(rollout(peer, "next", 1))


@pytest.mark.slow
async def test_an_environment_that_loads_for_long_is_named(model_path: str, tmp_path: Path, caplog) -> None:
    """Where its code stands is said long before start_timeout_s."""
    wait = "    while not Path(__file__).with_name('go').exists():\n        time.sleep(0.1)\n"
    begin = f"import time\nfrom pathlib import Path\ndef waits():\n{wait}waits()\n"
    (tmp_path / "long_load.py").write_text(begin + "from plain_env import PlainTaskset\n__all__ = ['PlainTaskset']\n")
    spec = source(model_path, {"id": "long_load"}, import_from=[str(tmp_path)])
    pool = WorkerPool(spec, start_timeout_s=START_S)
    starting = asyncio.create_task(pool.start())
    where = re.compile(r"\S*long_load\.py:\d, in waits")
    named = lambda: any(where.match(getattr(record, "event_where", None) or "") for record in caplog.records)
    await until(named, timeout_s=START_S)
    (tmp_path / "go").touch()
    await starting
    await pool.close()


@pytest.mark.slow
async def test_an_environment_that_exits_or_forks_is_named(model_path: str, tmp_path: Path) -> None:
    """A forked child that comes back into the loop ends, and its parent goes on; sys.exit is named with its line.

    So is a crash. A worker that lost its connection has the time to write why.
    """
    spec = source(model_path, {"exit_at": 3, "fork_at": 4, "fault_at": 5, "close_at": 6})
    async with Peer() as peer, started(WorkerPool(spec, start_timeout_s=START_S, log_dir=tmp_path)) as pool:
        assert (await pool.run(rollout(peer, "forks", 4))).reward == 2.0
        await until(lambda: "os.fork" in (tmp_path / "worker_bench_0.log").read_text())
        failure = (await pool.run(rollout(peer, "exits", 3))).failure
        assert failure.kind != "worker" and re.fullmatch(r"\S*bench_env\.py:\d+, in setup", failure.where)
        assert pool.restarts == 0
        failure = (await pool.run(rollout(peer, "crashes", 5))).failure
        assert re.search(r"SIGSEGV: \S*bench_env\.py:\d+, in setup", failure.message)
        failure = (await pool.run(rollout(peer, "closes", 6))).failure
        assert "os.closerange" in failure.message  # Whether it ended by itself or took too long.


@pytest.mark.slow
async def test_only_the_task_that_blocks_is_blamed(model_path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its place is said before its worker ends. Other rollouts are displaced; after two workers it is left out."""
    spec = source(model_path, {"hang_at": 0})
    pool = WorkerPool(spec, start_timeout_s=START_S, hang_timeout_s=9, max_restarts=5)
    async with Peer(delay_s=60) as peer, started(pool):
        bystander = asyncio.create_task(pool.run(rollout(peer, "bystander", 1)))
        await until(lambda: peer.running == 1, timeout_s=START_S)
        for name in ("first", "second"):
            hung = (await pool.run(rollout(peer, name, 0))).failure
            assert hung.kind == "hang" and re.fullmatch(r"\S*bench_env\.py:\d+, in setup", hung.where)
            assert any(f"now, at {hung.where}" in text for text in caplog.messages)
            caplog.clear()
            assert (await bystander).failure.kind == "displaced"
        left_out = (await pool.run(rollout(peer, "third", 0))).failure
        assert left_out.kind == "hang" and not left_out.retryable


@pytest.mark.slow
async def test_a_worker_that_breaks_the_protocol_gets_no_rollout(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seconds to end by itself: what comes meanwhile waits for the next worker, and no try of it is lost."""
    async with Peer() as peer, started(WorkerPool(source(model_path), start_timeout_s=START_S)) as pool:
        (worker,) = pool.players
        with monkeypatch.context() as patch:
            patch.setattr("composer_prime.wire.sockets.MAX_FRAME_BYTES", 1)
            await until(lambda: worker._end_reason)
        reply = await pool.run(rollout(peer, "later"))
        assert (reply.failure, reply.reward) == (None, 2.0)


@pytest.mark.slow
def test_a_worker_finds_modules_beside_the_configuration(model_path: str, tmp_path: Path) -> None:
    """A task set in a folder of run.import_from loads like an installed one."""
    (tmp_path / "module_beside.py").write_text("from plain_env import PlainTaskset\n__all__ = ['PlainTaskset']\n")

    async def scenario() -> int | None:
        spec = source(model_path, {"id": "module_beside"}, import_from=[str(tmp_path)])
        async with started(WorkerPool(spec, start_timeout_s=START_S)) as pool:
            return pool.num_tasks()

    assert asyncio.run(scenario()) == 2


@pytest.mark.slow
async def test_what_cannot_start_says_why(model_path: str) -> None:
    """A source that cannot load fails `start` at once with its own error, and leaves no process."""
    pool = WorkerPool(source(model_path, tasksets={"train": {"id": "no_such_env"}}), start_timeout_s=START_S)
    with pytest.raises(ConfigError, match=r"'bench'.*taskset 'no_such_env'.*nstall"):
        await pool.start()
    assert pool.players == []
    with pytest.raises(ConfigError):
        await pool.run(RunRollout(rollout_id="r", task_index=0, model="m", gateway_url="", timeout_s=1))


ORPHANAGE = """
import asyncio, sys
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.pool import SourceSpec

async def main():
    env = {"id": "bench_env"}
    spec = SourceSpec(name="o", tasksets={"train": env}, harness=env, model_path=sys.argv[1])
    pool = WorkerPool(spec, start_timeout_s=280.0)
    await pool.start()
    print(pool.players[0].pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_orchestrator(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the parent leaves no worker behind, and its folder only until the next worker of any run starts."""
    command = [sys.executable, "-c", ORPHANAGE, model_path]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 200
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(worker)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Scratch("worker").close()
    assert list(tmp_path.iterdir()) == []
