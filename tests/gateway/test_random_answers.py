"""Answers of a node that has lost its mind, over the real link."""

from __future__ import annotations

import asyncio

from gateway_made import generate_body, post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node_peer import PeerNode

from composer_prime.wire.node_messages import Generate
from composer_prime.wire.types import VersionSpan

ANSWER = st.builds(
    dict,
    token_ids=st.binary(max_size=40),
    logprobs=st.binary(max_size=40),
    spans=st.lists(st.tuples(*[st.integers(-1, 9)] * 3), max_size=3),
    finish_reason=st.sampled_from(["stop", "length", "cancelled", ""]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers=st.lists(ANSWER, max_size=3))
def test_random_answers_are_refused_or_sound(answers, open_gateway, node_keys):
    """Whatever bytes a node answers with, the caller gets a checked completion or an error, and the gateway goes on."""

    async def scenario() -> None:
        async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "a") as node:
            pending = list(answers)

            def answer(request: Generate):
                if not pending:
                    return node.usual_answer(request)
                values = pending.pop()
                spans = [VersionSpan(*span) for span in values.pop("spans")]
                return node.usual_answer(request, version_spans=spans, **values)

            node.answer = answer
            status, reply = await post(gateway.http_url, generate_body(5, max_tokens=8))
            assert status in (200, 502)
            if status == 200:
                choice = reply["choices"][0]
                assert all(0 <= i < 576 for i in choice["token_ids"])
                assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) <= 8

    asyncio.run(scenario())
