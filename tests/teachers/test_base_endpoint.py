"""The frozen base behind an endpoint: vLLM's prompt_logprobs, and endpoints without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from loopback import Endpoint, call, configured, run_config, says, serving, state
from pydantic import ValidationError

from composer_prime.config.teachers import FrozenBaseConfig, TeachersConfig
from composer_prime.errors import ConfigError, EndpointError, TeacherError
from composer_prime.plan.preflight import check_start
from composer_prime.traces.pairs import Pair, PairState
from composer_prime.traces.replay.command import parse_arguments, replay, replay_summary
from composer_prime.traces.replay.density import main as report
from composer_prime.traces.replay.frozen_base import CachedScorer, EndpointScorer
from composer_prime.traces.replay.records import read_pairs
from composer_prime.traces.state import write_state
from tests.chat_server import chat_server

BASE = "base-model"


class Base:
    """Writes each character as a token; `likes` it with -1 nats, any other with -3. As vLLM does, it gives the first
    token no log-probability, refuses tools that a call may choose from and, where `gives` is false, gives no
    prompt_logprobs at all. First it has its `faults`: statuses, or 0 for a connection that is lost. It refuses texts of
    more than `longest` characters."""

    def __init__(
        self,
        likes: str = "x",
        *,
        gives: bool = True,
        faults: Sequence[int] = (),
        crowd: int = 1,
        longest: int = 100_000,
    ) -> None:
        self.likes, self.gives, self.faults, self.crowd, self.longest = likes, gives, list(faults), crowd, longest
        self.seen: list[tuple[dict, str | None]] = []
        self.in_flight, self.most_in_flight, self.crowded = 0, 0, asyncio.Event()

    async def chat(self, request: web.Request) -> web.Response:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight >= self.crowd:
            self.crowded.set()
        await self.crowded.wait()
        try:
            return self._reply(request, json.loads(await request.read()))
        finally:
            self.in_flight -= 1

    def _reply(self, request: web.Request, body: dict) -> web.Response:
        self.seen.append((body, request.headers.get("Authorization")))
        fault = self.faults.pop(0) if self.faults else 200
        if fault == 0:
            assert request.transport is not None
            request.transport.close()
        elif "tools" in body and body.get("tool_choice", "auto") != "none":
            return web.Response(status=400, text='"auto" tool choice requires --enable-auto-tool-choice')
        if fault != 200:
            return web.Response(status=fault or 500, text="not now")
        text = "".join(f"[{each['role']}]{self._said(each)}" for each in body["messages"])
        text += "[assistant]" if body["add_generation_prompt"] else ""
        if len(text) > self.longest:
            return web.Response(status=400, text=f"{len(text)} tokens are too many")
        scored = [{str(ord(letter)): {"logprob": -1.0 if letter in self.likes else -3.0}} for letter in text[1:]]
        choice = {"message": {"role": "assistant", "content": "y"}, "finish_reason": "length"}
        prompt = {"prompt_logprobs": [None, *scored]} if self.gives else {}
        return web.json_response({"choices": [choice], "usage": {}} | prompt)

    def _said(self, message: dict) -> str:
        calls = message.get("tool_calls") or []
        return (message.get("content") or "") + "".join(each["function"]["arguments"] for each in calls)


def scores(base: Base, *answers: str, key_var: str | None = None, tools: Sequence[dict] = ()) -> list[float]:
    async def run() -> list[float]:
        async with chat_server(base.chat) as url:
            place = FrozenBaseConfig(base_url=url, model=BASE, api_key_var=key_var)
            scorer = EndpointScorer(place, TeachersConfig(retry_base_s=0.01, retry_max_s=0.02))
            asked = [{"role": "user", "content": "Which?"}]
            try:
                return await scorer.logprobs_per_token(asked, list(tools), [says(answer) for answer in answers])
            finally:
                await scorer.close()

    return asyncio.run(run())


# The mean is over the answer's tokens alone, not over those of its context.
def test_the_mean_is_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_KEY", "made-up")
    base = Base()
    assert scores(base, "xx", "xy", "yy", key_var="BASE_KEY") == [-1.0, -2.0, -3.0]
    assert all(key == "Bearer made-up" and body["prompt_logprobs"] == 0 for body, key in base.seen)
    assert all("tools" not in body and body["model"] == BASE for body, _ in base.seen)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        scores(base, "xx", key_var="NO_SUCH_KEY")


# Tools are in the prompt, and no call is asked for: stock vLLM refuses the choice that it takes by itself.
def test_tools_are_offered_without_a_choice() -> None:
    base, tools = Base(), [{"type": "function", "function": {"name": "ls"}}]
    assert scores(base, "xx", tools=tools) == [-1.0] and all(body["tools"] == tools for body, _ in base.seen)


# The context is asked for once. A fault that passes is met by asking again, at most eight requests at a time. Any other
# but a refusal of the messages is told as one of the endpoint, which may be mended.
def test_faults_of_an_endpoint() -> None:
    base = Base(faults=[429, 0, 503], crowd=8)
    assert scores(base, *["xx"] * 20) == [-1.0] * 20 and len(base.seen) == 24 and base.most_in_flight == 8
    for faults in ([401], [500] * 5, [0] * 5):
        with pytest.raises(EndpointError, match=r"base-model at .* gave no score: ") as told:
            scores(Base(faults=faults * 2), "x")
        assert not isinstance(told.value, TeacherError)
    with pytest.raises(TeacherError, match="status 400: not now"):
        scores(Base(faults=[400] * 2), "x")


# An answer that the base cannot read takes no other's score: those are kept, and asked for no more.
def test_an_answer_that_the_base_cannot_read(tmp_path: Path) -> None:
    base, asked = Base(longest=60), [{"role": "user", "content": "Which?"}]

    async def run() -> None:
        async with chat_server(base.chat) as url:
            inner = EndpointScorer(FrozenBaseConfig(base_url=url, model=BASE), TeachersConfig(max_retries=0))
            cached = CachedScorer(tmp_path, "mark", inner)
            try:
                for _ in range(2):
                    with pytest.raises(TeacherError, match="tokens are too many"):
                        await cached.logprobs_per_token(asked, [], [says("xx"), says("y" * 60), says("xy")])
            finally:
                await inner.close()

    asyncio.run(run())
    kept = CachedScorer(tmp_path, "mark", None)
    assert asyncio.run(kept.logprobs_per_token(asked, [], [says("xx"), says("xy")])) == [-1.0, -2.0]
    with pytest.raises(TeacherError, match="holds no score of this answer"):
        asyncio.run(kept.logprobs_per_token(asked, [], [says("y" * 60)]))
    # All together, each alone, and then only the one that has no score.
    assert len(base.seen) <= 4 + 3 * 2 + 2


# An endpoint that scores no prompt is named, and asked no more.
def test_an_endpoint_without_log_probabilities() -> None:
    base = Base(gives=False)
    with pytest.raises(TeacherError, match=r"no log-probabilities of a prompt \(prompt_logprobs\)"):
        scores(base, "x")
    assert len(base.seen) <= 2


def differently(model: str, messages: list[dict]) -> tuple[str, dict]:
    return "cat", {"path": "./a.py" if model == "gpt-a" else "a.py"}


def replayed(tmp_path: Path, base: Base, states: int = 3):
    """One replay from a file of teachers with a base, and no run."""

    async def run():
        async with serving(Endpoint(answers=differently)) as teachers, chat_server(base.chat) as url:
            config = configured(tmp_path, teachers.url).model_dump(mode="json", exclude={"frozen_base", "score"})
            config["frozen_base"] = {"base_url": url, "model": BASE}
            pool, path = tmp_path / "pool.json", tmp_path / "states.jsonl"
            pool.write_text(json.dumps({"teachers": config}))
            path.write_bytes(b"".join(write_state(state(number)) for number in range(states)))
            words = [str(path), "-o", str(tmp_path / "pairs.jsonl"), "@", str(pool)]
            return (await replay(parse_arguments(words)))[0]

    return asyncio.run(run())


# A file of teachers with a base is enough: the base chooses among agreeing answers. Without log-probabilities the first
# is taken, and the summary tells why.
def test_a_pool_file_with_a_base(tmp_path: Path) -> None:
    progress = replayed(tmp_path, Base(likes="./"))
    assert {pair.teachers["chosen_by"] for pair in read_pairs(tmp_path / "pairs.jsonl")} == {"likeliest"}
    assert all("./a.py" in str(pair.chosen) for pair in read_pairs(tmp_path / "pairs.jsonl"))
    assert progress.pairs == 3 and not progress.unscored
    (tmp_path / "unable").mkdir()
    progress = replayed(tmp_path / "unable", Base(gives=False))
    assert progress.pairs == 3 and sum(progress.unscored.values()) == 3
    told = "\n".join(replay_summary(progress, tmp_path / "pairs.jsonl"))
    assert "base      3 times the first of agreeing answers was taken" in told and "prompt_logprobs" in told


# A base that is gone decides nothing: its states fail, no pair has the first of agreeing answers for good, and a
# repeated replay takes them up.
def test_a_base_that_is_gone(tmp_path: Path) -> None:
    progress = replayed(tmp_path, Base(faults=[503] * 1000))
    assert progress.outcomes == {"failed": 3} and not list(read_pairs(tmp_path / "pairs.jsonl"))
    assert any("status 503: not now" in reason for reason in progress.without_vote)
    progress = replayed(tmp_path, Base(likes="./"))
    assert progress.pairs == 3 and progress.resumed == 0
    assert {pair.teachers["chosen_by"] for pair in read_pairs(tmp_path / "pairs.jsonl")} == {"likeliest"}


# What cannot work is refused when the configuration is read, and a key that is missing before the run.
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base_url": "127.0.0.1:8000/v1"}, "is '127.0.0.1:8000/v1'; expected the part before /chat/completions"),
        ({"base_url": "http://h:1/v1/chat/completions"}, "expected the part before /chat/completions"),
        ({"model": ""}, "at least 1 character"),
    ],
)
def test_places_that_cannot_be_right(changes: dict, told: str) -> None:
    place = {"base_url": "http://127.0.0.1:8000/v1", "model": BASE}
    assert TeachersConfig(frozen_base=place).frozen_base
    with pytest.raises(ValidationError, match=told):
        TeachersConfig(frozen_base=place | changes)
    with pytest.raises(ValidationError, match=r"teachers\.score is false, but teachers\.frozen_base"):
        TeachersConfig(frozen_base=place, score=False)


def test_the_key_is_looked_for_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPBACK_KEY", "made-up")
    place = {"base_url": "http://127.0.0.1:9/v1", "model": BASE, "api_key_var": "NO_SUCH_KEY"}
    config = run_config(tmp_path, "http://127.0.0.1:9/v1", online=True, score=True, frozen_base=place)
    (problem,) = [each for each in check_start(config, gpus=0).problems if "frozen_base" in each]
    assert "set the environment variable NO_SUCH_KEY" in problem


# `composer pairs report --base-url` measures margins behind an endpoint, and reports why it cannot where it cannot.
def test_margins_behind_an_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.jsonl"

    def pair(number: int) -> Pair:
        sides = (
            {"role": "assistant", "content": None, "tool_calls": [call("cat", {"n": each})]} for each in ("xx", "y")
        )
        chosen, rejected = sides
        place = PairState(state_id=f"t{number}/0", messages=[{"role": "user", "content": f"{number}"}], tools=[])
        return Pair(
            trace=f"t{number}", state=place, chosen=chosen, rejected=rejected, epsilon=0.1, teachers={}, cost_usd=0
        )

    path.write_bytes(b"".join(msgspec.json.encode(pair(number)) + b"\n" for number in range(12)))

    async def run(base: Base) -> None:
        async with chat_server(base.chat) as url:
            words = [str(path), "--base", BASE, "--base-url", url, "--chart", str(tmp_path / "chart.svg")]
            await asyncio.to_thread(report, words)

    asyncio.run(run(Base()))
    assert "12 pairs of 12 traces, nats a token: real +" in capsys.readouterr().out
    asyncio.run(run(Base(gives=False)))
    assert "the base scored 0 of 12 pairs" in (told := capsys.readouterr().out) and "prompt_logprobs" in told
    with pytest.raises(SystemExit):
        report([str(path), "--base", BASE, "--base-url", "ftp://127.0.0.1"])
    assert "teachers.frozen_base.base_url is 'ftp://127.0.0.1'" in capsys.readouterr().err
