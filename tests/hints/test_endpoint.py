"""The chat endpoint behind the hint writer: cache, budget, deadlines, and what a bad endpoint does."""

from __future__ import annotations

import asyncio
import json

import pytest
from endpoint_peer import chat_peer

from composer_prime.config.hints import EndpointConfig
from composer_prime.errors import BudgetError, ConfigError, EndpointError
from composer_prime.run.costs import spent
from orchestrator.hints.generate import ChatEndpoint
from tests.waiting import until

ASK = [{"role": "user", "content": "why?"}]
PRICES = {"input_usd_per_mtok": 1000.0, "output_usd_per_mtok": 10_000.0, "max_tokens": 20}
"""100 prompt tokens and 10 answer tokens, as the peer counts, cost 0.2 USD; the worst case of ASK 0.21."""


def asking(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"no {number}"}]


async def test_one_question_is_asked_once(tmp_path):
    # Also by the next process, which reads the file.
    async with chat_peer() as peer:
        first = ChatEndpoint(peer.config(**PRICES), tmp_path)
        assert [await first.ask(ASK), await first.ask(ASK)] == ["use add"] * 2
        assert len(peer.bodies) == 1
        assert first._budget.spent_usd == pytest.approx(0.2)
        paid = spent(tmp_path / "costs.jsonl")
        assert (paid.hint_calls, paid.usd, paid.calls) == (1, 0, 0) and paid.hint_usd == pytest.approx(0.2)
        await first.close()
        second = ChatEndpoint(peer.config(**PRICES), tmp_path)
        assert await second.ask(ASK) == "use add"
        assert len(peer.bodies) == 1 and second._budget.spent_usd == pytest.approx(0.2)
        await second.close()


async def test_the_budget_is_reserved_before_the_call(tmp_path):
    # Three parallel calls of 0.21 USD at worst fit a budget of 0.45 only twice: the third is never sent.
    async with chat_peer() as peer:
        endpoint = ChatEndpoint(peer.config(**PRICES, budget_usd=0.45), tmp_path)
        asked = [endpoint.ask(asking(number)) for number in range(3)]
        ends = await asyncio.gather(*asked, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, BudgetError)]
        assert len(refused) == 1 and "raise orchestrator.hints.llm.budget_usd" in str(refused[0])
        assert "teachers" not in str(refused[0])
        assert len(peer.bodies) == 2 and endpoint._budget.spent_usd <= 0.45
        await endpoint.close()


@pytest.mark.parametrize("mode", ["no_usage", "bad_usage"])
async def test_an_answer_without_a_count_costs_the_worst_case(mode, tmp_path):
    async with chat_peer(mode) as peer:
        endpoint = ChatEndpoint(peer.config(**PRICES), tmp_path)
        await endpoint.ask(ASK)
        assert endpoint._budget.spent_usd == pytest.approx(0.21)
        await endpoint.close()


@pytest.mark.parametrize(
    ("mode", "said", "cost_usd"),
    [
        ("silent", "no reply within 0.2 s", 0.21),
        ("500", "status 500: out of order", 0.0),
        ("nonsense", "not a chat completion", 0.21),
        ("429", "status 429", 0.0),
    ],
)
async def test_a_bad_endpoint_is_an_error_in_time(mode, said, cost_usd, tmp_path):
    # Silence, here of a minute, ends at the deadline. Failures are not cached. Where a model may have answered they
    # cost the worst case, which the next process counts too. An error status is free.
    async with chat_peer(mode) as peer:
        timeout_s = 0.2 if mode == "silent" else 30.0
        config = peer.config(timeout_s=timeout_s, **PRICES)
        endpoint = ChatEndpoint(config, tmp_path)
        with pytest.raises(EndpointError, match=said):
            await endpoint.ask(ASK)
        assert endpoint._budget.spent_usd == pytest.approx(cost_usd)
        await endpoint.close()
        again = ChatEndpoint(peer.config(**PRICES), tmp_path)
        assert again._budget.spent_usd == endpoint._budget.spent_usd
        peer.mode = "answer"
        assert await again.ask(ASK) == "use add"
        await again.close()


@pytest.mark.parametrize(
    "said", ["<think>\nplus? add!\n</think>\n\nuse add", "plus? add!\n</think>\n\nuse add", " use add\n"]
)
async def test_thinking_is_no_part_of_the_answer(said, tmp_path):
    # Servers without a reasoning parser leave it in the content; the template may have put its opening tag into the
    # prompt. A hint would hold the thinking alone, as it is cut after max_hint_chars.
    async with chat_peer(answer=lambda body: said) as peer:
        endpoint = ChatEndpoint(peer.config(), tmp_path)
        assert await endpoint.ask(ASK) == "use add"
        await endpoint.close()


CUT_THOUGHTS = ["<think>\nFirst, let me see what", "<think>a</think><think>b", "<think>a</think>\n<thinking>b"]


@pytest.mark.parametrize("said", [*CUT_THOUGHTS, "<think>why?</think>", "", None])
async def test_an_answer_of_thinking_alone_is_an_error_that_names_the_limit(said, tmp_path):
    # The limit cut the model before it said anything: paid for by its count of tokens, and not kept as an answer.
    async with chat_peer(answer=lambda body: said) as peer:
        endpoint = ChatEndpoint(peer.config(**PRICES), tmp_path)
        with pytest.raises(EndpointError, match=r"hints\.llm: the answer holds no text .* 20 tokens: raise"):
            await endpoint.ask(ASK)
        assert endpoint._budget.spent_usd == pytest.approx(0.2)
        peer.answer = lambda body: "use add"
        assert await endpoint.ask(ASK) == "use add" and len(peer.bodies) == 2
        await endpoint.close()


async def test_an_endpoint_that_is_not_there_is_an_error(tmp_path):
    async with chat_peer() as peer:
        url = peer.url
    endpoint = ChatEndpoint(peer.config(base_url=url), tmp_path)
    with pytest.raises(EndpointError, match=r"orchestrator\.hints\.llm \(m at http://127.* no connection"):
        await endpoint.ask(ASK)
    await endpoint.close()


def test_a_missing_key_opens_no_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("HINT_KEY", raising=False)
    config = EndpointConfig(base_url="http://127.0.0.1:9/v1", model="m", api_key_var="HINT_KEY")
    with pytest.raises(ConfigError, match=r"orchestrator\.hints\.llm\.api_key_var is 'HINT_KEY'"):
        ChatEndpoint(config, tmp_path)
    assert not (tmp_path / "hints").exists()


async def test_the_key_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HINT_KEY", "s3cret")
    async with chat_peer() as peer:
        endpoint = ChatEndpoint(peer.config(api_key_var="HINT_KEY"), tmp_path)
        await endpoint.ask(ASK)
        await endpoint.close()
        assert peer.keys == ["Bearer s3cret"]
        assert "s3cret" not in json.dumps(peer.bodies)


async def test_a_call_that_nobody_waits_for_is_not_made(tmp_path):
    # Eight calls are in flight; the one that waits for a place is the first whose caller leaves.
    async with chat_peer("silent") as peer:
        endpoint = ChatEndpoint(peer.config(timeout_s=60), tmp_path)
        asked = [asyncio.ensure_future(endpoint.ask(asking(number))) for number in range(9)]
        await until(lambda: len(peer.bodies) == 8)
        sent = {body["messages"][0]["content"] for body in peer.bodies}
        for leaving in sorted(asked, key=lambda call: f"no {asked.index(call)}" in sent):
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        assert len(peer.bodies) == 8
        await endpoint.close()
