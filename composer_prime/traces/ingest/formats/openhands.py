"""Read OpenHands traces: events of versions 0 and 1, and the benchmark's output.jsonl, a `history` of events a line.

    *.jsonl of events, trajectory.json (a list), a conversation folder (base_state.json, events/*.json)   one trace
    output.jsonl                                                                                   a trace a line

    version 0 (before the sdk)   {id, source, action, args} and {id, observation, content, cause}
    version 1 (the sdk)          events with a `kind`

A record is an event, or a line of output.jsonl that holds no history. In version 0 with function calling, an
action's `tool_call_metadata` holds the model's own answer; several calls of one answer are several events. Without it,
the action is read as a call of that name and its `thought` as the text. A condensation forgets events, by id or by
range, and its summary replaces the previous one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

from composer_prime.traces.ingest.messages import TraceBuilder, arguments_of, calls_of, feed
from composer_prime.traces.ingest.reading import Bad, FileStart, at, document, object_at, objects, string, text_of
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.ingest.turns import Call
from composer_prime.traces.state import TraceState

_ASIDE_V1 = {
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
_KINDS = _ASIDE_V1 | _RESULTS | {"ActionEvent", "MessageEvent", "SystemPromptEvent", "Condensation"}


def _take_v1(builder: TraceBuilder, event: dict[str, Any]) -> str | None:
    """Process one event. Return why it is skipped; None when it is not."""
    kind = string(event.get("kind"))
    if kind == "ActionEvent":
        return _action(builder, event)
    if kind in _RESULTS:
        return _result(builder, event)
    if kind == "MessageEvent":
        return _message(builder, event)
    if kind == "SystemPromptEvent":
        builder.tools.use_listed([_openai_tool(tool) for tool in objects(event.get("tools"))])
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
    return f"event {kind}" if kind in _ASIDE_V1 else "unknown event kind"


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
    text = _command_result(
        text_of(observation.get("content") or observation.get("output")), object_at(observation, "metadata")
    )
    if error is True:
        return f"[There was an error during command execution.]\n{text}"
    return f"[An error occurred during execution.]\n{text}" if observation.get("is_error") is True else text


def _command_result(output: str, metadata: dict[str, Any]) -> str:
    """Return what both versions show of a command: its output with what the shell told of itself."""
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
    """Return a tool in OpenAI's form.

    The sdk's own form has a schema for MCP tools only. Its other tools name a class (`action_type`); they get the
    arguments that the agent is seen to use.
    """
    if "function" in tool:
        return tool
    mcp_tool = object_at(tool, "mcp_tool")
    schema = (
        tool.get("parameters") or tool.get("input_schema") or mcp_tool.get("inputSchema") or tool.get("action_type")
    )
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
    """Return the response's id, which the calls of one answer share."""
    return string(event.get("llm_response_id")) or None


_ASIDE = {"recall", "change_agent_state", "null", "agent_state_changed", "pause", "condensation_request", "condense"}
_SUMMARY = "summary"
_NOT_ARGUMENTS = {"thought", "content_blocks", "confirmation_state", "is_confirmed", "hidden", "blocking"}


