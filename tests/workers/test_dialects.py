"""Answers in the words of Anthropic Messages and OpenAI Responses, against verifiers' own readers of both."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st
from peer import Peer
from transformers import AutoTokenizer
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.graph import message_hash
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, Response, Tool, ToolCall, ToolMessage, Usage, UserMessage

from composer_prime.cli.agent_dialects import completion_request, of_path
from composer_prime.errors import RequestError
from orchestrator.chat_renderer import build_renderer
from orchestrator.workers.dialects import answer_in, as_functions, install
from orchestrator.workers.verifiers_adapter import GatewayClient, install_renderer, played_messages
from tests.scripted_node import POLICY

PATHS = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
TOOLS = [Tool(name="read", parameters={"type": "object"}), Tool(type="custom", name="patch")]
texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
arguments = st.dictionaries(st.text("abc", min_size=1), st.integers() | st.text("xyz "), max_size=2)
calls = st.lists(st.tuples(st.sampled_from(["read", "patch"]), arguments), max_size=3)


def answer(content: str | None, reasoning: str | None, made: list, finish: str) -> Response:
    tool_calls = [
        ToolCall(id=f"call_{index}", name=name, arguments=json.dumps(given if name == "read" else {"input": "a\nb"}))
        for index, (name, given) in enumerate(made)
    ]
    message = AssistantMessage(content=content, reasoning_content=reasoning, tool_calls=tool_calls or None)
    usage = Usage(prompt_tokens=7, completion_tokens=3)
    return Response(id="r1", created=5, model="policy", message=message, finish_reason=finish, usage=usage)


# What a program reads from the stream is what it reads from the whole object: the same text, reasoning, calls, reason
# of the end and usage. What it sends back is the recorded message: verifiers' graph finds it.
@pytest.mark.parametrize("path", PATHS)
@given(content=texts, reasoning=texts, made=calls, cut=st.booleans())
def test_an_answer_is_read_alike_whole_streamed_and_sent_back(path, content, reasoning, made, cut):
    dialect, finish = of_path(path), "length" if cut else "tool_calls" if made else "stop"
    response = answer(content, reasoning, made, finish)
    raw = answer_in(dialect, response, TOOLS)
    parser = dialect.stream_parser()
    for event in dialect.stream_events(raw):
        parser.feed(event)
    streamed, whole = parser.finish(), dialect.parse_response(dialect.validate_response(raw))
    for read in (whole, streamed):
        assert (read.message.content or None, read.finish_reason) == (content, finish)
        assert (read.message.reasoning_content or None) == (reasoning or None)
        assert [call.name for call in read.message.tool_calls or []] == [name for name, _ in made]
        assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (7, 3)
        assert message_hash(read.message) == message_hash(response.message)


# A tool of free text, such as Codex's patches, is a function with one argument for the template, and its call is free
# text again for the program. A tool that a provider runs is not offered.
def test_a_free_text_is_an_argument_and_back():
    dialect = of_path("/v1/responses")
    response = answer(None, None, [("patch", {})], "tool_calls")
    (item,) = answer_in(dialect, response, TOOLS)["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "a\nb")
    history = [UserMessage(content="go"), response.message, ToolMessage(tool_call_id="call_0", content="done")]
    messages, tools = as_functions(history, [*TOOLS, Tool(type="web_search", name="web_search")])
    assert [(tool.type, tool.name) for tool in tools] == [("function", "read"), ("function", "patch")]
    (call,) = messages[1].tool_calls
    assert (call.type, json.loads(call.arguments)) == ("function", {"input": "a\nb"})
    assert messages[0] is history[0] and messages[2] is history[2]


@asynccontextmanager
async def worker_door(model_path: str, **peers: Any) -> AsyncIterator[tuple[httpx.AsyncClient, vf.Trace]]:
    """A worker's interception in front of a gateway, a client with the key of a session there, and its trace."""
    install()
    chosen, renderer = build_renderer(model_path, None)
    install_renderer(model_path, chosen, renderer)
    async with Peer(**peers) as peer, InterceptionServer() as server:
        config = vf.TrainClientConfig(base_url=peer.url, renderer=chosen, renderer_model_name=model_path)
        server.clients[config.model_dump_json()] = client = GatewayClient(config, 1024)
        server.stack.push_async_callback(client.close)
        task, agent = TraceTask(type="Task", data=vf.TaskData(idx=0)), AgentInfo(config=AgentConfig())
        trace, context = vf.Trace(task=task, agent=agent), vf.ModelContext(model="policy", client=config)
        key, _ = server.register(RolloutSession(ctx=context, trace=trace))
        headers = {"Authorization": f"Bearer {key}", "x-api-key": key}
        async with httpx.AsyncClient(base_url=server.base_url, headers=headers, trust_env=False) as asking:
            yield asking, trace


