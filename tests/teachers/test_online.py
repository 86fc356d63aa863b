"""Replay beside training: it follows the run's rollouts, and its end is never the run's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from loopback import Endpoint, overrule, run_config, serving, state

from composer_prime.config.teachers import MODELS_VARIABLE
from composer_prime.errors import ConfigError, DeadlineError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.costs import read_costs
from composer_prime.run.run_dir import RunDir
from composer_prime.traces.records import TraceState, read_pairs, votes_beside
from composer_prime.traces.replay import teacher_pool
from composer_prime.traces.replay.online import OnlineReplay
from composer_prime.traces.replay.replay import open_replay
from composer_prime.traces.replay.teacher_pool import models_at
from tests.chat_server import http_server
from tests.waiting import until


def rollout(number: int) -> bytes:
    turns = [
        {"role": "user", "text": f"Task {number}.", "parent": None},
        {"role": "assistant", "text": "", "parent": 0, "tool_calls": [{"name": "ls", "arguments": "{}"}]},
    ]
    tools = [{"function": {"name": name}} for name in ("ls", "cat")]
    return json.dumps({"rollout_id": f"g{number}", "task_id": "t", "turns": turns, "tools": tools}).encode() + b"\n"


def started(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "x")
    run_dir.rollouts(1).parent.mkdir(parents=True)
    return run_dir


# Rollouts that appear while it runs are replayed, each once; training reads the pairs from the run directory.
async def test_rollouts_are_replayed_as_they_appear(tmp_path: Path) -> None:
    run_dir = started(tmp_path)
    async with serving(Endpoint(answers=overrule)) as endpoint:
        online = OnlineReplay(
            run_config(tmp_path, endpoint.url, online=True), run_dir, MetricsFile(run_dir.metrics, "test"), lambda: 1
        )
        run_dir.rollouts(1).write_bytes(rollout(0) + rollout(1))
        task = asyncio.create_task(online.run())
        await until(lambda: len(list(read_pairs(run_dir.root / "pairs.jsonl"))) == 2)
        run_dir.rollouts(2).write_bytes(rollout(1) + rollout(2))
        await until(lambda: len(list(read_pairs(run_dir.root / "pairs.jsonl"))) == 3)
        await asyncio.sleep(0.5)  # the file is ahead of the count
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(endpoint.asked) == 6
    logged = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    assert logged[-1]["replay/pairs"] == 3 and logged[-1]["replay/usd"] > 0


# What a tool printed is masked before a remote teacher sees it; where every teacher is local it leaves nothing.
@pytest.mark.parametrize("local", [False, True])
async def test_secrets_do_not_reach_remote_teachers(tmp_path: Path, local: bool) -> None:
    run_dir = started(tmp_path)
    token = "ghp_" + "a1B2c3D4e5" * 3 + "F6g7H8"
    run_dir.rollouts(1).write_bytes(rollout(0).replace(b"Task 0.", token.encode()))
    values = run_config(tmp_path, "http://127.0.0.1:9/v1", online=True)
    for teacher in values.teachers.teacher:
        teacher.local = local
    online = OnlineReplay(values, run_dir, MetricsFile(run_dir.metrics, "test"), lambda: 1)
    first = await asyncio.wait_for(anext(online._states()), 20)
    assert first.messages[0]["content"] == (token if local else "<masked:github-token>")


async def online_over(run_dir: RunDir, endpoint: Endpoint, **settings: object) -> None:
    async with serving(endpoint):
        values = run_config(run_dir.root.parent, endpoint.url, online=True, **settings)
        online = OnlineReplay(values, run_dir, MetricsFile(run_dir.metrics, "test"), lambda: 1)
        await asyncio.wait_for(online.run(), 100)


# A cap that is reached ends the replay, not the run: the coroutine returns and says so.
def test_a_cap_ends_the_replay_only(tmp_path: Path) -> None:
    run_dir = started(tmp_path)
    run_dir.rollouts(1).write_bytes(b"".join(rollout(number) for number in range(9)))
    asyncio.run(online_over(run_dir, Endpoint(answers=overrule), budget={"usd_per_run": 0.9}))
    assert json.loads(run_dir.metrics.read_text().splitlines()[-1])["replay/stopped"] == 1


# A disk that refuses the pairs ends the replay before a teacher is asked, not the run: what is there is trained on.
def test_pairs_that_cannot_be_written_end_the_replay_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = started(tmp_path)
    run_dir.rollouts(1).write_bytes(rollout(0))
    (run_dir.root / "pairs.jsonl").symlink_to(tmp_path / "unmounted" / "pairs.jsonl")
    endpoint = Endpoint(answers=overrule)
    asyncio.run(online_over(run_dir, endpoint))
    assert endpoint.asked == []
    assert "replay failed, training continues: pairs cannot be written to" in caplog.text
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    assert lines[-1]["replay/failed"] == 1


async def one_state(self: OnlineReplay) -> AsyncIterator[TraceState]:
    yield state(0)


# The end of the run does not wait for ever: a call that is given up counts at what was held for it, and a resume makes
# it again.
async def test_the_end_does_not_wait_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    run_dir = RunDir(tmp_path / "x")
    run_dir.root.mkdir(parents=True)
    monkeypatch.setattr(OnlineReplay, "_states", one_state)

    def online(url: str) -> OnlineReplay:
        values = run_config(tmp_path, url, online=True)
        return OnlineReplay(values, run_dir, MetricsFile(run_dir.metrics, "test"), lambda: 1)

    async with serving(Endpoint(answers=overrule, hold=asyncio.Event())) as endpoint:
        first = online(endpoint.url)
        task = asyncio.create_task(first.run())
        await until(lambda: endpoint.in_flight == 1)
        first._config.teachers.timeout_s = 0.2
        first.stop()
        assert (first.waiting_for() or "").startswith("answers of teachers that may charge: 1 call in flight")
        await asyncio.wait_for(first.end(), 100)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert endpoint.answered == []
        endpoint.hold = None
        await asyncio.wait_for(online(endpoint.url).run(), 60)
        assert len(endpoint.answered) == 2
    assert "1 call in flight, counted at their reservation" in caplog.text
    settled = [line for line in read_costs(run_dir.root / "costs.jsonl") if line["kind"] == "settled"]
    assert [line["status"] for line in settled] == ["cancelled", "ok", "ok"] and settled[0]["usd"] > 0.02
    assert len(list(read_pairs(run_dir.root / "pairs.jsonl"))) == 1


# Two replays of one file would each count its own money: the second is refused while the first runs, and not after it.
async def test_one_replay_of_a_file_at_a_time(tmp_path: Path) -> None:
    pairs, values = tmp_path / "pairs.jsonl", run_config(tmp_path, "http://127.0.0.1:9/v1")
    places = {"pairs": pairs, "votes": votes_beside(pairs), "costs": tmp_path / "costs.jsonl"}
    async with open_replay(values, **places):
        with pytest.raises(ConfigError, match="another replay writes"):
            async with open_replay(values, **places):
                pass
    async with open_replay(values, **places):
        pass


# Where the launcher serves the models, replay waits for all of them, and says what it waited for and what was there.
async def test_models_that_the_launcher_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["tiny"]

    async def models(request: web.Request) -> web.Response:
        names.append("tiny/teacher_a")
        return web.json_response({"data": [{"id": name} for name in names[:-1]]})

    async with http_server(web.get("/v1/models", models)) as root:
        url = f"{root}/v1"
        monkeypatch.setenv(MODELS_VARIABLE, url)
        async with models_at(["tiny", "tiny/teacher_a"], ()) as found:
            assert found == url and len(names) > 2
        monkeypatch.setattr(teacher_pool, "START_TIMEOUT_S", 1)
        with pytest.raises(DeadlineError, match=r"tiny/teacher_b at .*, and it serves tiny"):
            async with models_at(["tiny/teacher_b"], ()):
                pass


# A policy whose family nobody knows cannot be judged: the configuration is refused before anything starts.
def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set teachers\.assume_family"):
        run_config(tmp_path, "http://x/v1", path=str(tmp_path / "mine"), online=True)
    assert run_config(tmp_path, "http://x/v1", path=str(tmp_path / "mine"), online=True, assume_family="qwen")
