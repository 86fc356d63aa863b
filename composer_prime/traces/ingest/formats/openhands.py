"""Read OpenHands traces: events of its software-agent-sdk, which have a `kind`.

    *.jsonl of events, a list of them, a conversation folder (base_state.json, events/*.json)   one trace
    output.jsonl of the benchmarks, a `history` of events a line                               a trace a line

Several calls of one answer are several events. A condensation forgets events, and its summary replaces the previous
one. Events of OpenHands before the sdk are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from composer_prime.traces.ingest.conversation import TraceBuilder, arguments_of, feed
from composer_prime.traces.ingest.trace_file import (
    Bad,
    Call,
    FileStart,
    TraceFile,
    at,
    document,
    object_at,
    objects,
    string,
    text_of,
)
from composer_prime.traces.records import TraceState

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
_KINDS = _ASIDE | _RESULTS | {"ActionEvent", "MessageEvent", "SystemPromptEvent", "Condensation"}


def _take(builder: TraceBuilder, event: dict[str, Any]) -> str | None:
    """Process one event. Return why it is skipped, if it is."""
    kind = string(event.get("kind"))
    if kind == "ActionEvent":
        return _action(builder, event)
    if kind in _RESULTS:
        return _result(builder, event)
    if kind == "MessageEvent":
        return _message(builder, event)
    if kind == "SystemPromptEvent":
        builder.list_tools([_openai_tool(tool) for tool in objects(event.get("tools"))])
        # The sdk shows the static prompt first, then the part of this conversation.
        prompt = text_of([event.get("system_prompt"), event.get("dynamic_context")])
        return builder.context("system", prompt, mark=_id(event))
    if kind == "Condensation":
        listed = event.get("forgotten_event_ids")
        forgotten = [str(mark) for mark in listed] if isinstance(listed, list) else []
        return builder.forget(forgotten, text_of(event.get("summary")), f"{_id(event)}-summary")
    # No other event names the model.
    model = string(at(event, "value", "usage_to_metrics", "default", "model_name"))
    if model:
        builder.names_model(model)
    return f"event {kind}" if kind in _ASIDE else "unknown event kind"


def _action(builder: TraceBuilder, event: dict[str, Any]) -> str | None:
    call = object_at(event, "tool_call")
    name = call.get("name") or event.get("tool_name")
    call_id = call.get("id") or event.get("tool_call_id")
    if not isinstance(name, str) or not isinstance(call_id, str):
        return "action without a tool call"
    calls = [Call(call_id=call_id, name=name, arguments=arguments_of(call.get("arguments")))]
    builder.assistant(text_of(event.get("thought")), calls, _thoughts(event), key=_key(event), mark=_id(event))
    return None


def _result(builder: TraceBuilder, event: dict[str, Any]) -> str | None:
    observation = object_at(event, "observation")
    metadata = object_at(observation, "metadata")
    text, failed = _shown(observation), event.get("error")
    if event.get("rejection_reason"):
        text = f"Action rejected: {event['rejection_reason']}"
    text = text_of([text or str(failed or ""), event.get("extended_content")])
    exit_code = observation.get("exit_code", metadata.get("exit_code"))
    wrong = (
        bool(failed or event.get("rejection_reason") or observation.get("error"))
        or observation.get("is_error") is True
        or (isinstance(exit_code, int) and exit_code > 0)
    )
    paired = builder.tool_result(
        str(event.get("tool_call_id")), text, error=(text or "error") if wrong else None, mark=_id(event)
    )
    return None if paired else "result without its call"


def _shown(observation: dict[str, Any]) -> str:
    """Return an observation's text as the sdk shows it to the model."""
    error = observation.get("error")
    if isinstance(error, str) and error:  # the editor of the sdk's first releases, which gives no output then
        return error
    output = text_of(observation.get("content") or observation.get("output"))
    text = _command_result(output, object_at(observation, "metadata"))
    if error is True:
        return f"[There was an error during command execution.]\n{text}"
    return f"[An error occurred during execution.]\n{text}" if observation.get("is_error") is True else text


def _command_result(output: str, metadata: dict[str, Any]) -> str:
    """Return a command's output with what the shell told of itself."""
    if not metadata:
        return output
    shown = f"{string(metadata.get('prefix')) or ''}{output}{string(metadata.get('suffix')) or ''}"
    if metadata.get("working_dir"):
        shown += f"\n[Current working directory: {metadata['working_dir']}]"
    if metadata.get("py_interpreter_path"):
        shown += f"\n[Python interpreter: {metadata['py_interpreter_path']}]"
    if metadata.get("exit_code", -1) != -1:  # -1 means that it still runs
        shown += f"\n[Command finished with exit code {metadata['exit_code']}]"
    return shown


