"""Write sampled answers in the words of Anthropic Messages and OpenAI Responses.

verifiers reads both, and relays a provider's answers to them; its training client writes chat completions only. Here an
answer becomes a provider's object (`answer_in`), and that object the events of a stream.

What a program sends back of an answer must be recognized (verifiers' graph hashes messages), so the recorded message
keeps what its dialect would read from the object.

A request is refused by name where verifiers drops what the policy cannot read, or fails with status 500.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from aiohttp import web
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import AnthropicDialect, ChatDialect, Dialect, ResponsesDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception import server
from verifiers.v1.types import Request, Response, Tool, ToolCall

_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_PARTS = {
    "message": ("content", "output_text"),
    "reasoning": ("content", ""),
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Kind of an item -> the field that grows in a stream, and the events that say so."""
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
_WRONG = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError, RecursionError)


class UnreadableError(ProviderError):
    """A request that is malformed, or whose content is no text."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status_code=400)


class Reader(Dialect[Any]):
    """Refuses a request that it cannot read whole."""

    field: ClassVar[str] = "messages"
    items: ClassVar[tuple[str, ...]] = ("message",)
    """What `field` lists."""
    parts: ClassVar[tuple[str, ...]] = ("text", "refusal")
    """What their content lists."""

    def parse_request(self, body: dict[str, Any]) -> Request:
        """Raise UnreadableError."""
        if not body.get(self.field):
            raise UnreadableError(f"the body has no {self.field}: send a JSON object with them")
        self._check(self.field, body[self.field], self.items)
        self._check("system", body.get("system"), self.parts)
        try:
            return super().parse_request(body)
        except _WRONG as error:
            raise UnreadableError(f"the request cannot be read: {type(error).__name__}: {error}") from error

    def _check(self, place: str, content: Any, kinds: tuple[str, ...]) -> None:
        if content is None or isinstance(content, str):
            return
        for index, part in enumerate(content if isinstance(content, list) else [content]):
            where = f"{place}[{index}]"
            if not isinstance(content, list) or not isinstance(part, dict):
                raise UnreadableError(f"{place} is or has a {type(part).__name__}: send a text, or a list of objects")
            kind = part.get("type") or ("message" if "role" in part else None)
            if kind not in kinds:
                raise UnreadableError(
                    f"{where} has the type {kind!a:.60}, which is none of {', '.join(kinds)}: the policy reads text "
                    "only; leave it out, or send in words what it shows"
                )
            self._check(f"{where}.content", part.get("content"), self.parts)
            if isinstance(part.get("output"), list):
                self._check(f"{where}.output", part["output"], self.parts)


class Chat(Reader, ChatDialect):
    """OpenAI's chat completions."""


class Messages(Reader, AnthropicDialect):
    """Anthropic Messages with tool calls and thinking in its stream."""

    parts = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")

    def stream_events(self, raw: dict[str, Any]) -> list[bytes]:
        return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in _message_events(raw)]


class Responses(Reader, ResponsesDialect):
    """OpenAI Responses with tool calls and reasoning in its stream."""

    field = "input"
    items = (
        *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
        *("custom_tool_call_output", "additional_tools", "tool_search_call", "tool_search_output"),
    )
    parts = ("input_text", "output_text", "reasoning_text", "text", "refusal")

    def stream_events(self, raw: dict[str, Any]) -> list[bytes]:
        events = enumerate(_response_events(raw))
        return [
            f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': number})}\n\n".encode()
            for number, event in events
        ]


DIALECTS: tuple[Dialect[Any], ...] = (Chat(), Responses(), Messages())


@functools.cache
def install() -> None:
    """Make verifiers' interception stream all three dialects, and refuse in their own words what it cannot read."""
    server.DIALECTS = DIALECTS
    stock = server.InterceptionServer.handle_request

    async def handle(self: Any, request: web.Request, dialect: Dialect[Any]) -> web.StreamResponse:
        started, session = time.time(), self.sessions.get(dialect.secret(request.headers))
        known = len(session.trace.nodes) if session else 0
        try:
            return await stock(self, request, dialect)
        except (UnreadableError, *_WRONG) as error:
            if session is None or len(session.trace.nodes) > known:  # It was read.
                raise
            if not isinstance(error, UnreadableError):
                error = UnreadableError(f"the body is no JSON object: {type(error).__name__}: {error}")
            self.record_call(session, dialect, None, started, error=error)
            return self._fail(session, dialect, error)

    server.InterceptionServer.handle_request = handle


