"""Answers in the words of Anthropic Messages and OpenAI Responses, against verifiers' own readers of both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifiers.v1.graph import message_hash
from verifiers.v1.types import AssistantMessage, Response, Tool, ToolCall, ToolMessage, Usage, UserMessage

from composer_prime.cli.agent_dialects import completion_request, of_path
from composer_prime.errors import RequestError
from orchestrator.workers.dialects import answer_in, as_functions

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


NAMESPACED = [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]


# What `composer serve` cannot take is refused with words, whatever it is.
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {}),
        ("/v1/messages", {"messages": 5}),
        ("/v1/messages", {"messages": "x"}),
        ("/v1/responses", {"input": 5}),
        ("/v1/responses", {"input": "go", "previous_response_id": "r"}),
        ("/v1/responses", {"input": "go", "tools": NAMESPACED}),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(path, body):
    with pytest.raises(RequestError):
        completion_request(of_path(path), body)
