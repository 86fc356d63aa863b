"""Which states of a file are replayed, and what that costs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loopback import Endpoint, overrule, run_config, serving, state

from composer_prime.config import Config
from composer_prime.config.teachers import SelectConfig
from composer_prime.traces.replay.replay_console import Arguments, replay, replay_summary
from composer_prime.traces.replay.replay_cost import count_selected, forecast_cost, selected_states
from composer_prime.traces.states import write_state

LONG = [state(number, "a", error="no" if number in (5, 6) else None) for number in range(8)]
SHORT = [state(number, "b") for number in range(2)]


def states_file(tmp_path: Path) -> Path:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"".join(map(write_state, [*LONG, *SHORT])))
    return path


# Errors come first; every trace has its turn, and the file's order stays.
@pytest.mark.parametrize(
    ("select", "taken"),
    [
        ({}, ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "b0", "b1"]),
        ({"states": 2}, ["a5", "b0"]),
        ({"states": 5}, ["a0", "a5", "a6", "b0", "b1"]),
        ({"per_trace": 1}, ["a5", "b0"]),
        ({"per_trace": 4}, ["a0", "a1", "a5", "a6", "b0", "b1"]),
        ({"states": 3, "per_trace": 1}, ["a5", "b0"]),
        ({"states": 99}, ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "b0", "b1"]),
    ],
)
def test_which_states_are_taken(tmp_path: Path, select: dict, taken: list[str]) -> None:
    path, config = states_file(tmp_path), SelectConfig(**select)
    states = selected_states(path, config)
    assert count_selected(path, config) == len(taken)
    assert [f"{each.trace_id}{each.step}" for each in states] == taken


# A replay pays for the selected states alone, and the forecast counts no others. A wider one goes on from there.
def test_a_replay_of_some_states(tmp_path: Path) -> None:
    path, pairs = states_file(tmp_path), tmp_path / "p.jsonl"

    async def run() -> None:
        async with serving(Endpoint(answers=overrule)) as endpoint:
            config = run_config(tmp_path, endpoint.url, select={"states": 2})
            progress, expected = await replay(Arguments(states=path, pairs=pairs, config=config))
            assert progress.states == 2 and expected is not None and expected.states == 2
            wider = run_config(tmp_path, endpoint.url, select={"states": 5})
            progress, _ = await replay(Arguments(states=path, pairs=pairs, config=wider))
            assert (progress.resumed, progress.states) == (2, 3)
            whole = forecast_cost(run_config(tmp_path, endpoint.url), path)
            assert whole is not None and whole.states == 10

    asyncio.run(run())


POOL = {"gpt-a": 1.0, "gpt-b": 2.0, "qwen-c": 3.0, "claude-d": 50.0}
"""USD a million tokens."""


def pool(folder: Path, url: str, **more) -> Config:
    config = run_config(folder, url, models=tuple(POOL), voters=2, **more)
    for teacher in config.teachers.teacher:
        teacher.input_usd_per_mtok = teacher.output_usd_per_mtok = POOL[teacher.name]
    return config


def expected(folder: Path, *families: str, **more) -> tuple[float, float]:
    """(low, high) in USD per million of the tokens that a vote takes, over one state of each family."""
    path = folder / "states.jsonl"
    lines = [write_state(state(0, family=family)) for family in families]
    path.write_bytes(b"".join(lines))
    found = forecast_cost(pool(folder, "http://x/v1", states=path, **more))
    assert found is not None and found.states == len(families)
    prompt = len(lines[0]) // 4
    return found.low_usd * 1e6 / (prompt + 5), found.high_usd * 1e6 / (prompt + 20)


# Low: the cheapest teachers of two families that may judge a state; high: the dearest that may. A state that will be
# refused costs nothing.
@pytest.mark.parametrize(
    ("family", "low", "high"),
    [("glm", 1 + 3, 50 + 3), ("gpt", 3 + 50, 3 + 50), ("anthropic", 1 + 3, 3 + 2), ("unknown", 0, 0)],
)
def test_of_teachers_that_may_judge(tmp_path: Path, family: str, low: float, high: float) -> None:
    assert expected(tmp_path, family) == (pytest.approx(low, rel=0.05), pytest.approx(high, rel=0.05))


# Of a file of several families each state counts with its own; assume_family speaks for those that name none.
def test_of_several_families(tmp_path: Path) -> None:
    found = expected(tmp_path, "claude", "glm", "unknown", assume_family="Claude")
    assert found == (pytest.approx(4 * 3, rel=0.05), pytest.approx(5 + 53 + 5, rel=0.05))


# `composer replay` says what it will probably cost beside the cap before it asks, and after it what it did cost; the
# file of states may be gone by then.
def test_composer_replay_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states, pairs = tmp_path / "s.jsonl", tmp_path / "p.jsonl"
    states.write_bytes(b"".join(write_state(state(number)) for number in range(3)))

    def removing(model: str, messages: list[dict]) -> tuple[str, dict]:
        states.unlink(missing_ok=True)
        return "cat", {"path": "a.py"}

    async def run() -> None:
        async with serving(Endpoint(answers=removing)) as endpoint:
            config = run_config(tmp_path, endpoint.url)
            said = forecast_cost(config, states)
            progress, told = await replay(Arguments(states=states, pairs=pairs, config=config))
            before, after = capsys.readouterr().err, replay_summary(progress, pairs, told)
            assert said is not None
            assert f"cost forecast: {said.text()}; never more than $1000 while no call is charged above" in before
            assert f"cost      $0.6600 paid now, $0.6600 as first asked; the forecast was {said.text()}" in after

    asyncio.run(run())
