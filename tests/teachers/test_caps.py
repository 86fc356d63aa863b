"""Caps of a call, a trace and a run, and endpoints that go over the price: no cap is passed by even one call."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from loopback import (
    ANSWER_TOKENS,
    USD,
    Endpoint,
    configured,
    overrule,
    play,
    replayed,
    serving,
    settled_calls,
    state,
)

from composer_prime.config.teachers import OPENROUTER, TeachersConfig
from composer_prime.llm.budget import OVERCHARGE
from composer_prime.run.costs import spent
from composer_prime.traces.replay.records import read_pairs, read_records, votes_beside
from composer_prime.traces.states import TraceState


# No order of replies passes a cap: what is held for calls in flight counts.
@pytest.mark.parametrize("cap", [0.5, 1.0, 2.7])
def test_the_cap_of_a_run_holds_to_the_cent(tmp_path: Path, cap: float) -> None:
    endpoint = Endpoint(answers=overrule, delay_s=0.02)
    states = [state(number, trace=f"t{number}") for number in range(30)]
    budget = {"usd_per_call": 1.0, "usd_per_trace": 100.0, "usd_per_run": cap}
    progress, _ = play(tmp_path, states, endpoint=endpoint, budget=budget)
    assert progress.stopped is not None and "usd_per_run" in progress.stopped
    assert len(endpoint.answered) * USD <= cap
    assert spent(tmp_path / "costs.jsonl").usd <= cap
    before = len(endpoint.asked)
    # The money of earlier runs counts: a second replay under the same cap makes no call that does not fit.
    play(tmp_path, states, endpoint=endpoint, budget=budget)
    assert spent(tmp_path / "costs.jsonl").usd <= cap
    # With more money it goes on: nothing was lost.
    progress, _ = play(tmp_path, states, endpoint=endpoint, budget={**budget, "usd_per_run": 100.0})
    assert len(list(read_pairs(tmp_path / "pairs.jsonl"))) == 30 and len(endpoint.asked) > before


# A trace that used up its money gives no more pairs; the others go on.
def test_the_cap_of_a_trace(tmp_path: Path) -> None:
    states = [state(number, trace=trace) for trace in ("a", "b") for number in range(6)]
    budget = {"usd_per_call": 1.0, "usd_per_trace": 1.0, "usd_per_run": 100.0}
    progress, _ = play(tmp_path, states, budget=budget, concurrent_states=2)
    total = spent(tmp_path / "costs.jsonl")
    assert progress.stopped is None and set(total.by_trace) == {"a", "b"}
    assert all(0 < usd <= 1.0 for usd in total.by_trace.values())
    assert progress.outcomes["budget"] > 0 and progress.outcomes["overruled"] > 0


# A call for which more is held than the cap of a call is never made; the reason names all that can be changed about it.
def test_the_cap_of_a_call(tmp_path: Path) -> None:
    long = state(0, messages=[{"role": "user", "content": "x" * 1500}], tools=[])
    progress, endpoint = play(tmp_path, [long], budget={"usd_per_call": 1.0})
    assert endpoint.asked == [] and progress.outcomes == {"budget": 1}
    assert not (tmp_path / "costs.jsonl").exists()
    (record,) = read_records(votes_beside(tmp_path / "pairs.jsonl"))
    assert record.reason == (
        "a call to gpt-a needs $1.3220, 2 times its bound of $0.6610, but $1.0000 of teachers.budget.usd_per_call = $1 "
        "is left: raise the cap, or leave this teacher out"
    )
    assert list(progress.without_vote) == [record.reason]


PRICES = {"input_usd_per_mtok": 3.0, "output_usd_per_mtok": 15.0}


def dear(tmp_path: Path, url: str) -> TeachersConfig:
    """Teachers at the price of a frontier model, and the budget that a configuration has by itself."""
    teachers = [{**each.model_dump(), **PRICES} for each in configured(tmp_path, url).teacher]
    return configured(tmp_path, url, teacher=teachers, max_tokens=1024, budget={})


# The default caps leave room for long states: a dollar a call is enough for 300 KB at $3 a million tokens.
def test_a_long_state_fits_below_a_dollar(tmp_path: Path) -> None:
    endpoint = Endpoint(answers=overrule)
    long = state(0, messages=[{"role": "user", "content": "word " * 60_000}])

    async def run():
        async with serving(endpoint):
            return await replayed(tmp_path, dear(tmp_path, endpoint.url), [long])

    assert asyncio.run(run()).outcomes == {"overruled": 1}


# Text of few bytes a token costs more than the bound, which is no overcharge: it stays within what was held.
def test_dense_text_is_no_overcharge(tmp_path: Path) -> None:
    endpoint = Endpoint(answers=overrule, tokens_factor=5.0)  # 500 prompt tokens
    dense = [state(number, messages=[{"role": "user", "content": "x" * 900}], tools=[]) for number in range(3)]

    async def run():
        async with serving(endpoint):
            return await replayed(tmp_path, dear(tmp_path, endpoint.url), dense)

    progress = asyncio.run(run())
    assert progress.stopped is None and progress.states == 3
    assert any(settled["usd"] > 0 for _, settled in settled_calls(tmp_path))


# An endpoint that charges more than the bound, or than its prices, ends the replay at once: what it charged is on the
# record, its answer is kept, and no teacher is asked again, not even one whose call waited for a place.
@pytest.mark.parametrize(
    ("charges", "told"),
    [({"tokens_factor": 50.0}, "bounded by"), ({"billed_usd": 0.15}, "by its prices")],
)
def test_an_endpoint_that_overcharges(tmp_path: Path, charges: dict, told: str) -> None:
    endpoint = Endpoint(answers=overrule, delay_s=0.05, **charges)
    states = [state(number) for number in range(8)]

    async def run():
        async with serving(endpoint):
            teachers = configured(tmp_path, endpoint.url).teacher
            alone = [{**teacher.model_dump(), "max_concurrent": 1} for teacher in teachers]
            return await replayed(tmp_path, configured(tmp_path, endpoint.url, teacher=alone), states)

    progress = asyncio.run(run())
    assert progress.stopped is not None and told in progress.stopped
    assert len(endpoint.asked) == 1 and progress.states == 0
    assert progress.usd == pytest.approx(charges.get("billed_usd", 50 * USD))  # though no state was finished
    total = spent(tmp_path / "costs.jsonl")
    assert total.usd == pytest.approx(charges.get("billed_usd", 50 * USD)) and total.unsettled == 0
    endpoint.tokens_factor, endpoint.billed_usd = 1.0, USD
    # As much is held for the next call, until one is charged as it should be: the cap of a call has to allow it.
    told_again, _ = play(tmp_path, states, endpoint=endpoint)
    dear = "tokens_factor" in charges
    assert any("as it charged last" in reason for reason in told_again.without_vote) == dear
    budget = {"usd_per_call": 10.0, "usd_per_trace": 100.0, "usd_per_run": 1000.0}
    play(tmp_path, states, endpoint=endpoint, budget=budget)
    assert len(list(read_pairs(tmp_path / "pairs.jsonl"))) == 8


# An endpoint that charges too much from the start does so in one call, whatever may be in flight. A repeated replay
# holds what that call cost for the next one: the cap of the run is not passed.
def test_an_overcharge_from_the_start(tmp_path: Path) -> None:
    endpoint = Endpoint(answers=overrule, delay_s=0.1, tokens_factor=50.0)
    budget = {"usd_per_call": 10.0, "usd_per_trace": 100.0, "usd_per_run": 12.0}
    asked = []
    for _ in range(3):
        states = [state(number) for number in range(20)]
        progress, _ = play(tmp_path, states, endpoint=endpoint, concurrent_states=4, budget=budget)
        asked.append(len(endpoint.asked))
    assert asked == [1, 2, 2] and progress.stopped is not None and "usd_per_run" in progress.stopped
    total = spent(tmp_path / "costs.jsonl")
    assert total.usd == pytest.approx(2 * 50 * USD) and total.usd <= 12.0 and total.unsettled == 0


FAIR_CALLS, TOGETHER = 8, 4
MAX_TOKENS = 200
OVER_TOKENS = 64 + MAX_TOKENS
"""What the bound of a call counts beside the bytes of its messages: the chat template's share, and max_tokens."""


