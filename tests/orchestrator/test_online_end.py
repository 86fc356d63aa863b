"""The end of a run that asks teachers while it trains: what was asked may be charged, so it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from orch_peers import make_config

from composer_prime.config import Config
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.costs import read_costs
from composer_prime.traces.records import TraceState, read_pairs
from composer_prime.traces.replay.online import OnlineReplay
from tests.teachers.loopback import Endpoint, configured, serving, state
from tests.waiting import until


def overrule(model: str, messages: list[dict]) -> tuple[str, dict]:
    return "cat", {"path": "a.py"}


async def three_states(self: OnlineReplay) -> AsyncIterator[TraceState]:
    for number in range(3):
        yield state(number)


def config_of(tmp_path: Path, url: str) -> Config:
    """A run of one step that asks teachers about two states at a time."""
    config = make_config(tmp_path, max_steps=1)
    config.teachers = configured(tmp_path, url, online=True, concurrent_states=2)
    return config


# All steps are trained, or Ctrl-C comes, while two calls are in flight: both are answered, paid for once and kept, no
# other is made; the log of waits says so; the next replay of the same run asks only what was never asked.
@pytest.mark.parametrize("interrupted", [False, True])
async def test_answers_in_flight_are_kept(open_run, run_dir, tmp_path, monkeypatch, interrupted: bool) -> None:
    monkeypatch.setenv("LOOPBACK_KEY", "made-up")
    monkeypatch.setattr(OnlineReplay, "_states", three_states)
    hold = asyncio.Event()
    hold.set()

    def holding(model: str, messages: list[dict]) -> tuple[str, dict]:
        """Until its first answer a teacher is called alone: from then on nobody is answered."""
        hold.clear()
        endpoint.answers = overrule
        return overrule(model, messages)

    async with serving(Endpoint(answers=holding, hold=hold)) as endpoint:
        config = config_of(tmp_path, endpoint.url)
        async with open_run(config) as run, run.trainer(0) as trainer:
            async with asyncio.timeout(60):
                await until(lambda: endpoint.in_flight == 2)
                if interrupted:
                    run.task.cancel()
                else:
                    await trainer.train(1)
                    assert (await trainer.checkpoint(1)).error is None
                await until(run.pipeline.replay.waiting_for)
                _, waiting = await asyncio.wait({run.task}, timeout=0.5)
                assert waiting and endpoint.in_flight == 2
                hold.set()
                await asyncio.gather(run.task, return_exceptions=True)
            assert interrupted == run.task.cancelled()
            said = [line["waiting_for"] for line in run.lines() if line.get("waiting_for")]
            assert interrupted or said[-1].startswith("answers of teachers that may charge: 2 calls in flight")
        assert len(endpoint.answered) == 3
        await asyncio.wait_for(OnlineReplay(config, run_dir, MetricsFile(run_dir.metrics, "test"), lambda: 1).run(), 60)
    assert len(endpoint.asked) == len(set(endpoint.answered)) == 6
    lines = list(read_costs(run_dir.root / "costs.jsonl"))
    assert [line["status"] for line in lines if line["kind"] == "settled"] == ["ok"] * 6
    assert len(list(read_pairs(run_dir.root / "pairs.jsonl"))) == 3
