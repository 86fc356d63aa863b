"""The token-in route against a real node on loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from gateway_made import generate_body, post
from node_peer import PeerNode, failed, tokens_for

from composer_prime.wire.node_messages import Generate
from composer_prime.wire.types import VersionSpan, ints, pack_floats
from orchestrator.gateway.http import Redraw, turn_seed


async def test_ids_logprobs_and_spans_come_back_and_are_recorded(open_gateway, node_keys):
    """What the node sampled reaches the caller and the rollout's record, id for id."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0"):
        gateway.records.open("r1")
        status, reply = await post(gateway.http_url, generate_body(5, 6, 7), X_Session_ID="r1")
        ids, logprobs = tokens_for([5, 6, 7], 6)
        choice = reply["choices"][0]
        assert status == 200
        assert choice["token_ids"] == ids.tolist()
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == logprobs.tolist()
        assert reply["version_spans"] == [[0, 6, 0]]
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
        [record] = gateway.records.take("r1")
        assert record.prompt_ids.tolist() == [5, 6, 7] and record.prompt_ids.dtype == np.int32
        assert record.answer.ids.tolist() == ids.tolist()
        assert record.answer.token_logprobs.tolist() == logprobs.tolist()
        assert record.answer.version_spans == [VersionSpan(0, 6, 0)]
        assert (record.answer.finish_reason, record.answer.node_id, record.session) == ("stop", "n0", "r1")
        assert gateway.records.take("r1") == []


async def test_each_turn_of_a_session_gets_its_own_seed(open_gateway, node_keys):
    """A rollout sends one seed in all its turns; the node must not draw the same noise twice."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        gateway.records.open("r1")
        for _ in range(3):
            await post(gateway.http_url, generate_body(5, seed=11), X_Session_ID="r1")
        assert [g.sampling.seed for g in node.generates] == [11, turn_seed(11, 1), turn_seed(11, 2)]
        assert len({g.sampling.seed for g in node.generates}) == 3


async def test_the_reply_is_cut_where_the_context_ends(open_gateway, node_keys):
    """max_tokens never asks a node for more than the context has room for."""
    async with (
        open_gateway(model={"max_context": 80}) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0", num_tokens=50) as node,
    ):
        status, reply = await post(gateway.http_url, generate_body(*[5] * 75, max_tokens=40))
        assert (status, reply["choices"][0]["finish_reason"]) == (200, "length")
        assert node.generates[0].sampling.max_tokens == 5
        body = generate_body(*[5] * 75)
        del body["sampling_params"]["max_tokens"]
        await post(gateway.http_url, body)
        assert node.generates[1].sampling.max_tokens == 5


async def test_a_client_that_hangs_up_cancels_its_request_on_the_node(open_gateway, node_keys):
    """Abandoned rollouts free their place in the engine at once."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0", delay_s=30) as node:
        gateway.records.open("r1")
        call = asyncio.create_task(post(gateway.http_url, generate_body(5), X_Session_ID="r1"))
        await node.until(lambda: bool(node.running))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await node.until(lambda: not node.running)
        assert not gateway.router.open
        assert gateway.router.counters["cancelled"] == 1
        assert gateway.records.take("r1") == []


def _bad(**changes: Any):
    return lambda node: lambda request: node.usual_answer(request, **changes)


def _bad_floats(*values: float):
    return lambda node: lambda request: node.usual_answer(request, logprobs=pack_floats(values))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (_bad(token_ids=b"123"), "4-byte"),
        (_bad(token_ids=np.array([5, 6, 7, 8, 9, 10**6], "<i4").tobytes()), "vocabulary"),
        (_bad(token_ids=np.array([5, 6, 7, 8, 9, -1], "<i4").tobytes()), "vocabulary"),
        (_bad_floats(-1, -1, -1), "3 logprobs"),
        (_bad_floats(-1, -1, float("nan"), -1, -1, -1), "finite"),
        (_bad_floats(-1, -1, float("-inf"), -1, -1, -1), "finite"),
        (_bad_floats(-1, -1, -9999.0, -1, -1, -1), "finite"),
        (_bad_floats(-1, -1, 0.5, -1, -1, -1), "finite"),
        (_bad(version_spans=[VersionSpan(0, 5, 0)]), "cover 5 of 6"),
        (_bad(version_spans=[VersionSpan(0, 3, 0), VersionSpan(4, 6, 0)]), "does not continue"),
        (_bad(version_spans=[VersionSpan(0, 6, 9)]), "version 9"),
        (_bad(finish_reason="whatever"), "finish_reason"),
        (_bad(token_ids=b"", logprobs=b"", version_spans=[]), "no token came, with finish_reason 'stop'"),
        (_bad(finish_reason="length"), "'length' after 6 tokens, but max_tokens was"),
    ],
)
async def test_a_bad_answer_goes_to_another_node_and_counts_against_the_first(
    open_gateway, node_keys, make, complaint, caplog
):
    """Nothing reaches training that is out of range, not finite or without a policy version."""
    async with open_gateway() as gateway:
        async with PeerNode(gateway.node_endpoint, node_keys, "bad") as bad:
            bad.answer = make(bad)
            async with PeerNode(gateway.node_endpoint, node_keys, "good"):
                # "bad" comes first in the alphabet and both are idle.
                status, reply = await post(gateway.http_url, generate_body(5, 6))
        assert status == 200
        assert reply["choices"][0]["token_ids"] == tokens_for([5, 6], 6)[0].tolist()
        assert {name: node.record.bad_answers for name, node in gateway.router.nodes.items()} == {"bad": 1, "good": 0}
        assert gateway.router.counters["reissued"] == 1
        assert complaint in caplog.text


