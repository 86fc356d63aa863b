"""A list of messages in OpenAI's form, or near it, to turns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from composer_prime.errors import ComposerError
from composer_prime.traces import TraceState
from orchestrator.ingest.blocks import string, text_of
from orchestrator.ingest.builder import Call, TraceBuilder
from orchestrator.ingest.reading import Bad, parse

_FAILED = re.compile(
    r"<returncode>\s*(?!0\s*<)-?\d+\s*</returncode>|exit code:? (?!0\b)-?\d+|^(?:ERROR|Error|Traceback \(most recent)",
    re.MULTILINE,
)
_AS_CONTEXT = {"system": "system", "developer": "system", "user": "user", "human": "user"}
_AS_ASSISTANT = {"assistant", "gpt", "ai", "model"}
_AS_TOOL = {"tool", "function", "observation"}
_LEFT_OUT = {"exit"}
"""Roles that tell of the run, not to the agent (mini-swe-agent writes how a run ended as a message)."""


class Unreadable(ComposerError, ValueError):
    """Messages that make no conversation; data, counted, never a crash."""


def check(messages: list[Any]) -> None:
    """Raises Unreadable, which says why `feed` cannot take these messages in."""
    for message in messages:
        _check(message)


def feed(builder: TraceBuilder, messages: list[Any]) -> Iterator[TraceState]:
    """The states of checked messages, the last turn's included."""
    for message in messages:
        state = step(builder, message)
        if state is not None:
            yield state
    state = builder.close()
    if state is not None:
        yield state


def step(builder: TraceBuilder, message: dict[str, Any]) -> TraceState | None:
    """Take in one checked message; the state of the turn that it ends."""
    role, text = _role(message), text_of(message.get("content", message.get("value")))
    if role in _AS_CONTEXT:
        return builder.context(_AS_CONTEXT[role], text, error=failure(text) if role == "user" else None)
    if role in _AS_ASSISTANT:
        return builder.assistant(text, calls_of(message), string(message.get("reasoning_content")) or "")
    if role in _AS_TOOL:
        return _result(builder, message, text)
    return None


def failure(text: str) -> str | None:
    """`text` when it reports that a command or tool failed."""
    return text if _FAILED.search(text[:20_000]) else None


def readable(message: Any) -> bool:
    """Whether `step` can take the message in."""
    try:
        _check(message)
    except Unreadable:
        return False
    return True


def calls_of(message: dict[str, Any]) -> list[Call]:
    """The tool calls of an assistant message; what is no call is left out."""
    calls = []
    listed = message.get("tool_calls")
    for index, call in enumerate(listed if isinstance(listed, list) else []):
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            call_id = call.get("id")
            calls.append(
                Call(
                    call_id=call_id if isinstance(call_id, str) and call_id else f"call_{index}",
                    name=function["name"],
                    arguments=arguments_of(function.get("arguments")),
                )
            )
    return calls


def arguments_of(written: Any) -> dict[str, Any] | str:
    """Arguments as an object where they are one, else the text as the model wrote it."""
    if isinstance(written, dict):
        return written
    if not isinstance(written, str):
        return ""
    value = parse(written.encode("utf-8", "replace")) if written.strip() else {}
    return value if isinstance(value, dict) and not isinstance(value, Bad) else written


def _result(builder: TraceBuilder, message: dict[str, Any], text: str) -> TraceState | None:
    listed = message.get("tool_call_ids")
    call_id = message.get("tool_call_id") or (listed[0] if isinstance(listed, list) and listed else None)
    error = (text or "error") if message.get("is_error") is True or message.get("error") else failure(text)
    if builder.tool_result(str(call_id) if call_id else builder.unanswered() or "", text, error=error):
        return None
    # The agent saw this, whoever asked for it.
    return builder.context("user", text, error=error)


def _check(message: Any) -> None:
    if not isinstance(message, dict):
        raise Unreadable("a message is not an object")
    role = _role(message)
    if role not in _AS_CONTEXT and role not in _AS_ASSISTANT and role not in _AS_TOOL and role not in _LEFT_OUT:
        raise Unreadable("a message has an unknown role")
    content = message.get("content", message.get("value"))
    if not (content is None or isinstance(content, str | list)):
        raise Unreadable("a message's content is neither text nor a list")


def _role(message: dict[str, Any]) -> str:
    role = message.get("role", message.get("from"))
    return role if isinstance(role, str) else ""
