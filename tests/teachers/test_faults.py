"""Endpoints that fail in every way, odd answers and broken states: nothing lost, nothing paid twice."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from loopback import FAULTS, USD, Endpoint, call, configured, overrule, play, replayed, run_config, serving, state

from composer_prime.errors import CapError, ConfigError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.costs import read_costs, spent
from composer_prime.run.run_dir import RunDir
from composer_prime.traces.records import TraceState, read_pairs, read_records, read_states, votes_beside, write_state
from composer_prime.traces.replay.online import OnlineReplay
from composer_prime.traces.replay.replay import FEWEST_CALLS
from composer_prime.traces.replay.teacher_pool import TeacherPool, teacher_budget
from tests.waiting import until


def settled_calls(tmp_path: Path) -> list[tuple[dict, dict]]:
    """(reservation, settlement) of every call: each has been settled, and once."""
    written = list(read_costs(tmp_path / "costs.jsonl"))
    reserved = {line["call"]: line for line in written if line["kind"] == "reserved"}
    settled = [line for line in written if line["kind"] == "settled"]
    assert sorted(line["call"] for line in settled) == sorted(reserved)
    assert spent(tmp_path / "costs.jsonl").usd == pytest.approx(sum(line["usd"] for line in settled))
    return [(reserved[line["call"]], line) for line in settled]


# Each fault is met by a retry, of which the user hears; the state gets its pair, every answer was given once.
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("late", "not_found")])
def test_a_fault_costs_a_retry(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    progress, endpoint = play(tmp_path, [state(0)], {"gpt-a": [fault, fault]})
    assert progress.pairs == 1 and progress.votes.failed == 0
    assert len(endpoint.answered) == len(set(endpoint.answered)) == 2
    assert any("gpt-a" in record.getMessage() for record in caplog.records)
    calls = settled_calls(tmp_path)
    assert len(calls) == len(endpoint.asked) == 4
    assert [settled["usd"] for _, settled in calls if settled["status"] == "ok"] == [pytest.approx(USD)] * 2
    # An error status is free; what may have been charged (a lost reply, a proxy that gave up) at what was held for it.
    free = fault in ("429", "500")
    lost = [(reserved, settled) for reserved, settled in calls if settled["status"] != "ok"]
    assert all(settled["usd"] == (0 if free else reserved["usd"]) for reserved, settled in lost)


# An answer that would come 30 s late is given up at the deadline, counted at what was held, and asked for anew. A busy
# machine may miss the short deadline more often than the endpoint is late; nothing else may differ then.
def test_an_answer_that_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.traces.replay.teacher_pool.MAX_RETRIES", 60)
    progress, endpoint = play(tmp_path, [state(0)], {"gpt-a": ["late", "late"]}, timeout_s=0.5)
    assert progress.pairs == 1 and progress.votes.failed == 0 and len(set(endpoint.answered)) == 2
    calls = settled_calls(tmp_path)
    lost = [(reserved, settled) for reserved, settled in calls if settled["status"] != "ok"]
    assert len(lost) == len(calls) - 2 >= 2
    assert all(settled["status"] == "deadline" and settled["usd"] == reserved["usd"] for reserved, settled in lost)


# A call that found no endpoint costs nothing: a wrong address must not use up the caps.
def test_an_endpoint_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.traces.replay.teacher_pool.MAX_RETRIES", 1)
    config = configured(tmp_path, "http://127.0.0.1:9/v1")
    progress = asyncio.run(replayed(tmp_path, config, [state(0)]))
    assert progress.outcomes == {"failed": 1} and progress.usd == 0
    calls = settled_calls(tmp_path)
    assert len(calls) == 6 and {settled["status"] for _, settled in calls} == {"connection"}


# One whose address takes no connection costs nothing either: connecting is given up before the attempt is.
def test_a_connection_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.traces.replay.teacher_pool.MAX_RETRIES", 0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        config = configured(tmp_path, f"http://127.0.0.1:{full.getsockname()[1]}/v1", timeout_s=0.6)
        progress = asyncio.run(replayed(tmp_path, config, [state(0)]))
    assert progress.outcomes == {"failed": 1} and progress.usd == 0
    assert [settled["status"] for _, settled in settled_calls(tmp_path)] == ["deadline"] * 3


# A call that fails after the replay was stopped says nothing about its teacher: its state stays open, to be asked anew.
async def test_a_fault_after_the_stop(tmp_path: Path) -> None:
    endpoint = Endpoint(answers=overrule, script={"gpt-a": ["half"]})
    async with serving(endpoint):
        config = configured(tmp_path, endpoint.url)
        budget = teacher_budget(config.budget, tmp_path / "costs.jsonl")
        pool = TeacherPool(config, budget)

        def stopping(model: str, messages: list[dict]) -> tuple[str, dict]:
            budget.close("interrupted")
            return overrule(model, messages)

        endpoint.answers = stopping
        with pytest.raises(CapError, match="interrupted"):
            await next(each for each in pool.teachers if each.name == "gpt-a").ask(state(0))
        await pool.close()
    assert len(endpoint.asked) == 1


# A proxy that the environment names is not asked for what is on this machine.
def test_a_proxy_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.traces.replay.teacher_pool.MAX_RETRIES", 0)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    progress, endpoint = play(tmp_path, [state(0)])
    assert progress.pairs == 1 and len(endpoint.asked) == 2


# A teacher that never answers is replaced by the next one; the state is not lost.
def test_a_dead_teacher_is_replaced(tmp_path: Path) -> None:
    faults = ["500", "half", "nothing", "wrong_json", "429"]
    progress, endpoint = play(tmp_path, [state(0)], {"gpt-a": faults})
    assert progress.pairs == 1 and progress.votes.failed == 1
    assert {model for model, _ in endpoint.answered} == {"qwen-b", "glm-c"}
    progress, endpoint = play(tmp_path / "404", [state(0)], {"gpt-a": ["not_found"]})
    assert [model for model, _ in endpoint.asked].count("gpt-a") == 1 and progress.pairs == 1


# What an endpoint says that it charged is the cost, also where that is less than its price list (a cached prompt), and
# with what the provider behind it charges to a key of one's own.
@pytest.mark.parametrize(("byok", "usd"), [(False, 0.02), (True, 0.05)])
def test_what_was_charged(tmp_path: Path, byok: bool, usd: float) -> None:
    progress, _ = play(tmp_path, [state(0)], endpoint=by_key(byok, cost=0.02, upstream=0.03))
    assert progress.pairs == 1 and progress.usd == pytest.approx(2 * usd)


def by_key(byok: bool, *, cost: float, upstream: float) -> Endpoint:
    """Says that it charged `cost`, and the model's provider `upstream`."""

    class Reporting(Endpoint):
        def _completion(self, body: dict) -> dict:
            completion = super()._completion(body)
            completion["usage"] |= {"is_byok": byok, "cost_details": {"upstream_inference_cost": upstream}}
            return completion

    return Reporting(answers=overrule, billed_usd=cost)