class _ReaderV0:
    """Read events of version 0. Keep the call of each action, for observations that name their cause.

    Exports may lack the source of events. Then a message is the user's at the start and after one of the agent's, and
    all else is the agent's.
    """

    def __init__(self) -> None:
        self._calls: dict[str, str] = {}
        self._ids: list[int] = []
        self._users_turn = True
        """Whether a message without a source is the user's."""

    def take(self, builder: TraceBuilder, event: dict[str, Any]) -> str | None:
        """Process one event. Return why it is skipped; None when it is not."""
        if isinstance(event.get("id"), int):
            self._ids.append(event["id"])
        action, observation = event.get("action"), event.get("observation")
        if isinstance(action, str) and action:
            return self._action(builder, event, action)
        if isinstance(observation, str) and observation:
            return self._observation(builder, event, observation)
        return "event without action or observation"

    def _action(self, builder: TraceBuilder, event: dict[str, Any], action: str) -> str | None:
        arguments = object_at(event, "args")
        text = text_of(arguments.get("content") or event.get("message"))
        if action in _ASIDE:
            return f"event {action}"
        if action == "condensation":
            return self._condensed(builder, arguments)
        if action == "system":
            builder.tools.use_listed(arguments.get("tools"))
            return builder.context("system", text, mark=_mark(event))
        source = event.get("source") or ("user" if action == "message" and self._users_turn else "agent")
        if source not in ("user", "agent"):
            return "action of the environment"
        self._users_turn = action == "message" and source == "agent"
        if source == "user":
            return builder.context("user", text, mark=_mark(event))
        return self._turn(builder, event, action, arguments, text)

    def _condensed(self, builder: TraceBuilder, arguments: dict[str, Any]) -> str | None:
        listed, summary = arguments.get("forgotten_event_ids"), text_of(arguments.get("summary"))
        first, last = arguments.get("forgotten_events_start_id"), arguments.get("forgotten_events_end_id")
        if isinstance(listed, list):
            forgotten = [str(each) for each in listed]
        elif isinstance(first, int) and isinstance(last, int):
            forgotten = [str(each) for each in self._ids if first <= each <= last]
        else:
            return "condensation that names no events"
        return builder.forget([*forgotten, _SUMMARY] if summary else forgotten, summary, _SUMMARY)

    def _turn(
        self, builder: TraceBuilder, event: dict[str, Any], action: str, arguments: dict[str, Any], text: str
    ) -> None:
        metadata = object_at(event, "tool_call_metadata")
        response = object_at(metadata, "model_response")
        choices = objects(response.get("choices"))
        answer = object_at(choices[0], "message") if choices else {}
        if answer:
            self._calls[str(event.get("id"))] = str(metadata.get("tool_call_id"))
            builder.assistant(
                text_of(answer.get("content")),
                calls_of(answer),
                string(answer.get("reasoning_content")) or "",
                key=string(response.get("id")),
                mark=_mark(event),
                model=string(response.get("model")),
            )
        elif action == "message":
            builder.assistant(text, mark=_mark(event))
        else:
            call_id = f"event_{event.get('id')}"
            self._calls[str(event.get("id"))] = call_id
            call_arguments = {name: value for name, value in arguments.items() if name not in _NOT_ARGUMENTS}
            call = Call(call_id=call_id, name=action, arguments=call_arguments)
            builder.assistant(text_of(arguments.get("thought")), [call], mark=_mark(event))

    def _observation(self, builder: TraceBuilder, event: dict[str, Any], observation: str) -> str | None:
        if observation in _ASIDE:
            return f"event {observation}"
        listed = at(event, "tool_call_metadata", "tool_call_id")
        call_id = str(listed or self._calls.get(str(event.get("cause"))) or "")
        text = _command_result(text_of(event.get("content")), object_at(event, "extras", "metadata"))
        error = (text or observation) if observation == "error" or _exit_code(event) else None
        if builder.tool_result(call_id, text, error=error, mark=_mark(event)):
            return None
        if error is not None and event.get("source") != "user":
            return builder.context("user", text, error=error, mark=_mark(event))
        return "observation without its action"


def _mark(event: dict[str, Any]) -> str | None:
    return str(event["id"]) if isinstance(event.get("id"), int | str) else None


def _exit_code(event: dict[str, Any]) -> bool:
    extras = object_at(event, "extras")
    code = extras.get("exit_code", at(extras, "metadata", "exit_code"))
    return isinstance(code, int) and not isinstance(code, bool) and code != 0


NAME, VERSION = "openhands", 1
"""Written for events of OpenHands 0.2x to 0.5x and of its software-agent-sdk 1.x."""
_CONVERSATION = {"agent", "workspace", "execution_status"}
_PEEKED = 100


def matches(sample: FileStart) -> bool:
    if sample.path.is_dir():
        return (sample.path / "base_state.json").is_file() and (sample.path / "events").is_dir()
    value = sample.document
    if value is not None:
        events = value if isinstance(value, list) else value.get("history") if isinstance(value, dict) else None
        return _are_events(events) or (isinstance(value, dict) and value.keys() >= _CONVERSATION)
    lines = sample.objects("history")
    return _are_events(sample.records) or any(_are_events(_flat(line["history"])) for line in lines)


