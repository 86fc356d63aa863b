"""Whatever arrives over HTTP, the answer is a 4xx with OpenAI's error body: never a stack trace."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from gateway_made import generate_body, get, post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node_peer import PeerNode

GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
CHAT_BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def changed(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (body | changes).items() if value is not ...}


WRONG = [
    (GENERATE, changed(generate_body(5), model="gpt-4"), 404, "gpt-4"),
    (GENERATE, changed(generate_body(5), model=...), 400, "model"),
    (GENERATE, changed(generate_body(5), token_ids="abc"), 400, "token_ids"),
    (GENERATE, changed(generate_body(5), token_ids=[1.5]), 400, "token_ids"),
    (GENERATE, changed(generate_body(5), token_ids=[-1]), 400, "token_ids"),
    (GENERATE, changed(generate_body(5), token_ids=[2**40]), 400, "token_ids"),
    (GENERATE, changed(generate_body(5), token_ids=[100_000]), 400, "100000 is outside the vocabulary"),
    (GENERATE, changed(generate_body(5), token_ids=[]), 400, "empty"),
    (GENERATE, generate_body(*[5] * 600), 400, "Prompt length (600) exceeds maximum context length (512)"),
    (GENERATE, generate_body(*[5] * 512), 400, "Prompt length (512) exceeds maximum context length (512)"),
    (GENERATE, generate_body(5, temperature=-1), 400, "temperature"),
    (GENERATE, generate_body(5, temperature="hot"), 400, "temperature"),
    (GENERATE, generate_body(5, top_p=0), 400, "top_p"),
    (GENERATE, generate_body(5, max_tokens=0), 400, "max_tokens"),
    (GENERATE, generate_body(5, seed=2**70), 400, "seed"),
    (GENERATE, generate_body(5, n=2), 400, "n is 2"),
    (GENERATE, generate_body(5, presence_penalty=0.5), 400, "presence_penalty is 0.5"),
    (GENERATE, generate_body(5, stop=[""]), 400, "stop"),
    (GENERATE, changed(generate_body(5), content_parts=[{"type": "image_url"}]), 400, "images"),
    (GENERATE, changed(generate_body(5), stream=True), 400, "stream"),
    (CHAT, changed(CHAT_BODY, messages=[]), 400, "messages"),
    (CHAT, changed(CHAT_BODY, messages="hi"), 400, "messages"),
    (CHAT, changed(CHAT_BODY, messages=[{"content": "x"}]), 400, "role"),
    (CHAT, changed(CHAT_BODY, messages=[{"role": "user", "content": 7}]), 400, "content"),
    (CHAT, changed(CHAT_BODY, messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "image_url"),
    (CHAT, changed(CHAT_BODY, messages=[{"role": "user", "content": "\ud800"}]), 400, "messages"),
    (CHAT, changed(CHAT_BODY, tools=[{"nonsense": 1}]), None, ""),
    (CHAT, changed(CHAT_BODY, tool_choice="required"), 400, "tool_choice"),
    (CHAT, changed(CHAT_BODY, top_logprobs=3), 400, "top_logprobs"),
    (CHAT, changed(CHAT_BODY, logprobs=True), 400, "logprobs"),
    (CHAT, changed(CHAT_BODY, stream=True), 400, "stream"),
    (CHAT, changed(CHAT_BODY, response_format={"type": "json_object"}), 400, "json_object"),
    (CHAT, changed(CHAT_BODY, messages=[{"role": "user", "content": "word " * 2000}]), 400, "context length (512)"),
    ("/v2/nothing", {}, 404, "/v2/nothing"),
]


@pytest.mark.timeout(60)
async def test_wrong_requests_get_a_clear_4xx(open_gateway, node_keys):
    """Each message names the value, and OpenAI's error fields are there."""
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        for path, body, status, complaint in WRONG:
            got, reply = await post(gateway.http_url, body, path)
            if status is None:
                assert got < 500, (path, body, reply)
                continue
            assert got == status, (path, body, reply)
            assert complaint in reply["error"]["message"], (path, body, reply)
            assert set(reply["error"]) == {"message", "type", "param", "code"}
        assert len(node.generates) <= 1
        assert (await post(gateway.http_url, generate_body(5)))[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["model", "token_ids", "sampling_params", "messages", "tools", "stop", "seed", "temperature", "n"]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6).map(
        lambda body: json.dumps({"model": "policy", "max_tokens": 4} | body).encode()
    ),
    path=st.sampled_from([GENERATE, CHAT]),
)
def test_no_body_gets_a_5xx(fuzzed, raw, path):
    """Random bytes, random JSON and random values of the real fields."""
    status, reply = fuzzed(path, raw)
    assert status == 200 or 400 <= status < 500, (status, reply, raw)


@pytest.fixture
def fuzzed(open_gateway, node_keys):
    """Posts bytes to one gateway with one node that lives as long as the test."""
    loop = asyncio.new_event_loop()
    opened = open_gateway()
    gateway = loop.run_until_complete(opened.__aenter__())
    node = PeerNode(gateway.node_endpoint, node_keys, "n0")
    loop.run_until_complete(node.__aenter__())

    async def send(path: str, raw: bytes) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.post(gateway.http_url + path, data=raw) as reply:
            return reply.status, await reply.text()

    yield lambda path, raw: loop.run_until_complete(send(path, raw))
    loop.run_until_complete(node.vanish())
    loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize("header", ["X-Session-ID", "Authorization"])
async def test_a_header_that_is_no_text_is_the_clients_error(open_gateway, node_keys, monkeypatch, header):
    """Bytes that are no UTF-8 in a header get a 4xx, and nothing of the request stays behind."""
    if header == "Authorization":
        monkeypatch.setenv("COMPOSER_GATEWAY_TOKEN", "s3cret")
    body = json.dumps(generate_body(5)).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{header}: "
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0"):
        port = int(gateway.http_url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"\xff\xfe\r\n\r\n" + body)
        answer = await asyncio.wait_for(reader.read(), 100)
        writer.close()
        assert answer.split()[1] in (b"400", b"401"), answer[:200]
        assert not gateway.router.open and not gateway.router.queue


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_does_not_decode_is_the_clients_error(open_gateway, caplog, encoding):
    """It gets a 400 that names the encoding, and the log has no error."""
    headers = {"Content-Encoding": encoding}
    async with open_gateway() as gateway, aiohttp.ClientSession() as session:
        for path in (GENERATE, CHAT):
            async with session.post(gateway.http_url + path, data=b"garbage", headers=headers) as reply:
                assert reply.status == 400
                assert f"Content-Encoding says: '{encoding}'" in (await reply.json())["error"]["message"]
        assert (await get(gateway.http_url + "/v1/models"))[0] == 200  # The gateway goes on.
    assert "Traceback" not in caplog.text


async def test_a_token_is_asked_for_where_one_is_set(open_gateway, node_keys, monkeypatch):
    """With COMPOSER_GATEWAY_TOKEN in the environment, requests without it are 401."""
    monkeypatch.setenv("COMPOSER_GATEWAY_TOKEN", "s3cret")
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0"):
        status, reply = await post(gateway.http_url, generate_body(5))
        assert status == 401 and "COMPOSER_GATEWAY_TOKEN" in reply["error"]["message"]
        assert (await post(gateway.http_url, generate_body(5), Authorization="Bearer s3cret"))[0] == 200