@dataclass
class Turning(Endpoint):
    """Keeps to its bound for FAIR_CALLS, then charges `times` the bound of each call, once TOGETHER are in flight."""

    times: float = 2.0
    fair: bool = True
    turned: asyncio.Event = field(default_factory=asyncio.Event)
    together: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0

    async def _reply(self, request: web.Request, fault: str, body: dict) -> web.StreamResponse:
        if not self.fair:
            self.waiting += 1
            if self.waiting == TOGETHER:
                self.together.set()
            await asyncio.wait_for(self.together.wait(), 60)
        reply = await super()._reply(request, fault, body)
        if len(self.answered) == FAIR_CALLS:
            self.fair = False
            self.turned.set()
        return reply

    def _completion(self, body: dict) -> dict:
        completion = super()._completion(body)
        if not self.fair:
            bound = len(msgspec.json.encode([body["messages"], body["tools"]])) // 3 + OVER_TOKENS
            completion["usage"]["prompt_tokens"] = int(self.times * bound) - ANSWER_TOKENS
        return completion

    async def states(self, states: list[TraceState]) -> AsyncIterator[TraceState]:
        """The first states, whose votes are all the fair calls, and then the others."""
        for index, each in enumerate(states):
            if index == FAIR_CALLS // 2:
                await asyncio.wait_for(self.turned.wait(), 60)
            yield each


