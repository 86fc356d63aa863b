"""Votes that come in any order, and files that a crash left apart, give the same pairs, each once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loopback import Endpoint, configured, replayed, serving, state

from composer_prime.traces.replay.records import read_pairs, read_records, votes_beside
from composer_prime.traces.replay.replay_command import replay_summary

MODELS = ("gpt-a", "qwen-b", "glm-c")


def said(model: str, messages: list[dict]) -> str:
    return f"All done, says {model}."


# A crash before the votes were written, and a teacher that is back since: the pair of the state stays the one it is,
# and the new votes name it.
def test_a_state_has_one_pair_against_a_rejected_form(tmp_path: Path) -> None:
    votes = votes_beside(tmp_path / "pairs.jsonl")

    async def run() -> None:
        async with serving(Endpoint(answers=said, script={"gpt-a": ["401"]})) as endpoint:
            config = configured(tmp_path, endpoint.url)
            await replayed(tmp_path, config, [state(0)])
            votes.write_bytes(b"")
            progress = await replayed(tmp_path, config, [state(0)])
            assert (progress.calls, progress.cached) == (1, 1)

    asyncio.run(run())
    (pair,), (record,) = read_pairs(tmp_path / "pairs.jsonl"), read_records(votes)
    assert pair.chosen["content"] == "All done, says qwen-b." and len(record.votes) == 2
    assert record.pairs == [pair.pair_id]


def split(model: str, messages: list[dict]) -> tuple[str, dict]:
    return "cat", {"path": "a" if model == "gpt-a" else "b"}


# A state whose votes a cap cut off has no pair yet: the next replay decides it.
def test_votes_that_a_cap_cut_off_decide_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=split)) as endpoint:
            capped = {"usd_per_call": 1.0, "usd_per_trace": 0.5, "usd_per_run": 100.0}
            config = configured(tmp_path, endpoint.url, system_prompt="")
            for teacher in config.teacher[2:]:
                teacher.output_usd_per_mtok = 10_000.0
            first = await replayed(
                tmp_path, config.model_copy(update={"budget": type(config.budget)(**capped)}), [state(0)]
            )
            assert first.outcomes == {"budget": 1} and (first.calls, first.pairs) == (2, 0)
            assert (await replayed(tmp_path, config, [state(0)])).pairs == 1

    asyncio.run(run())


# Two states of one id: the second is left out, and the summary says which; the very same state again is done already.
@pytest.mark.parametrize("at_once", [1, 8])
def test_two_states_of_one_id(tmp_path: Path, at_once: int) -> None:
    other = state(0, messages=[{"role": "user", "content": "Quite another task."}])

    async def run() -> None:
        async with serving(Endpoint(answers=said)) as endpoint:
            config = configured(tmp_path, endpoint.url, concurrent_states=at_once)
            progress = await replayed(tmp_path, config, [state(0), other, state(0)])
            assert (progress.states, progress.left_out, progress.resumed) == (1, 1, 1)
            assert "trace 't' has another state 't/0000'" in "\n".join(
                replay_summary(progress, tmp_path / "pairs.jsonl")
            )
            later = await replayed(tmp_path, config, [other, state(0)])
            assert (later.states, later.left_out, later.resumed) == (0, 1, 1)

    asyncio.run(run())