def _message(builder: TraceBuilder, event: dict[str, Any]) -> str | None:
    message = object_at(event, "llm_message")
    text = "\n\n".join(filter(None, [text_of(message.get("content")), text_of(event.get("extended_content"))]))
    if message.get("role") == "assistant" or event.get("source") == "agent":
        thoughts = _thoughts(message) or _thoughts(event)
        return builder.assistant(text, (), thoughts, key=_key(event), mark=_id(event))
    if message.get("role") in ("user", "system"):
        return builder.context(message["role"], text, mark=_id(event))
    return "message without a role"


def _openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form. Only MCP tools have a schema; the others get the arguments that calls have."""
    if "function" in tool:
        return tool
    mcp_tool = object_at(tool, "mcp_tool")
    listed = (tool.get("parameters"), tool.get("input_schema"), mcp_tool.get("inputSchema"), tool.get("action_type"))
    schema = next(filter(None, listed), None)
    function = {
        "name": tool.get("name") or mcp_tool.get("name") or tool.get("title"),
        "description": str(tool.get("description") or ""),
        **({"parameters": schema} if isinstance(schema, dict) else {}),
    }
    return {"type": "function", "function": function}


def _thoughts(event: dict[str, Any]) -> str:
    blocks = [string(block.get("thinking")) or "" for block in objects(event.get("thinking_blocks"))]
    return string(event.get("reasoning_content")) or "\n\n".join(blocks)


def _id(event: dict[str, Any]) -> str | None:
    return string(event.get("id"))


def _key(event: dict[str, Any]) -> str | None:
    """Return the response's id, which an answer's calls share."""
    return string(event.get("llm_response_id")) or None


NAME, VERSION = "openhands", 1
"""Written for events of the software-agent-sdk 1.x."""
_CONVERSATION = {"agent", "workspace", "execution_status"}


def matches(sample: FileStart) -> bool:
    if sample.path.is_dir():
        return (sample.path / "base_state.json").is_file() and (sample.path / "events").is_dir()
    value = sample.document
    if value is not None:
        events = value.get("history") if isinstance(value, dict) else value
        return _are_events(events) or (isinstance(value, dict) and value.keys() >= _CONVERSATION)
    return _are_events(sample.records) or any(_are_events(line["history"]) for line in sample.objects("history"))


def read(file: TraceFile) -> Iterator[TraceState]:
    value = file.whole
    if file.path.is_dir():
        yield from _folder(file)
    elif isinstance(value, dict):
        if isinstance(value.get("history"), list):
            yield from _line(file, value)
        else:
            file.tally.skip("conversation state without its events")
    elif isinstance(value, list):
        yield from _events(file, TraceBuilder(file, file.path.stem), value)
    elif value is not None:
        file.unknown()
    else:
        yield from _records(file)


def _records(file: TraceFile) -> Iterator[TraceState]:
    """Yield the states of a file of lines: events of one trace, or a `history` each."""
    records = file.records()
    first = next(records, None)
    if first is None:
        return
    if isinstance(first, dict) and "history" in first:
        for record in chain([first], records):
            yield from _line(file, record)
            del record
    else:
        yield from _events(file, TraceBuilder(file, file.path.stem), chain([first], records))


def _line(file: TraceFile, record: Any) -> Iterator[TraceState]:
    history = at(record, "history")
    if not isinstance(history, list) or not history:
        file.tally.skip("no history" if isinstance(record, dict) else "not an object")
        return
    builder = TraceBuilder(file, record.get("instance_id"), _model(record))
    instruction = record.get("instruction")
    if isinstance(instruction, str) and not any(map(_is_prompt, objects(history))):
        builder.context("user", instruction)
    yield from _events(file, builder, history)


def _is_prompt(event: dict[str, Any]) -> bool:
    """Check whether an event is, or may be, the user's."""
    unnamed = "source" not in event and at(event, "llm_message", "role") == "user"
    return event.get("source") == "user" or unnamed


def _folder(file: TraceFile) -> Iterator[TraceState]:
    state = document(file.path / "base_state.json", file.options)
    builder = TraceBuilder(file, at(state, "id") or file.path.name, _model(state))

    def events() -> Iterator[Any]:
        for path in sorted((file.path / "events").glob("*.json")):
            value = document(path, file.options)
            if isinstance(value, Bad):
                file.tally.skip(value.reason)
            else:
                yield value

    yield from _events(file, builder, events())


def _events(file: TraceFile, builder: TraceBuilder, events: Iterable[Any]) -> Iterator[TraceState]:
    def take(builder: TraceBuilder, event: Any) -> str | None:
        return _take(builder, event) if isinstance(event, dict) else "not an object"

    return feed(file, builder, events, take)


def _are_events(events: Any) -> bool:
    return any(_is_event(event) for event in objects(events[:16])) if isinstance(events, list) else False


def _is_event(event: dict[str, Any]) -> bool:
    kind = event.get("kind")
    return isinstance(kind, str) and "id" in event and ("source" in event or kind in _KINDS)


def _model(record: Any) -> str | None:
    places = (("metadata", "llm", "model"), ("agent", "llm", "model"))
    return next((model for keys in places if (model := string(at(record, *keys))) is not None), None)
