"""The packed form of the generate route: a turn's new tokens, and a prefix that the gateway holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import pytest
from http_calls import generate_body
from node_peer import PeerNode, tokens_for

from composer_prime.wire.node import Generate
from composer_prime.wire.packed_answer import PackedAnswer
from composer_prime.wire.turns import JSON, PACKED, PREFIX_MISSING, Prefix, TokenHash, TurnClient
from composer_prime.wire.types import ints, pack_floats, pack_ints
from orchestrator.gateway import GenerationRecord


class Caller:
    """Posts to a gateway's generate route as one session, and keeps what went out."""

    def __init__(self, http: aiohttp.ClientSession, url: str, session: str) -> None:
        self.sent: list[tuple[str, bytes]] = []
        """Content type and body of each request."""
        self._http, self._url, self._session = http, url, session

    async def send(self, data: bytes, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        self.sent.append((headers["Content-Type"], data))
        headers = {"X-Session-ID": self._session, **headers}
        async with self._http.post(f"{self._url}/inference/v1/generate", data=data, headers=headers) as reply:
            return reply.status, reply.content_type, await reply.read()

    async def ask_in_json(self, body: Mapping[str, Any]) -> dict[str, Any]:
        status, _, content = await self.send(msgspec.json.encode(body), {"Content-Type": JSON})
        assert status == 200
        return msgspec.json.decode(content)

    async def ask(self, client: TurnClient, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of `client`, in its JSON form."""
        status, answer = await client.ask(self._session, body, self.send)
        assert status == 200 and isinstance(answer, PackedAnswer)
        return msgspec.json.decode(msgspec.json.encode(answer.to_json()))

    async def refused(self, turn: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and error of a packed request."""
        status, _, content = await self.send(msgspec.msgpack.encode(turn), {"Content-Type": PACKED})
        return status, msgspec.json.decode(content)["error"]


def seeded(node: PeerNode) -> PeerNode:
    """Make the node's tokens depend on the seed too, as an engine's do."""

    def answer(request: Generate):
        ids, logprobs = tokens_for([*ints(request.prompt_ids), (request.sampling.seed or 0) % 251], 6)
        return node.usual_answer(request, token_ids=pack_ints(ids), logprobs=pack_floats(logprobs))

    node.answer = answer
    return node


def whole_record(record: GenerationRecord) -> tuple[Any, ...]:
    """What training reads of a record."""
    return (
        record.prompt_ids.tolist(),
        record.answer.ids.tolist(),
        record.answer.token_logprobs.tolist(),
        record.answer.version_spans,
        record.answer.finish_reason,
        record.sampling,
    )


async def test_json_whole_and_incremental_turns_give_the_same_tokens(open_gateway, node_keys):
    """Same seeds, same conversation, three forms: answers, records and what the node receives are equal."""
    tails = [[], [7, 8, 9], [3], [4] * 40]
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0") as node,
        aiohttp.ClientSession() as http,
    ):
        seeded(node)
        answers, records, prompts, callers = {}, {}, {}, {}
        for form in ("json", "whole", "incremental"):
            gateway.records.open(form)
            caller, client = Caller(http, gateway.http_url, form), TurnClient()
            replies, ids = [], [5, 6, 7]
            for tail in tails:
                ids = ids + tail
                body = generate_body(*ids, seed=11, temperature=0.5, stop=["x"], stop_token_ids=[2])
                if form == "json":
                    reply = await caller.ask_in_json(body)
                else:  # A client that remembers nothing sends the whole prompt.
                    client = TurnClient(max_tokens=0) if form == "whole" else client
                    reply = await caller.ask(client, body)
                del reply["request_id"]
                replies.append(reply)
                ids = ids + reply["choices"][0]["token_ids"]
            answers[form], callers[form] = replies, caller
            prompts[form] = [(g.prompt_ids, g.sampling) for g in node.generates[-len(tails) :]]
            records[form] = [whole_record(record) for record in gateway.records.take(form)]
        assert answers["json"] == answers["whole"] == answers["incremental"]
        assert records["json"] == records["whole"] == records["incremental"] and len(records["json"]) == len(tails)
        assert prompts["json"] == prompts["whole"] == prompts["incremental"]
        assert [form for form, _ in callers["incremental"].sent] == [JSON, PACKED, PACKED, PACKED]
        new = [len(msgspec.msgpack.decode(data)["new_ids"]) // 4 for _, data in callers["incremental"].sent[1:]]
        assert new == [3, 1, 40]
        assert gateway.metrics()["gateway/prefixes_missing"] == 0


async def test_a_prompt_that_writes_the_answer_anew_continues_the_prompt_before(open_gateway, node_keys):
    """A template may drop the thoughts of an earlier turn; what is new is then all after the earlier prompt."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0") as node,
        aiohttp.ClientSession() as http,
    ):
        gateway.records.open("r")
        caller, client = Caller(http, gateway.http_url, "r"), TurnClient()
        await caller.ask(client, generate_body(5, 6, 7))
        await caller.ask(client, generate_body(5, 6, 7, 100, 101))
        await caller.ask(client, generate_body(5, 9))
        sent = [msgspec.msgpack.decode(data) for _, data in caller.sent[1:]]
        assert [ints(turn["new_ids"]).tolist() for turn in sent] == [[100, 101], [5, 9]]
        assert [turn["prefix"] and turn["prefix"]["num_tokens"] for turn in sent] == [3, None]
        assert [ints(g.prompt_ids).tolist() for g in node.generates] == [[5, 6, 7], [5, 6, 7, 100, 101], [5, 9]]


async def test_a_prefix_that_is_not_held_costs_one_more_request(open_gateway, node_keys):
    """A rollout that is not open holds nothing: the client sends the whole prompt after a 409, and gets its answer."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0") as node,
        aiohttp.ClientSession() as http,
    ):
        caller, client = Caller(http, gateway.http_url, "nobody"), TurnClient()
        first = await caller.ask(client, generate_body(5, 6))
        ids = [5, 6, *first["choices"][0]["token_ids"], 9]
        second = await caller.ask(client, generate_body(*ids))
        assert second["choices"][0]["token_ids"] == tokens_for(ids, 6)[0].tolist()
        sent = [msgspec.msgpack.decode(data) for _, data in caller.sent[1:]]
        assert [turn["prefix"] is None for turn in sent] == [False, True]
        assert len(node.generates) == 2
        assert gateway.metrics()["gateway/prefixes_missing"] == 1


