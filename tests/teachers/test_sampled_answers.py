"""teachers.samples: several answers of each teacher, over which its vote is split."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from loopback import USD, Endpoint, configured, play, replayed, serving, settled_calls, state
from pydantic import ValidationError

from composer_prime.llm.cache import Question
from composer_prime.traces.replay.density import measure
from composer_prime.traces.replay.records import read_pairs, read_records, votes_beside

DRAWN = {"gpt-a": "xxxy", "qwen-b": "xxxx", "glm-c": "yyyy"}
SAMPLED = {"samples": 4, "temperature": 1.0}


class Drawing:
    """Each model's answers in the order of DRAWN, for each question."""

    def __init__(self) -> None:
        self.drawn = Counter[tuple[str, str]]()

    def __call__(self, model: str, messages: list[dict]) -> tuple[str, dict]:
        place = model, messages[-1]["content"]
        letter = DRAWN[model][self.drawn[place] % 4]
        self.drawn[place] += 1
        return "cat", {"path": f"{letter}.py"}


# Shares decide as whole votes do: 3/4 and 1 of three votes overrule the student, and the third teacher is not asked.
# Each answer is a call that is paid for, and a record with its share.
def test_a_vote_is_split_over_answers(tmp_path: Path) -> None:
    progress, endpoint = play(tmp_path, [state(0)], endpoint=Endpoint(answers=Drawing()), **SAMPLED)
    assert progress.outcomes == {"overruled": 1} and Counter(model for model, _ in endpoint.answered) == {
        "gpt-a": 4,
        "qwen-b": 4,
    }
    (record,), (pair,) = read_records(votes_beside(tmp_path / "pairs.jsonl")), read_pairs(tmp_path / "pairs.jsonl")
    assert [vote.share for vote in record.votes] == [0.25] * 8 and len({vote.answer for vote in record.votes}) == 8
    assert pair.epsilon == pytest.approx(1 - (1.75 + 0.5) / 3)
    assert sorted(pair.teachers["votes"]) == [
        f"{name} {number}" for name in ("gpt-a", "qwen-b") for number in range(1, 5)
    ]
    assert progress.calls == 8 and progress.usd == pytest.approx(8 * USD) == record.price_usd
    assert len(settled_calls(tmp_path)) == 8
    assert measure([record], [pair], None).agreement == {("gpt", "qwen"): (0.75, 1.0)}


# All voters at once give the same shares. A student that the majority agrees with beats each other answer once.
def test_all_at_once(tmp_path: Path) -> None:
    progress, _ = play(tmp_path, [state(0)], endpoint=Endpoint(answers=Drawing()), voting="all", **SAMPLED)
    (pair,) = read_pairs(tmp_path / "pairs.jsonl")
    assert progress.calls == 12 and pair.epsilon == pytest.approx(1 - (1.75 + 0.5) / 4)
    act = {"role": "assistant", "content": None}
    call = {"id": "c1", "type": "function", "function": {"name": "cat", "arguments": '{"path": "x.py"}'}}
    agreed = state(0, student_action=act | {"tool_calls": [call]})
    progress, _ = play(tmp_path / "agreed", [agreed], endpoint=Endpoint(answers=Drawing()), voting="all", **SAMPLED)
    assert progress.outcomes == {"agreed": 1} and progress.pairs == 1


# A larger number goes on from the answers there are; the same number asks nobody. An answer that did not come leaves
# the vote to the others.
def test_answers_are_kept_by_number(tmp_path: Path) -> None:
    async def run():
        async with serving(Endpoint(answers=Drawing())) as endpoint:
            for number, samples in enumerate((1, 4, 4)):
                folder = tmp_path / str(number)
                config = configured(folder, endpoint.url, **SAMPLED | {"samples": samples, "cache_dir": tmp_path / "c"})
                progress = await replayed(folder, config, [state(0)])
                yield progress.calls, progress.cached

    async def counted():
        return [each async for each in run()]

    assert asyncio.run(counted()) == [(2, 0), (6, 2), (0, 8)]
    broken = Endpoint(answers=Drawing(), script={"gpt-a": ["not_found"]})
    progress, _ = play(tmp_path / "broken", [state(0)], endpoint=broken, **SAMPLED)
    (record,) = read_records(votes_beside(tmp_path / "broken" / "pairs.jsonl"))
    assert progress.failed == 1 and sorted(vote.share for vote in record.votes) == [0.25] * 4 + [1 / 3] * 3


# What was asked for at once took as long as its slowest answer, also where it comes from the cache now.
@pytest.mark.parametrize(("voting", "together"), [("sequential", sum), ("all", max)])
def test_the_time_of_answers_at_once(tmp_path: Path, voting: str, together: Callable) -> None:
    async def run() -> None:
        async with serving(Endpoint(answers=Drawing())) as endpoint:
            config = configured(tmp_path, endpoint.url, voting=voting, **SAMPLED)
            for folder in ("asked", "cached"):
                await replayed(tmp_path / folder, config, [state(0)])

    asyncio.run(run())
    (record,) = read_records(votes_beside(tmp_path / "cached" / "pairs.jsonl"))
    slowest = defaultdict[str, float](float)
    for vote in record.votes:
        slowest[vote.teacher] = max(slowest[vote.teacher], vote.answer_s)
    assert record.seconds == 0 and record.vote_s == pytest.approx(together(slowest.values()))


# A cap in the middle of a vote stops the replay; with a larger one it goes on with what was paid for.
def test_a_cap_between_two_answers(tmp_path: Path) -> None:
    def capped(usd: float) -> dict:
        return {"budget": {"usd_per_call": 1.0, "usd_per_trace": 100.0, "usd_per_run": usd}, **SAMPLED}

    async def run():
        async with serving(Endpoint(answers=Drawing())) as endpoint:
            stopped = await replayed(tmp_path, configured(tmp_path, endpoint.url, **capped(0.9)), [state(0)])
            return stopped, await replayed(tmp_path, configured(tmp_path, endpoint.url, **capped(100.0)), [state(0)])

    stopped, resumed = asyncio.run(run())
    assert stopped.stopped is not None and stopped.usd <= 0.9 and stopped.pairs == 0
    assert resumed.outcomes == {"overruled": 1} and 0 < resumed.cached < 8
    assert len(settled_calls(tmp_path)) == 8


# The first answer's key is that of the only one, so that a cache of greedy answers and its records stay as they were.
def test_the_key_of_the_first_answer() -> None:
    asked = {"endpoint": "e", "model": "m", "messages": [], "tools": [], "temperature": 0.0, "max_tokens": 8}
    assert Question(**asked).key == "fd9676d130d77a0fe1b714700aed4b3f"
    assert Question(**asked, sample=1).key != Question(**asked).key


def test_greedy_teachers_have_one_answer(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"samples = 4, but gpt-a, qwen-b, glm-c .* temperature 0"):
        configured(tmp_path, "http://127.0.0.1:9/v1", samples=4)
