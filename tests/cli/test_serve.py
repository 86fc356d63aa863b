"""`composer serve` and `composer chat`: whole and streamed answers, the key, and who is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import pytest

from composer_prime.cli.serve_command import model_config, open_endpoint
from composer_prime.console import console_script

pytestmark = pytest.mark.process
TALK = [{"role": "user", "content": "Add 1 and 2."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[str, str]]:
    async with open_endpoint(model_config("tiny", ["--model.max_context", "1024"]), 0) as found:
        yield found


async def test_a_streamed_answer_is_the_whole_answer_in_pieces(endpoint):
    # One seed, so that both are the same answer.
    url, key = endpoint
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        assert "policy" in [model.id async for model in client.models.list()]
        ask = {"model": "policy", "messages": TALK, "temperature": 5.0, "seed": 3, "max_tokens": 40}
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert whole.choices[0].message.content.strip() == "".join(texts).strip()
        assert len([text for text in texts if text]) > 1
        assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len({chunk.id for chunk in chunks}) == 1


async def test_agents_dialects_say_what_chat_completions_say(endpoint):
    # Messages and Responses through their own clients, whole and streamed: the greedy answer of chat completions. Its
    # calls are streamed as well.
    url, key = endpoint
    function, few = TOOL["function"], {"temperature": 0.0}
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        ask = {"model": "policy", "messages": TALK, "tools": [TOOL], "max_tokens": 80, **few}
        answer = (await client.chat.completions.create(**ask)).choices[0]
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**ask, stream=True)]
        streamed = [call.function for choice in chunks for call in choice.delta.tool_calls or []]
        expected = answer.message
        assert streamed == [call.function for call in expected.tool_calls or []]
        assert chunks[-1].finish_reason == answer.finish_reason
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in expected.tool_calls or []]
        flat = {"type": "function", **function}
        ask = {"model": "policy", "input": TALK, "tools": [flat], "max_output_tokens": 80, **few}
        whole = await client.responses.create(**ask)
        events = [event async for event in await client.responses.create(**ask, stream=True)]
        for reply in (whole, events[-1].response):
            assert reply.output_text == (expected.content or "")
            found = [item for item in reply.output if item.type == "function_call"]
            assert [(item.name, json.loads(item.arguments)) for item in found] == calls
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as client:
        tool = {"name": function["name"], "input_schema": function["parameters"]}
        ask = {"model": "policy", "messages": TALK, "tools": [tool]}
        whole = await client.messages.create(**ask, max_tokens=80, extra_body=few)
        async with client.messages.stream(**ask, max_tokens=80, extra_body=few) as stream:
            streamed = await stream.get_final_message()
        for reply in (whole, streamed):
            assert [(item.name, item.input) for item in reply.content if item.type == "tool_use"] == calls
        assert (await client.messages.count_tokens(**ask)).input_tokens == whole.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**ask | {"model": "none"}, max_tokens=8)
        with pytest.raises(anthropic.BadRequestError, match=r"\(1024\).* 0 of system, \d\d+ of tools, 6\d+ of hist"):
            await client.messages.create(
                **ask | {"messages": [{"role": "user", "content": "go " * 2000}]}, max_tokens=8
            )


async def test_requests_without_the_key_and_bad_ones_are_refused(endpoint):
    # Streamed or not, with the gateway's status.
    url, key = endpoint
    async with httpx.AsyncClient(trust_env=False) as client:
        for stream in (False, True):
            body = {"model": "policy", "messages": TALK, "stream": stream}
            assert (await client.post(f"{url}/chat/completions", json=body)).status_code == 401
            headers = {"Authorization": f"Bearer {key}"}
            bad = await client.post(f"{url}/chat/completions", json=body | {"model": "none"}, headers=headers)
            assert bad.status_code == 404 and bad.json()["error"]["code"] == "model_not_found"


def test_chat_over_a_pipe_answers_each_line_and_ends():
    # In a process of its own, which also shows that the command ends cleanly.
    words = [*console_script("composer"), "chat", "tiny", "--max-tokens", "8"]
    text = "Add 1 and 2.\n/new\nAdd 2 and 2.\n/quit\n"
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def test_serve_prints_what_clients_need_and_ends_on_a_signal():
    words = [*console_script("composer"), "serve", "tiny", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=sys.stderr, text=True) as process:
        try:
            values = dict(process.stdout.readline().strip().split("=", 1) for _ in range(2))
            headers = {"Authorization": f"Bearer {values['OPENAI_API_KEY']}"}
            reply = httpx.get(f"{values['OPENAI_BASE_URL']}/models", headers=headers, trust_env=False)
            assert reply.status_code == 200
        finally:
            process.terminate()