def longer(short: TraceState) -> TraceState:
    """With a bound that is half as much more."""
    return state(short.step, short.trace_id, messages=[{"role": "user", "content": f"Task {short.step}{'.' * 560}"}])


def tight(tmp_path: Path, url: str, scope: str, bound: float) -> TeachersConfig:
    """One cap that has room for just so much as TOGETHER calls of this bound need that cost twice as much, the others
    wide: on eight calls at once that cost that, or a longer one, it would be passed."""
    wide = {"usd_per_call": 100.0, "usd_per_trace": 100.0, "usd_per_run": 1000.0}
    caps = {
        "usd_per_call": 2.2 * bound,
        "usd_per_trace": FAIR_CALLS / 4 * USD + 2.5 * bound,
        "usd_per_run": FAIR_CALLS * USD + (2 * TOGETHER + 0.5) * bound,
    }
    return configured(tmp_path, url, budget={**wide, scope: caps[scope]}, concurrent_states=16, max_tokens=MAX_TOKENS)


# An endpoint keeps to its bound, and then charges OVERCHARGE times that, more than its tokens can be, for calls that
# are in flight together: none is made after the first such charge was seen, and the caps of run, trace and call hold to
# the cent. Where it charges more than the factor, they are passed by the excess of the calls in flight at the most.
# Once the charge is repaired a resumed replay has every pair, and no answer is paid for twice.
@pytest.mark.parametrize("scope", ["usd_per_run", "usd_per_trace", "usd_per_call"])
@pytest.mark.parametrize("times", [2.0, 6.0])
def test_an_overcharge_with_calls_in_flight(tmp_path: Path, scope: str, times: float) -> None:
    endpoint, states = Turning(answers=overrule, times=times), [state(10 + each, f"t{each % 4}") for each in range(20)]
    if scope == "usd_per_call":
        states[5::3] = [longer(each) for each in states[5::3]]

    async def run() -> tuple[TeachersConfig, list[tuple[dict, dict]]]:
        async with serving(endpoint):
            config = tight(tmp_path, endpoint.url, scope, 0.364)
            progress = await replayed(tmp_path, config, endpoint.states(states))
            assert "bounded by" in (progress.stopped or "")
            calls = settled_calls(tmp_path)
            assert len(endpoint.asked) == len(calls)
            endpoint.fair = True
            roomy = {"usd_per_call": 100.0, "usd_per_trace": 100.0, "usd_per_run": 1000.0}
            again = config.model_copy(update={"budget": type(config.budget)(**roomy)})
            assert (await replayed(tmp_path, again, states)).stopped is None
            return config, calls

    config, calls = asyncio.run(run())
    over = [settled for reserved, settled in calls if settled["usd"] == pytest.approx(times * reserved["bound"])]
    assert len(over) == len(calls) - FAIR_CALLS >= TOGETHER
    excess, charged = defaultdict[str, float](float), defaultdict[str, float](float)
    for reserved, settled in calls:
        beyond = max(settled["usd"] - OVERCHARGE * reserved["bound"], 0.0)
        assert settled["usd"] <= config.budget.usd_per_call + beyond + 1e-9
        for scope in ("run", reserved["trace"]):
            excess[scope] += beyond
            charged[scope] += settled["usd"]
    for scope, usd in charged.items():
        cap = config.budget.usd_per_run if scope == "run" else config.budget.usd_per_trace
        assert usd <= cap + excess[scope] + 1e-9
    assert (excess["run"] < 1e-9) == (times == 2.0)
    assert len(list(read_pairs(tmp_path / "pairs.jsonl"))) == len(states)
    assert len(endpoint.answered) == len(set(endpoint.answered)) == 2 * len(states)


# OpenRouter is told with each request which price is held, so that it asks no dearer provider; other endpoints are not.
# Where no provider is as cheap, the reason names that price and what to correct.
def test_openrouter_is_told_the_price(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=overrule, script={"gpt-a": ["not_found"]})) as endpoint:
            config, addresses = configured(tmp_path, OPENROUTER), {name: endpoint.url for name in ("gpt-a", "qwen-b")}
            progress = await replayed(tmp_path, config, [state(0)], addresses=addresses | {"glm-c": endpoint.url})
            assert progress.pairs == 1
            most = {"prompt": 1010.0, "completion": 1010.0}
            assert [body["provider"] for body in endpoint.seen] == [{"max_price": most}] * 2
            (reason,) = progress.without_vote
            assert "status 404" in reason and "at most $1010 for a million prompt tokens" in reason
            assert "correct input_usd_per_mtok" in reason

    asyncio.run(run())
    progress, endpoint = play(tmp_path / "elsewhere", [state(0)], {"gpt-a": ["not_found"]})
    assert not any("provider" in body for body in endpoint.seen)
    assert not any("only providers" in reason for reason in progress.without_vote)
