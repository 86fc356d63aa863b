"""What nobody expected, in an answer, a state or a file, costs one state at most: never the replay, never the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loopback import Endpoint, call, configured, replayed, run_config, serving, state

from composer_prime.errors import ConfigError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.costs import read_costs
from composer_prime.run.run_dir import RunDir
from composer_prime.traces.replay.online import OnlineReplay
from composer_prime.traces.replay.records import read_pairs, read_records, votes_beside
from composer_prime.traces.states import TraceState, read_states, write_state


def overrule(model: str, messages: list[dict]) -> tuple[str, dict]:
    return "cat", {"path": "a.py"}


def settled(folder: Path) -> list[str]:
    return [line["status"] for line in read_costs(folder / "costs.jsonl") if line["kind"] == "settled"]


# Half a character, which JSON can escape and UTF-8 cannot hold: in arguments and in text it is replaced, the answer is
# kept, and a second replay takes it from the cache.
@pytest.mark.parametrize("said", [("bash", {"command": "echo \ud83d"}), "Done \ud83d"])
def test_half_a_character_in_an_answer(tmp_path: Path, said: str | tuple[str, dict]) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=lambda model, messages: said)) as endpoint:
            config = configured(tmp_path, endpoint.url)
            asked = state(0, tools=[{"function": {"name": "bash"}}])
            first = await replayed(tmp_path, config, [asked])
            again = await replayed(tmp_path / "again", config, [asked])
            assert (first.pairs, first.calls, again.pairs, again.calls) == (1, 2, 1, 0)

    asyncio.run(run())
    (pair,) = read_pairs(tmp_path / "pairs.jsonl")
    assert pair.chosen.get("content") == "Done ?" or json.loads(
        pair.chosen["tool_calls"][0]["function"]["arguments"]
    ) == {"command": "echo ?"}


# The same in a file of states, in the student's arguments; whole characters that are escaped stay as they are.
def test_half_a_character_in_a_state(tmp_path: Path) -> None:
    path, whole = tmp_path / "states.jsonl", json.dumps({"c": "\U0001f600"})
    calls = [call("a", {"c": "x\udc00"}), {"function": {"name": "b", "arguments": whole}}]
    path.write_bytes(write_state(state(0, student_action={"role": "assistant", "tool_calls": calls})))
    (read,) = read_states(path)
    given = [each["function"]["arguments"] for each in read.student_action["tool_calls"]]
    assert given == ['{"c": "x?"}', whole]


# A state whose call is none is told with its line, or counted and left out.
@pytest.mark.parametrize("broken", [{"name": "x"}, {"function": {"name": "x", "arguments": {}}}, "x"])
def test_a_state_whose_call_is_none(tmp_path: Path, broken: object) -> None:
    path, told = tmp_path / "states.jsonl", []
    states = [state(0, student_action={"role": "assistant", "tool_calls": [broken]}), state(1)]
    path.write_bytes(b"".join(map(write_state, states)))
    with pytest.raises(ConfigError, match=r"states\.jsonl:1 is not a state .*`function`|object`.* `composer ingest`"):
        next(read_states(path))
    assert [each.state_id for each in read_states(path, told.append)] == ["t/0001"] and len(told) == 1


# A state that breaks the code fails alone: calls in flight of the others end, are paid once, and give their pairs.
def test_a_state_that_breaks_fails_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = [state(number) for number in range(7)] + [state(7, messages=None)]

    async def run() -> None:
        async with serving(Endpoint(answers=overrule, delay_s=0.1)) as endpoint:
            progress = await replayed(tmp_path, configured(tmp_path, endpoint.url), states)
            assert progress.outcomes == {"failed": 1, "overruled": 7} and progress.pairs == 7
            assert any("TypeError" in reason for reason in progress.without_vote)

    asyncio.run(run())
    assert settled(tmp_path) == ["ok"] * 14
    (failed,) = [each for each in read_records(votes_beside(tmp_path / "pairs.jsonl")) if each.outcome == "failed"]
    assert failed.state == "t/0007" and "TypeError" in (failed.reason or "")
    assert "state t/0007 of trace t failed" in caplog.text and "Traceback" in caplog.text


# States that end in an error while calls are in flight: these end first, and are kept.
def test_an_error_of_the_source_waits_for_the_calls_in_flight(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=overrule, delay_s=0.1)) as endpoint:

            async def states() -> AsyncIterator[TraceState]:
                yield state(0)
                while endpoint.in_flight < 1:
                    await asyncio.sleep(0.01)
                raise ConfigError("states.jsonl:3 is not a state")

            with pytest.raises(ConfigError, match=":3 is not a state"):
                await replayed(tmp_path, configured(tmp_path, endpoint.url), states())
            assert len(endpoint.answered) == 1

    asyncio.run(run())
    assert settled(tmp_path) == ["ok"]


# Whatever breaks the replay beside a run, here a ledger that somebody edited, is told; training goes on.
def test_a_broken_ledger_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir, path = RunDir(tmp_path / "x"), tmp_path / "states.jsonl"
    run_dir.root.mkdir(parents=True)
    path.write_bytes(write_state(state(0)))
    (run_dir.root / "costs.jsonl").write_text('{"kind": "settled"}\n')
    values = run_config(tmp_path, "http://127.0.0.1:9/v1", online=True, states=path)
    asyncio.run(OnlineReplay(values, run_dir, MetricsFile(run_dir.metrics, "test"), lambda: 1).run())
    assert "replay failed, training continues" in caplog.text and "costs.jsonl:1 is not a ledger line" in caplog.text
    assert json.loads(run_dir.metrics.read_text().splitlines()[-1])["replay/failed"] == 1
