"""Events of the OpenHands software-agent-sdk (version 1): each has a `kind`."""

from __future__ import annotations

from typing import Any

from composer_prime.traces import TraceState
from orchestrator.ingest.blocks import objects, string, text_of
from orchestrator.ingest.builder import Call, TraceBuilder
from orchestrator.ingest.conversation import arguments_of

Taken = tuple[TraceState | None, str | None]
"""(the state of a turn that ended, why the event was skipped or None)."""
_ASIDE = {
    "ConversationStateUpdateEvent",
    "PauseEvent",
    "CondensationRequest",
    "CondensationSummaryEvent",
    "LLMCompletionLogEvent",
    "TokenEvent",
    "ConversationErrorEvent",
    "StreamingDeltaEvent",
    "HookExecutionEvent",
}
_RESULTS = {"ObservationEvent", "AgentErrorEvent", "UserRejectObservation"}


def take(builder: TraceBuilder, event: dict[str, Any]) -> Taken:
    """Take in one event."""
    kind = string(event.get("kind"))
    if kind == "ActionEvent":
        return _action(builder, event)
    if kind in _RESULTS:
        return _result(builder, event)
    if kind == "MessageEvent":
        return _message(builder, event)
    if kind == "SystemPromptEvent":
        builder.tools.given([_openai_tool(tool) for tool in objects(event.get("tools"))])
        # As the sdk shows it: the static prompt, then what belongs to this conversation.
        prompt = text_of([event.get("system_prompt"), event.get("dynamic_context")])
        return builder.context("system", prompt, mark=_id(event)), None
    if kind == "Condensation":
        listed = event.get("forgotten_event_ids")
        forgotten = [str(mark) for mark in listed] if isinstance(listed, list) else []
        return builder.forget(forgotten, text_of(event.get("summary")), f"{_id(event)}-summary"), None
    _note_model(builder, event)
    return None, f"event {kind}" if kind in _ASIDE else "unknown event kind"


def _action(builder: TraceBuilder, event: dict[str, Any]) -> Taken:
    called = event.get("tool_call")
    call = called if isinstance(called, dict) else {}
    name = call.get("name") or event.get("tool_name")
    call_id = call.get("id") or event.get("tool_call_id")
    if not isinstance(name, str) or not isinstance(call_id, str):
        return None, "action without a tool call"
    state = builder.assistant(
        text_of(event.get("thought")),
        [Call(call_id=call_id, name=name, arguments=arguments_of(call.get("arguments")))],
        _thoughts(event),
        key=_key(event),
        mark=_id(event),
    )
    return state, None


def _result(builder: TraceBuilder, event: dict[str, Any]) -> Taken:
    seen = event.get("observation")
    observation = seen if isinstance(seen, dict) else {}
    failed = event.get("error") or event.get("rejection_reason")
    text = text_of(observation.get("content") or observation.get("output")) or str(failed or "")
    exit_code = observation.get("exit_code")
    wrong = observation.get("is_error") is True or bool(failed) or (isinstance(exit_code, int) and exit_code > 0)
    paired = builder.tool_result(
        str(event.get("tool_call_id")), text, error=(text or "error") if wrong else None, mark=_id(event)
    )
    return None, None if paired else "result without its call"


def _message(builder: TraceBuilder, event: dict[str, Any]) -> Taken:
    said = event.get("llm_message")
    message = said if isinstance(said, dict) else {}
    text = "\n\n".join(filter(None, [text_of(message.get("content")), text_of(event.get("extended_content"))]))
    if message.get("role") == "assistant" or event.get("source") == "agent":
        thoughts = _thoughts(message) or _thoughts(event)
        return builder.assistant(text, (), thoughts, key=_key(event), mark=_id(event)), None
    if message.get("role") in ("user", "system"):
        return builder.context(message["role"], text, mark=_id(event)), None
    return None, "message without a role"


def _openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form; the sdk also writes its own, which has the schema of MCP tools alone: its own tools
    name a class (`action_type`), and get the arguments that the agent gives them."""
    if "function" in tool:
        return tool
    listed = tool.get("mcp_tool")
    served = listed if isinstance(listed, dict) else {}
    schema = tool.get("parameters") or tool.get("input_schema") or served.get("inputSchema") or tool.get("action_type")
    function = {
        "name": tool.get("name") or served.get("name") or tool.get("title"),
        "description": str(tool.get("description") or ""),
        **({"parameters": schema} if isinstance(schema, dict) else {}),
    }
    return {"type": "function", "function": function}


def _thoughts(event: dict[str, Any]) -> str:
    blocks = [string(block.get("thinking")) or "" for block in objects(event.get("thinking_blocks"))]
    return string(event.get("reasoning_content")) or "\n\n".join(blocks)


def _note_model(builder: TraceBuilder, event: dict[str, Any]) -> None:
    """Statistics name the model that acts; no other event does."""
    value: Any = event.get("value")
    for key in ("usage_to_metrics", "default", "model_name"):
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, str) and value:
        builder.names_model(value)


def _id(event: dict[str, Any]) -> str | None:
    return string(event.get("id"))


def _key(event: dict[str, Any]) -> str | None:
    """Calls of one answer share the response's id."""
    return string(event.get("llm_response_id")) or None
