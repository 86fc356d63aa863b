"""Traces on which nobody was asked hide neither from the kill switch nor from the gate what the others cost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loopback import USD, Endpoint, configured, overrule, play, replayed, serving, state

from composer_prime.traces.replay.density import Density, measure, report_lines
from composer_prime.traces.replay.records import read_pairs, read_records, votes_beside

KILL = {"mean_usd_per_trace": 2.5 * USD, "error_rate": 1.0, "min_states": 3}
"""Two calls a trace, as one state takes; a dear trace has two states."""
DEAR = [state(number, trace=f"dear{trace}") for trace in range(5) for number in range(2)]


def refused(traces: int) -> list:
    return [state(0, trace=f"refused{trace}", family="unknown") for trace in range(traces)]


def density(folder: Path) -> Density:
    pairs = folder / "pairs.jsonl"
    return measure(list(read_records(votes_beside(pairs))), list(read_pairs(pairs)), None)


# However many traces are refused before, the switch stops the dear ones after as many states, also once it is resumed.
def test_refused_traces_do_not_hide_what_others_cost(tmp_path: Path) -> None:
    alone, _ = play(tmp_path / "alone", DEAR, kill=KILL, concurrent_states=1)
    assert "mean_usd_per_trace" in (alone.stopped or "") and alone.outcomes == {"overruled": 3}
    states = [*refused(20), *DEAR]
    mixed, endpoint = play(tmp_path, states, kill=KILL, concurrent_states=1)
    assert mixed.stopped == alone.stopped and mixed.outcomes == {"refused": 20, "overruled": 3}
    again, _ = play(tmp_path, states, kill=KILL, concurrent_states=1, endpoint=endpoint)
    assert again.calls == 0 and again.stopped == alone.stopped


# Nor do traces whose votes all come from the cache, for nothing.
def test_cached_traces_do_not_hide_what_others_cost(tmp_path: Path) -> None:
    cheap = [state(0, trace=f"cheap{trace}") for trace in range(20)]

    async def run() -> None:
        async with serving(Endpoint(answers=overrule)) as endpoint:
            config = configured(tmp_path, endpoint.url, kill=KILL, concurrent_states=1)
            assert (await replayed(tmp_path / "before", config, cheap)).stopped is None
            progress = await replayed(tmp_path, config, [*cheap, *DEAR])
            assert progress.cached == 40 and progress.calls == 6
            assert "mean_usd_per_trace" in (progress.stopped or "")

    asyncio.run(run())


# A state that breaks before any call tells of errors, not of cost and time.
def test_states_that_break_unasked_do_not_hide_the_cost(tmp_path: Path) -> None:
    broken = [state(0, trace=f"broken{trace}", messages=[{"content": "of nobody"}]) for trace in range(20)]
    progress, _ = play(tmp_path, [*broken, *DEAR], kill=KILL, concurrent_states=1)
    assert progress.outcomes == {"failed": 20, "overruled": 2} and "mean_usd_per_trace" in (progress.stopped or "")


# The gate divides dollars by the traces that were asked about, and pairs by those that somebody could judge: leaving
# out votes makes no pairs denser, refusing traces makes none thinner.
def test_what_the_gate_divides_by(tmp_path: Path) -> None:
    poor = {"usd_per_call": 1.0, "usd_per_trace": 0.1, "usd_per_run": 1000.0}
    play(tmp_path, [state(0, trace="poor")], budget=poor)
    play(tmp_path, [*refused(6), *DEAR])
    found = density(tmp_path)
    assert (found.traces, found.judged_traces, found.asked_traces) == (12, 6, 5)
    assert found.usd_a_trace == pytest.approx(4 * USD) and found.pairs_a_trace == pytest.approx(10 / 6)
    assert "over the 6 traces that were not refused, cost over the 5" in "\n".join(report_lines(found))


# An answer from the cache counts as asked, at its first price; so does one that was cut short and gives no vote.
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_cached_answers_are_asked(tmp_path: Path, finish_reason: str) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=overrule, finish_reason=finish_reason)) as endpoint:
            config = configured(tmp_path, endpoint.url)
            await replayed(tmp_path / "before", config, DEAR)
            await replayed(tmp_path, config, DEAR)

    asyncio.run(run())
    once, twice = density(tmp_path / "before"), density(tmp_path)
    assert twice.asked_traces == once.asked_traces == 5
    assert twice.usd_a_trace == pytest.approx(once.usd_a_trace) and twice.paid_usd == 0
