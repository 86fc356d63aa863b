"""A list of messages in OpenAI's form, its older one or Anthropic's, or near them, to turns.

calls    `tool_calls`, `function_call`, or blocks of type tool_use
results  messages of role tool or function, or blocks of type tool_result in the user's
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from composer_prime.errors import ComposerError
from composer_prime.traces import TraceState
from orchestrator.ingest.blocks import objects, string, text_of
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
_UNREAD = re.compile(r"[_-](?:use|call|result|output)$")
"""Types of blocks that hold a call or a result, by how they end."""


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
    role = _role(message)
    if role in _AS_CONTEXT:
        return _context(builder, message, _AS_CONTEXT[role])
    if role in _AS_ASSISTANT:
        return builder.assistant(text_of(_content(message)), calls_of(message), _reasoning(message))
    if role in _AS_TOOL:
        return _result(builder, message, text_of(_content(message)))
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
    calls = [_call(written, index) for index, written in enumerate(_listed_calls(message))]
    return [call for call in calls if call is not None]


def arguments_of(written: Any) -> dict[str, Any] | str:
    """Arguments as an object where they are one, else the text as the model wrote it."""
    if isinstance(written, dict):
        return written
    if not isinstance(written, str):
        return ""
    value = parse(written.encode("utf-8", "replace")) if written.strip() else {}
    return value if isinstance(value, dict) and not isinstance(value, Bad) else written


def _context(builder: TraceBuilder, message: dict[str, Any], role: str) -> TraceState | None:
    """A message to the agent. Results among its blocks go to their calls; the agent saw the rest, whoever asked."""
    content, results = _content(message), _blocks(message, "tool_result")
    paired = [block for block in results if _paired(builder, block)]
    text = text_of([block for block in content if block not in paired] if isinstance(content, list) else content)
    if paired and not text.strip():
        return None
    return builder.context(role, text, error=failure(text) if role == "user" and not paired else None)


def _paired(builder: TraceBuilder, block: dict[str, Any]) -> bool:
    text, call_id = text_of(block.get("content")), block.get("tool_use_id")
    error = (text or "error") if block.get("is_error") is True else failure(text)
    return builder.tool_result(str(call_id) if call_id else builder.unanswered() or "", text, error=error)


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
    content = _content(message)
    if not (content is None or isinstance(content, str | list)):
        raise Unreadable("a message's content is neither text nor a list")
    if role in _AS_ASSISTANT and any(_call(written, 0) is None for written in _listed_calls(message)):
        raise Unreadable("a message holds a call without a name")
    known = "tool_use" if role in _AS_ASSISTANT else "tool_result"
    if any(_UNREAD.search(str(block.get("type"))) for block in objects(content) if block.get("type") != known):
        raise Unreadable("a message holds a call or a result in an unknown form")


def _listed_calls(message: dict[str, Any]) -> list[Any]:
    """As they are written, in the form that the message uses."""
    listed, older = message.get("tool_calls"), message.get("function_call")
    calls = [call for call in listed if call is not None] if isinstance(listed, list) else []
    named = [older] if isinstance(older, dict) and older.get("name") else []
    return calls or _blocks(message, "tool_use") or named


def _call(written: Any, index: int) -> Call | None:
    function = written.get("function", written) if isinstance(written, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    call_id = written.get("id")
    return Call(
        call_id=call_id if isinstance(call_id, str) and call_id else f"call_{index}",
        name=function["name"],
        arguments=arguments_of(function.get("arguments", function.get("input"))),
    )


def _blocks(message: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [block for block in objects(_content(message)) if block.get("type") == kind]


def _reasoning(message: dict[str, Any]) -> str:
    thoughts = [string(block.get("thinking")) or "" for block in _blocks(message, "thinking")]
    return string(message.get("reasoning_content")) or "\n\n".join(thoughts)


def _content(message: dict[str, Any]) -> Any:
    return message.get("content", message.get("value"))


def _role(message: dict[str, Any]) -> str:
    role = message.get("role", message.get("from"))
    return role if isinstance(role, str) else ""
