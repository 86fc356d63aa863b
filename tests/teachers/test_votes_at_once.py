"""Votes that come in any order, and files that a crash left apart, give the same pairs, each once."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web
from loopback import Endpoint, configured, replayed, serving, state

from composer_prime.traces.replay.command import replay_summary
from composer_prime.traces.replay.records import read_pairs, read_records, votes_beside

MODELS = ("gpt-a", "qwen-b", "glm-c")


class LastFirst(Endpoint):
    """Once every teacher has answered a first question, one after another, the first one's answer comes last."""

    async def _reply(self, request: web.Request, fault: str, body: dict) -> web.StreamResponse:
        question, behind = json.dumps(body["messages"]), MODELS[MODELS.index(body["model"]) + 1 :]
        if {model for model, asked in self.answered if asked != question} == set(MODELS):
            while not {model for model, asked in self.answered if asked == question} >= set(behind):
                await asyncio.sleep(0.01)
        return await super()._reply(request, fault, body)


def said(model: str, messages: list[dict]) -> str:
    return f"All done, says {model}."


# With all votes at once, who answers first decides nothing: pairs and votes are those of the replay from the cache.
def test_the_order_of_answers_does_not_matter(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(LastFirst(answers=said)) as endpoint:
            config = configured(tmp_path, endpoint.url, voting="all", concurrent_states=1)
            await replayed(tmp_path, config, [state(1), state(0)])
            assert [model for model, _ in endpoint.answered[3:]] == list(reversed(MODELS))
            again = await replayed(tmp_path / "again", config, [state(1), state(0)])
            assert again.calls == 0

    asyncio.run(run())
    once, twice = (list(read_pairs(folder / "pairs.jsonl")) for folder in (tmp_path, tmp_path / "again"))
    assert once == twice and once[0].chosen["content"] == "All done, says gpt-a."
    assert [list(pair.teachers["votes"]) for pair in once] == [list(MODELS)] * 2


# A crash before the votes were written, and a teacher that is back since: the pair of the state stays the one it is,
# and the new votes name it.
def test_a_state_has_one_pair_against_a_rejected_form(tmp_path: Path) -> None:
    votes = votes_beside(tmp_path / "pairs.jsonl")

    async def run() -> None:
        async with serving(Endpoint(answers=said, script={"gpt-a": ["401"]})) as endpoint:
            config = configured(tmp_path, endpoint.url, voting="all")
            await replayed(tmp_path, config, [state(0)])
            votes.write_bytes(b"")
            progress = await replayed(tmp_path, config, [state(0)])
            assert (progress.calls, progress.cached) == (1, 2)

    asyncio.run(run())
    (pair,), (record,) = read_pairs(tmp_path / "pairs.jsonl"), read_records(votes)
    assert pair.chosen["content"] == "All done, says qwen-b." and len(record.votes) == 3
    assert record.pairs == [pair.pair_id]


# A state whose votes a cap cut off has no pair yet, though those there are agree: the next replay decides it.
def test_votes_that_a_cap_cut_off_decide_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=said)) as endpoint:
            capped = {"usd_per_call": 1.0, "usd_per_trace": 0.5, "usd_per_run": 100.0}
            config = configured(tmp_path, endpoint.url, voting="all", system_prompt="")
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


# A cap that one vote meets does not hide that the disk refused the answer to another.
def test_a_cap_does_not_hide_a_broken_disk(tmp_path: Path) -> None:
    def break_disk_and_answer(model: str, messages: list[dict]) -> str | tuple[str, dict]:
        with closing(sqlite3.connect(tmp_path / "cache" / "answers.sqlite")) as database:
            database.execute("DROP TABLE IF EXISTS answers")
        return said(model, messages)

    async def run() -> None:
        async with serving(Endpoint(answers=break_disk_and_answer)) as endpoint:
            pool = [each.model_dump() for each in configured(tmp_path, endpoint.url).teacher]
            pool[0] |= {"input_usd_per_mtok": 1e5, "output_usd_per_mtok": 999.0}
            config = configured(tmp_path, endpoint.url, voting="all", teacher=pool)
            await replayed(tmp_path, config, [state(0)])

    with pytest.raises(OSError, match=r"answers\.sqlite"):
        asyncio.run(run())