# A replay most of whose calls fail stops, says so, and leaves the rest for later.
def test_a_replay_whose_calls_fail_stops(tmp_path: Path) -> None:
    endpoint = Endpoint(answers=overrule, script={"gpt-a": ["not_found"] * 99})
    states = [state(number) for number in range(40)]
    progress, _ = play(tmp_path, states, endpoint=endpoint, concurrent_states=2)
    assert progress.stopped is not None and "calls failed" in progress.stopped
    assert progress.votes.calls >= FEWEST_CALLS and 7 <= progress.states <= 10
    assert [line["reason"] for line in read_costs(tmp_path / "costs.jsonl") if line["kind"] == "stopped"]
    endpoint.script.clear()
    progress, _ = play(tmp_path, states, endpoint=endpoint)
    assert progress.states + progress.resumed == 40


# At most so many calls of a teacher are in flight.
def test_concurrency_is_bounded(tmp_path: Path) -> None:
    endpoint = Endpoint(answers=overrule, delay_s=0.02)
    play(tmp_path, [state(number) for number in range(20)], endpoint=endpoint, concurrent_states=3)
    assert endpoint.most_in_flight <= 3


class Objects(Endpoint):
    """Gives arguments as an object, and text in parts."""

    def _completion(self, body: dict) -> dict:
        completion = super()._completion(body)
        message = completion["choices"][0]["message"]
        message["content"] = [{"type": "text", "text": "Look"}, {"type": "image_url"}, {"type": "text", "text": "ing."}]
        message["tool_calls"][0]["function"]["arguments"] = {"path": "a.py"}
        return completion


# Arguments as an object and content in parts are what their text would be, in one call a teacher.
def test_objects_and_parts(tmp_path: Path) -> None:
    _, endpoint = play(tmp_path, [state(0)], endpoint=Objects(answers=overrule))
    assert len(endpoint.asked) == 2
    (pair,) = read_pairs(tmp_path / "pairs.jsonl")
    assert pair.chosen["tool_calls"][0]["function"]["arguments"] == '{"path": "a.py"}'
    assert pair.chosen["content"] == "Looking."