def read(file: TraceFile) -> Iterator[TraceState]:
    value = file.whole
    if file.path.is_dir():
        yield from _folder(file)
    elif isinstance(value, dict) and not isinstance(value.get("history"), list):
        file.tally.skip("conversation state without its events")
    elif isinstance(value, dict):
        yield from _line(file, value)
    elif isinstance(value, list):
        yield from _events(file, TraceBuilder(file, file.path.stem), value)
    elif value is not None:
        file.unknown()
    else:
        yield from _records(file)


def _records(file: TraceFile) -> Iterator[TraceState]:
    kind, records = _peek(file.records())
    if kind != "output":
        yield from _events(file, TraceBuilder(file, file.path.stem), records)
        return
    for record in records:
        yield from file.trace(partial(_line, record=record))
        del record


def _line(file: TraceFile, record: Any) -> Iterator[TraceState]:
    history = _flat(at(record, "history"))
    if not isinstance(record, dict) or not history:
        file.tally.skip("no history" if isinstance(record, dict) else "not an object")
        return
    builder = TraceBuilder(file, record.get("instance_id"), _model(record))
    instruction = record.get("instruction")
    if isinstance(instruction, str) and not any(map(_is_prompt, objects(history))):
        builder.context("user", instruction)
    yield from _events(file, builder, history)


def _is_prompt(event: dict[str, Any]) -> bool:
    """Check whether an event is the user's; one without a source, whether it may be."""
    unnamed = event.get("action") == "message" or at(event, "llm_message", "role") == "user"
    return event.get("source") == "user" or ("source" not in event and unnamed)


def _folder(file: TraceFile) -> Iterator[TraceState]:
    state = document(file.path / "base_state.json", file.options.limits)
    builder = TraceBuilder(file, at(state, "id") or file.path.name, _model(state))

    def events() -> Iterator[Any]:
        for path in sorted((file.path / "events").glob("*.json")):
            value = document(path, file.options.limits)
            if isinstance(value, Bad):
                file.tally.skip(value.reason)
            else:
                yield value
            if file.progress is not None:
                file.progress(path.stat().st_size)

    yield from _events(file, builder, events())


def _events(file: TraceFile, builder: TraceBuilder, events: Any) -> Iterator[TraceState]:
    kind, rest = _peek(iter(events))
    take = _take_v1 if kind == "v1" else _ReaderV0().take
    return feed(
        file, builder, rest, lambda builder, event: take(builder, event) if isinstance(event, dict) else "not an object"
    )


def _peek(records: Iterator[Any]) -> tuple[str | None, Iterator[Any]]:
    """Return (output, v1 or v0, by the first record that shows it; all records). Drawn records are not held."""
    ahead: deque[Any] = deque()
    kind = None
    for record in islice(records, _PEEKED):
        ahead.append(record)
        kind = _kind(record)
        if kind:
            break
    drawn = (ahead.popleft() for _ in range(len(ahead)))
    return kind, chain(drawn, records)


def _kind(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    if "history" in record:
        return "output"
    return "v1" if "kind" in record else "v0" if "action" in record or "observation" in record else None


def _flat(history: Any) -> list[Any] | None:
    """Return the events of a history. Older outputs hold pairs of an action and its observation."""
    if not isinstance(history, list):
        return None
    return [event for entry in history for event in (entry if isinstance(entry, list) else [entry])]


def _are_events(events: Any) -> bool:
    first = objects(events[:16]) if isinstance(events, list) else []
    return any(_is_v1(event) or _is_v0(event) for event in first)


def _is_v1(event: dict[str, Any]) -> bool:
    kind = event.get("kind")
    return isinstance(kind, str) and "id" in event and ("source" in event or kind in _KINDS)


def _is_v0(event: dict[str, Any]) -> bool:
    named = isinstance(event.get("action"), str) and isinstance(event.get("args"), dict)
    return named or (isinstance(event.get("observation"), str) and "content" in event)


def _model(record: Any) -> str | None:
    for keys in (
        ("metadata", "llm", "model"),
        ("metadata", "llm_config", "model"),
        ("agent", "llm", "model"),
        ("llm_config", "model"),
    ):
        model = string(at(record, *keys))
        if model is not None:
            return model
    return None