@pytest.mark.parametrize(("retryable", "code", "tries"), [(True, 502, 3), (False, 400, 1)])
async def test_a_retryable_failure_is_tried_again_up_to_a_bound(open_gateway, node_keys, retryable, code, tries):
    """Three failures end the request with a 502 of the node's words; what no node could serve is the caller's 400."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        node.answer = lambda request: failed(request, "engine out of memory", retryable=retryable)
        status, reply = await post(gateway.http_url, generate_body(5))
        assert status == code and "engine out of memory" in reply["error"]["message"]
        assert len(node.generates) == tries
        assert len({g.lease for g in node.generates}) == tries


async def test_turns_of_two_agents_keep_their_order_and_session(open_gateway, node_keys):
    """`<rollout>#1` belongs to the rollout; records come in the order in which requests began."""

    def slow_first(node: PeerNode, held: list[Generate]):
        def answer(request: Generate):
            if ints(request.prompt_ids).tolist() == [5] and not held:
                held.append(request)
                return None
            return node.usual_answer(request)

        return answer

    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        held: list[Generate] = []
        node.answer = slow_first(node, held)
        gateway.records.open("r1")
        first = asyncio.create_task(post(gateway.http_url, generate_body(5), X_Session_ID="r1"))
        await node.until(lambda: bool(held))
        await post(gateway.http_url, generate_body(6), X_Session_ID="r1#1")
        node.send(node.usual_answer(held[0]))
        await first
        assert [(r.session, r.prompt_ids.tolist()) for r in gateway.records.take("r1")] == [("r1", [5]), ("r1#1", [6])]


async def test_a_redraw_repeats_a_rollout_up_to_its_turn(open_gateway, node_keys):
    """Earlier turns are answered as recorded, the turn is drawn after a hint and with other noise, later ones are free.

    The record has the prompt without the hint, as the environment sent it.
    """
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        gateway.records.open("r1")
        _, first = await post(gateway.http_url, generate_body(5, seed=11), X_Session_ID="r1")
        second = [5, *first["choices"][0]["token_ids"], 6]
        await post(gateway.http_url, generate_body(*second, seed=11), X_Session_ID="r1")
        recorded, before = gateway.records.take("r1"), len(node.generates)
        redraw = Redraw(records=recorded, turn=1, hinted_ids=np.array([5, 9, 9, 6], np.int32), draw=2)
        gateway.records.open("r1d2", redraw=redraw)
        _, again = await post(gateway.http_url, generate_body(5, seed=11), X_Session_ID="r1d2")
        assert again["choices"] == first["choices"] and len(node.generates) == before
        status, _ = await post(gateway.http_url, generate_body(*second, seed=11), X_Session_ID="r1d2")
        asked = node.generates[before]
        assert status == 200 and ints(asked.prompt_ids).tolist() == [5, 9, 9, 6]
        assert asked.sampling.seed == turn_seed(11, 1, 2) not in (turn_seed(11, 1), turn_seed(11, 1, 1))
        await post(gateway.http_url, generate_body(1, seed=11), X_Session_ID="r1d2")
        assert ints(node.generates[before + 1].prompt_ids).tolist() == [1]
        assert [record.prompt_ids.tolist() for record in gateway.records.take("r1d2")] == [[5], second, [1]]


async def test_a_rollout_that_does_not_repeat_itself_is_refused(open_gateway, node_keys):
    """An environment that answers the same calls otherwise gives another prompt: nothing is drawn for it."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        gateway.records.open("r1")
        await post(gateway.http_url, generate_body(5), X_Session_ID="r1")
        redraw = Redraw(records=gateway.records.take("r1"), turn=0, draw=1)
        gateway.records.open("r1d1", redraw=redraw)
        status, reply = await post(gateway.http_url, generate_body(6), X_Session_ID="r1d1")
        assert (status, reply["error"]["code"]) == (409, "not_repeated") and len(node.generates) == 1