def as_functions(messages: Sequence[Any], tools: Sequence[Tool]) -> tuple[list[Any], list[Tool]]:
    """Return a prompt as a chat template takes it: each tool is a function, a free text its argument `input`.

    Tools that a provider would run itself, such as a web search, are left out: nobody runs them here.
    """
    functions = [
        tool if tool.type == "function" else tool.model_copy(update={"type": "function", "parameters": _FREE_TEXT})
        for tool in tools
        if tool.type in ("function", "custom")
    ]
    return [_with_functions(message) for message in messages], functions


def _with_functions(message: Any) -> Any:
    calls = getattr(message, "tool_calls", None) or []
    if all(call.type == "function" for call in calls):
        return message
    texts = {call.id: json.dumps({"input": call.arguments}) for call in calls if call.type != "function"}
    calls = [
        call.model_copy(update={"type": "function", "arguments": texts.get(call.id, call.arguments)}) for call in calls
    ]
    return message.model_copy(update={"tool_calls": calls})


def answer_in(dialect: Dialect[Any], response: Response, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the provider's object of an answer; its recorded message becomes what the dialect reads from it."""
    if isinstance(dialect, ChatDialect):
        return serialize_completion(response, response.model)
    raw = _message(response) if isinstance(dialect, AnthropicDialect) else _response(response, tools)
    read = dialect.parse_response(dialect.validate_response(raw)).message
    response.message.provider_state, response.message.tool_calls = read.provider_state, read.tool_calls
    return raw


def _message(response: Response) -> dict[str, Any]:
    message, usage = response.message, response.usage
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content or ""})
    for call in message.tool_calls or []:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)})
    return {
        "id": f"msg_{response.id}",
        "type": "message",
        "role": "assistant",
        "model": response.model,
        "content": blocks,
        "stop_reason": _STOPS.get(response.finish_reason or "", "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.prompt_tokens if usage else 0,
            "output_tokens": usage.completion_tokens if usage else 0,
        },
    }


def _object(text: str) -> dict[str, Any]:
    """Return a call's arguments as the object that Anthropic's form needs; what is no object has none."""
    try:
        value = json.loads(text or "{}", parse_constant=str)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _message_events(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = raw | {"content": [], "stop_reason": None, "usage": raw["usage"] | {"output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(raw["content"]):
        kind = block["type"]
        empty = {"text": {"text": ""}, "thinking": {"thinking": ""}, "tool_use": {"input": {}}}[kind]
        delta = {
            "text": {"type": "text_delta", "text": block.get("text")},
            "thinking": {"type": "thinking_delta", "thinking": block.get("thinking")},
            "tool_use": {"type": "input_json_delta", "partial_json": json.dumps(block.get("input"))},
        }[kind]
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": raw["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": raw["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def _response(response: Response, tools: Sequence[Tool]) -> dict[str, Any]:
    message, usage = response.message, response.usage
    custom = {tool.name for tool in tools if tool.type == "custom"}
    output: list[dict[str, Any]] = []
    if message.reasoning_content:
        text = {"type": "reasoning_text", "text": message.reasoning_content}
        output.append({"type": "reasoning", "id": f"rs_{response.id}", "summary": [], "content": [text]})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content or "", "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{response.id}", "role": "assistant", "status": "completed"}
        output.append(item | {"content": [part]})
    output += [_call(call, f"fc_{response.id}_{index}", custom) for index, call in enumerate(message.tool_calls or [])]
    cut = response.finish_reason == "length"
    asked, sampled = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return {
        "id": f"resp_{response.id}",
        "object": "response",
        "created_at": response.created,
        "model": response.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked + sampled,
        },
    }


def _call(call: ToolCall, item_id: str, custom: set[str]) -> dict[str, Any]:
    shared = {"id": item_id, "call_id": call.id, "name": call.name, "status": "completed"}
    if call.name not in custom:
        return shared | {"type": "function_call", "arguments": call.arguments}
    text = _object(call.arguments).get("input", call.arguments)
    return shared | {"type": "custom_tool_call", "input": text if isinstance(text, str) else json.dumps(text)}


def _response_events(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    head = raw | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": head}
    for index, item in enumerate(raw["output"]):
        place, kind = {"output_index": index, "item_id": item["id"]}, item["type"]
        name, event = _PARTS[kind]
        empty = {name: "" if isinstance(item[name], str) else []}
        added = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if kind == "message":
            part, text = item["content"][0], place | {"content_index": 0}
            yield {"type": "response.content_part.added", **text, "part": part | {"text": ""}}
            yield {"type": f"response.{event}.delta", **text, "delta": part["text"], "logprobs": []}
            yield {"type": f"response.{event}.done", **text, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **text, "part": part}
        elif event:
            yield {"type": f"response.{event}.delta", **place, "delta": item[name]}
            yield {"type": f"response.{event}.done", **place, name: item[name], "name": item["name"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{raw['status']}", "response": raw}