def said(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(parts)}]


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NAMESPACED = [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
SHOWN = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:,"}]}


# What cannot be read is refused by name, in the words of the dialect, by `composer serve` (where chat completions go to
# the gateway) and by a worker, whose session records it and answers on.
@pytest.mark.process
@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": said({"type": "text", "text": "See."}, {"type": "image_url"})}, "[1] has the type 'image_"),
        (CHAT, {"messages": said({"type": "input_audio"})}, "'input_audio'"),
        (CHAT, {"messages": said({"type": "file"}, role="tool")}, "'file'"),
        (CHAT, {"messages": 5}, "int"),
        (CHAT, {"messages": said({"type": "text", "text": "x"}), "tools": 5}, "int"),
        (CHAT, [], "JSON object"),
        (MESSAGES, {"messages": said(IMAGE)}, "messages[0].content[0] has the type 'image'"),
        (MESSAGES, {"messages": said({"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]})}, "'image'"),
        (MESSAGES, {"messages": said({"type": "document"})}, "'document'"),
        (MESSAGES, {"messages": "x", "system": [IMAGE]}, "system[0]"),
        (MESSAGES, {"messages": "x"}, "str"),
        (MESSAGES, {}, "no messages"),
        (RESPONSES, {"input": said({"type": "input_file"})}, "'input_file'"),
        (RESPONSES, {"input": [SHOWN]}, "input[0].output[0] has the type 'input_image'"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}, "'item_reference'"),
        (RESPONSES, {"input": 5}, "int"),
        (RESPONSES, {"input": "go", "tools": NAMESPACED}, "namespace"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(path, body, named, model_path):
    if path != CHAT:
        with pytest.raises(RequestError) as refused:
            completion_request(of_path(path), body)
        assert named in str(refused.value)
    async with worker_door(model_path) as (client, trace):
        reply = await client.post(path, json=body)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"]
        assert reply.json().get("type") == ("error" if path == MESSAGES else None)
        assert [call.error.status_code for call in trace.calls] == [400]
        good = {"input": "Go."} if path == RESPONSES else {"messages": [{"role": "user", "content": "Go."}]}
        assert (await client.post(path, json=good)).status_code == 200 and trace.num_turns == 1


# A prompt that is too long is refused in all dialects with the tokens of its parts, as the model's own template has it.
@pytest.mark.process
@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_beyond_the_context_is_refused_with_its_parts(path):
    tokenizer: Any = AutoTokenizer.from_pretrained(POLICY)
    function = {"name": "look", "description": "Look closely. " * 20, "parameters": {"type": "object"}}
    wrapped = {"type": "function", "function": function}
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go. " * 99}
    body = {
        CHAT: {"messages": [system, user], "tools": [wrapped]},
        MESSAGES: {
            "messages": [user],
            "system": system["content"],
            "tools": [{**function, "input_schema": function["parameters"]}],
        },
        RESPONSES: {"instructions": system["content"], "input": [user], "tools": [{"type": "function", **function}]},
    }[path]

    def count(messages, tools=None):
        return len(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"])

    whole, bare, history = count([system, user], [wrapped]), count([system, user]), count([user])
    async with worker_door(POLICY, max_model_len=64) as (client, _):
        reply = await client.post(path, json=body)
    told = [int(number) for number in re.findall(r"\d+", reply.json()["error"]["message"])]
    assert reply.status_code == 400 and told == [whole, 64, bare - history, whole - bare, history]


# A call on the side has no tools where another has, no answer before it, and no line that comes back: a title is one. A
# plan that is carried out and a last word without tools are not, nor is anything where no call has tools.
@pytest.mark.process
async def test_calls_on_the_side_are_marked():
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with worker_door(POLICY) as (client, trace):

        async def ask(*messages: tuple[str, str], tools: bool = False) -> str:
            listed = [{"role": role, "content": content} for role, content in messages]
            body = {"messages": listed} | ({"tools": [tool]} if tools else {})
            return (await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]

        await ask(("user", "Give it a title."))
        assert not any(each.on_side for each in played_messages([trace]))
        plan = await ask(("user", "Plan it."))
        done = await ask(("user", f"Do so: {plan}"), tools=True)
        await ask(("user", f"Do so: {plan}"), ("assistant", done), ("user", "Sum up."))
    asked = [each for each in played_messages([trace]) if each.call is not None]
    assert [each.on_side for each in asked] == [True, False, False, False]


# A client that drops its stream and asks again gets the answer that was sampled for it. Two conversations with one key
# are two branches; another key is refused.
@pytest.mark.process
@pytest.mark.parametrize("path", PATHS)
async def test_dropped_streams_and_shared_keys_lose_no_turn(path, model_path):
    def body(text: str) -> dict[str, Any]:
        talk = {"input": text} if path == RESPONSES else {"messages": [{"role": "user", "content": text}]}
        return talk | {"stream": True, "max_tokens": 9}

    async with worker_door(model_path, delay_s=0.3) as (client, trace):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(path, json=body("Go."), timeout=0.1)
        again, other = await asyncio.gather(
            client.post(path, json=body("Go."), headers={"x-stainless-retry-count": "1"}),
            client.post(path, json=body("Come.")),
        )
        assert (again.status_code, other.status_code) == (200, 200) and again.text != other.text
        assert trace.num_turns == len(trace.branches) == 2
        wrong = {"Authorization": "Bearer none", "x-api-key": "none"}
        refused = await client.post(path, json=body("Go."), headers=wrong)
        assert refused.status_code == 401 and "unauthorized" in refused.json()["error"]["message"]


def test_serve_keeps_no_conversation():
    with pytest.raises(RequestError, match="previous_response_id"):
        completion_request(of_path(RESPONSES), {"input": "go", "previous_response_id": "r"})
