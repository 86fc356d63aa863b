"""The chat endpoint behind judge and hint writer: cache, budget, deadlines, and what a bad endpoint does."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from endpoint_peer import chat_peer

from composer_prime.errors import BudgetError, ConfigError, EndpointError
from orchestrator.hints.endpoint import ChatEndpoint

ASK = [{"role": "user", "content": "why?"}]
PRICES = {"input_usd_per_million": 1000.0, "output_usd_per_million": 10_000.0, "max_tokens": 20}
"""100 prompt tokens and 10 answer tokens, as the peer counts, cost 0.2 USD; the worst case of ASK 0.21."""


def test_one_question_is_asked_once(tmp_path):
    # Also when two ask at once, and by the next process, which reads the file; a torn last line costs that answer only.
    async def run():
        async with chat_peer() as peer:
            cache = tmp_path / "judge.jsonl"
            first = ChatEndpoint(peer.config(**PRICES), name="judge", cache=cache)
            assert await asyncio.gather(first.ask(ASK), first.ask(ASK)) == ["use add"] * 2
            assert await first.ask(ASK) == "use add"
            assert (len(peer.bodies), first.calls, first.cached) == (1, 1, 1)
            assert first.cost_usd == pytest.approx(0.2)
            await first.ask(ASK, variant="other")
            assert len(peer.bodies) == 2
            await first.close()
            with cache.open("ab") as file:
                file.write(b'["torn')
            second = ChatEndpoint(peer.config(**PRICES), name="judge", cache=cache)
            assert await second.ask(ASK) == "use add"
            assert len(peer.bodies) == 2 and second.cost_usd == pytest.approx(0.4)
            await second.close()

    asyncio.run(run())


def test_the_budget_is_reserved_before_the_call():
    # Three parallel calls of 0.21 USD at worst fit a budget of 0.45 only twice: the third is never sent.
    async def run():
        async with chat_peer() as peer:
            endpoint = ChatEndpoint(peer.config(**PRICES, budget_usd=0.45), name="orchestrator.hints.llm")
            asked = [endpoint.ask(ASK, variant=str(number)) for number in range(3)]
            ends = await asyncio.gather(*asked, return_exceptions=True)
            refused = [end for end in ends if isinstance(end, BudgetError)]
            assert len(refused) == 1 and "raise orchestrator.hints.llm.budget_usd" in str(refused[0])
            assert len(peer.bodies) == 2 and endpoint.cost_usd <= 0.45
            await endpoint.close()

    asyncio.run(run())


def test_an_answer_without_a_count_costs_the_worst_case():
    async def run():
        async with chat_peer("no_usage") as peer:
            endpoint = ChatEndpoint(peer.config(**PRICES), name="judge")
            await endpoint.ask(ASK)
            assert endpoint.cost_usd == pytest.approx(0.21)
            await endpoint.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("mode", "said"),
    [("silent", "no answer within 0.2 s"), ("500", "answered 500: out of order"), ("nonsense", "no chat completion")],
)
def test_a_bad_endpoint_is_an_error_in_time(mode, said):
    # Silence ends at the deadline; failures are not cached and cost nothing.
    async def run():
        async with chat_peer(mode) as peer:
            endpoint = ChatEndpoint(peer.config(timeout_s=0.2, **PRICES), name="judge")
            begun = time.monotonic()
            with pytest.raises(EndpointError, match=said):
                await endpoint.ask(ASK)
            assert time.monotonic() - begun < 3 and endpoint.cost_usd == 0
            peer.mode = "answer"
            assert await endpoint.ask(ASK) == "use add"
            await endpoint.close()

    asyncio.run(run())


def test_an_endpoint_that_is_not_there_is_an_error():
    async def run():
        async with chat_peer() as peer:
            url = peer.url
        endpoint = ChatEndpoint(peer.config(base_url=url), name="judge")
        with pytest.raises(EndpointError, match="judge: http://127"):
            await endpoint.ask(ASK)
        await endpoint.close()

    asyncio.run(run())


def test_the_key_comes_from_the_environment(monkeypatch):
    async def run():
        async with chat_peer() as peer:
            endpoint = ChatEndpoint(peer.config(api_key_variable="HINT_KEY"), name="judge")
            await endpoint.ask(ASK)
            await endpoint.close()
            assert peer.keys == ["Bearer s3cret"]
            assert "s3cret" not in json.dumps(peer.bodies)

    monkeypatch.setenv("HINT_KEY", "s3cret")
    asyncio.run(run())
    monkeypatch.delenv("HINT_KEY")
    with pytest.raises(ConfigError, match=r"judge\.api_key_variable is 'HINT_KEY'"):
        asyncio.run(run())