# An answer that was cut or filtered is no vote, whatever is left of it; it is kept, so that it is not paid again. Where
# it was called for that is a failed call, where it is cached it is no call.
@pytest.mark.parametrize(("reason", "told"), [("length", "was cut"), ("content_filter", "content_filter")])
async def test_an_answer_that_did_not_end_is_no_vote(tmp_path: Path, reason: str, told: str) -> None:
    async with serving(Endpoint(answers=overrule, finish_reason=reason)) as endpoint:
        config = configured(tmp_path, endpoint.url)
        first = await replayed(tmp_path, config, [state(0)])
        again = await replayed(tmp_path / "again", config, [state(0)])
        assert first.outcomes == again.outcomes == {"failed": 1} and told in next(iter(first.votes.without_vote))
        assert (first.votes.calls, first.votes.failed) == (3, 3)
        assert (again.votes.calls, again.votes.failed, len(endpoint.asked)) == (0, 0, 3)


# Half a character, which JSON can escape and UTF-8 cannot hold: in arguments and in text it is replaced, the answer is
# kept, and a second replay takes it from the cache.
@pytest.mark.parametrize("said", [("bash", {"command": "echo \ud83d"}), "Done \ud83d"])
async def test_half_a_character_in_an_answer(tmp_path: Path, said: str | tuple[str, dict]) -> None:
    async with serving(Endpoint(answers=lambda model, messages: said)) as endpoint:
        config = configured(tmp_path, endpoint.url)
        asked = state(0, tools=[{"function": {"name": "bash"}}])
        first = await replayed(tmp_path, config, [asked])
        again = await replayed(tmp_path / "again", config, [asked])
        assert (first.pairs, first.votes.calls, again.pairs, again.votes.calls) == (1, 2, 1, 0)
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


# A state whose call is none is told with its line.
@pytest.mark.parametrize("broken", [{"name": "x"}, {"function": {"name": "x", "arguments": {}}}, "x"])
def test_a_state_whose_call_is_none(tmp_path: Path, broken: object) -> None:
    path = tmp_path / "states.jsonl"
    states = [state(0, student_action={"role": "assistant", "tool_calls": [broken]}), state(1)]
    path.write_bytes(b"".join(map(write_state, states)))
    with pytest.raises(ConfigError, match=r"states\.jsonl:1 is not a state .*`function`|object`.* `composer ingest`"):
        next(read_states(path))


# A state that breaks the code fails alone: calls in flight of the others end, are paid once, and give their pairs.
def test_a_state_that_breaks_fails_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = [state(number) for number in range(7)] + [state(7, messages=None)]
    progress, _ = play(tmp_path, states, endpoint=Endpoint(answers=overrule, delay_s=0.1))
    assert progress.outcomes == {"failed": 1, "overruled": 7} and progress.pairs == 7
    assert any("TypeError" in reason for reason in progress.votes.without_vote)
    assert [settled["status"] for _, settled in settled_calls(tmp_path)] == ["ok"] * 14
    (failed,) = [each for each in read_records(votes_beside(tmp_path / "pairs.jsonl")) if each.outcome == "failed"]
    assert failed.state == "t/0007" and "TypeError" in (failed.reason or "")
    assert "state t/0007 of trace t failed" in caplog.text and "Traceback" in caplog.text


# States that end in an error while calls are in flight: these end first, and are kept.
async def test_an_error_of_the_source_waits_for_the_calls_in_flight(tmp_path: Path) -> None:
    async with serving(Endpoint(answers=overrule, delay_s=0.1)) as endpoint:

        async def states() -> AsyncIterator[TraceState]:
            yield state(0)
            await until(lambda: endpoint.in_flight)
            raise ConfigError("states.jsonl:3 is not a state")

        with pytest.raises(ConfigError, match=":3 is not a state"):
            await replayed(tmp_path, configured(tmp_path, endpoint.url), states())
        assert len(endpoint.answered) == 1
    assert [settled["status"] for _, settled in settled_calls(tmp_path)] == ["ok"]


# Whatever breaks the replay beside a run, here a ledger that somebody edited, is told; training goes on.
def test_a_broken_ledger_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = RunDir(tmp_path / "x")
    run_dir.root.mkdir(parents=True)
    (run_dir.root / "costs.jsonl").write_text('{"kind": "settled"}\n')
    values = run_config(tmp_path, "http://127.0.0.1:9/v1", online=True)
    asyncio.run(OnlineReplay(values, run_dir, MetricsFile(run_dir.metrics, "test"), lambda: 1).run())
    assert "replay failed, training continues" in caplog.text and "costs.jsonl:1 is not a ledger line" in caplog.text
    assert json.loads(run_dir.metrics.read_text().splitlines()[-1])["replay/failed"] == 1