@pytest.mark.parametrize("change", ["digest", "length", "session"])
async def test_another_prefix_is_never_used(open_gateway, node_keys, change):
    """A digest, a length or a session that is not the record's gets a 409 that asks for the whole prompt."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0") as node,
        aiohttp.ClientSession() as http,
    ):
        for session in ("r", "other"):
            gateway.records.open(session)
        await Caller(http, gateway.http_url, "r").ask_in_json(generate_body(5, 6, 7))
        await Caller(http, gateway.http_url, "other").ask_in_json(generate_body(5, 6, 8))
        ids = {"digest": [5, 6, 9], "length": [5] * 100, "session": [5, 6, 7]}[change]
        prefix = TokenHash().extended(pack_ints(ids)).prefix()
        turn = {"model": "policy", "prefix": prefix, "new_ids": pack_ints([4]), "sampling_params": {}}
        caller = Caller(http, gateway.http_url, "other" if change == "session" else "r")
        status, error = await caller.refused(turn)
        assert (status, error["code"]) == (409, PREFIX_MISSING)
        assert str(len(ids)) in error["message"] and "send the whole prompt" in error["message"]
        assert len(node.generates) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_ids": b"123"}, "new_ids has 3 bytes"),
        ({"new_ids": b""}, "the prompt is empty"),
        ({"new_ids": pack_ints([5, 1 << 20])}, "token id 1048576 is outside the vocabulary"),
        ({"new_ids": pack_ints([-1, 5])}, "token id -1 is outside the vocabulary"),
        ({"prefix": Prefix(num_tokens=3, digest=b"short")}, "$.prefix.digest"),
        ({"sampling_params": {"temperature": -1.0}}, "$.sampling_params.temperature"),
        ({"model": 7}, "$.model"),
    ],
)
async def test_a_malformed_packed_request_is_refused(open_gateway, changes, message):
    """Each gets a 400 that names the field and what was expected, in JSON."""
    async with open_gateway() as gateway, aiohttp.ClientSession() as http:
        turn = {"model": "policy", "prefix": None, "new_ids": pack_ints([5]), "sampling_params": {}} | changes
        status, error = await Caller(http, gateway.http_url, "r").refused(turn)
        assert status == 400 and message in error["message"]


async def test_a_gateway_that_knows_json_only_is_spoken_to_in_json():
    """An answer without the packed content type keeps the client at JSON."""
    sent = []

    async def send(data: bytes, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        sent.append((headers["Content-Type"], msgspec.json.decode(data)))
        return 200, JSON, b'{"choices": []}'

    client, body = TurnClient(), generate_body(5, 6)
    assert await client.ask("r", body, send) == (200, b'{"choices": []}')
    assert await client.ask("r", body, send) == (200, b'{"choices": []}')
    assert sent == [(JSON, body), (JSON, body)]


async def test_a_remembered_token_takes_four_bytes():
    """So the 2 million tokens that are remembered at most take 8 MiB."""

    async def send(data: bytes, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        answer = PackedAnswer(
            record_id="r",
            token_ids=pack_ints([9]),
            logprobs=pack_floats([0.0]),
            finish_reason="stop",
            version_spans=[],
            prompt_cached=0,
        )
        return 200, PACKED, msgspec.msgpack.encode(answer)

    client = TurnClient()
    for prompt in ([5] * 999, [5] * 999 + [9] * 1000):
        await client.ask("r", generate_body(*prompt), send)
    (remembered,) = client._conversations.values()
    assert remembered.tokens.nbytes == 4 * 2000
    assert remembered.hashed.num_tokens == 1999


async def test_what_a_client_remembers_is_bounded(open_gateway, node_keys):
    """The conversation that was used least recently is sent whole again."""
    async with (
        open_gateway() as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0"),
        aiohttp.ClientSession() as http,
    ):
        client = TurnClient(max_tokens=250)
        callers = {}
        for session in ("a", "b", "c", "a", "c"):
            if session not in callers:
                gateway.records.open(session)
                callers[session] = Caller(http, gateway.http_url, session)
            await callers[session].ask(client, generate_body(*[5] * 100))
        last = [msgspec.msgpack.decode(callers[session].sent[-1][1]) for session in ("a", "c")]
        assert [turn["prefix"] is None for turn in last] == [True, False]
