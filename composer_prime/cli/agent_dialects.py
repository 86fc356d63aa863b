"""What agents' programs say to `composer serve`: Anthropic Messages and OpenAI Responses, as chat completions and back.

Loaded at the first such request: verifiers takes seconds.
"""

from __future__ import annotations

import json
from typing import Any

from verifiers.v1.clients.train import tool_to_wire
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import message_to_wire

from composer_prime.errors import RequestError
from orchestrator.workers.dialects import DIALECTS, UnreadableError, answer_in, as_functions

_FORGOTTEN = ("previous_response_id", "conversation")
_SAME = {"temperature": "temperature", "top_p": "top_p", "stop_sequences": "stop", "max_tokens": "max_tokens"}
_SAME |= {"max_output_tokens": "max_tokens", "model": "model"}


def of_path(path: str) -> Dialect[Any]:
    """Return the dialect of a request's path."""
    return next(each for each in DIALECTS if path in (*each.routes, *each.aux_routes))


def completion_request(dialect: Dialect[Any], body: dict[str, Any]) -> dict[str, Any]:
    """Return a request as one for chat completions. Raises RequestError."""
    if told := [name for name in _FORGOTTEN if body.get(name)]:
        raise RequestError(f"{told[0]}: no conversation is kept here; send all of it")
    try:
        request = dialect.parse_request(body)
        messages, tools = as_functions(request.messages, request.tools or [])
        chat: dict[str, Any] = {"messages": [message_to_wire(message) for message in messages]}
        if tools and body.get("tool_choice") not in ("none", {"type": "none"}):
            chat["tools"] = [tool_to_wire(tool) for tool in tools]
    except (UnreadableError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise RequestError(str(error)) from None
    return chat | {theirs: body[name] for name, theirs in _SAME.items() if body.get(name) is not None}


def written(dialect: Dialect[Any], completion: dict[str, Any], body: dict[str, Any]) -> tuple[bytes, str]:
    """Return a chat completion in the dialect, whole or as the stream that the request asked for, and its type."""
    chat = DIALECTS[0]
    response = chat.parse_response(chat.validate_response(completion))
    raw = answer_in(dialect, response, dialect.parse_request(body).tools or [])
    if dialect.streaming(body):
        return b"".join(dialect.stream_events(raw)), "text/event-stream"
    return json.dumps(raw).encode(), "application/json"
