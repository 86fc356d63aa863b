"""Read sessions of Gemini CLI: session-*.jsonl, session-*.json, checkpoint-*.json and `--output-format stream-json`.

    session   {"sessionId", "projectHash"}, then a message a line: {"id", "type": "user" | "gemini" ..., "content"}
              older ones are one document with `messages`
    checkpoint   the history as Gemini's API has it: {"role": "user" | "model", "parts": [...]}, in a list or `history`
    stream-json  {"type": "init" | "message" | "tool_use" | "tool_result" ..., "session_id"}

1. A line with the id of the last message replaces it: calls and results arrive later than the text. So a message is
   taken when the next one comes.
2. `$rewindTo` takes a message back, with all after it. `$set` with `messages` is a new context, as after a compression:
   what it holds is shown to later turns and gives no states again.
3. A call's result stands in the call itself, and again in the user message after it, which is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.messages import TraceBuilder, arguments_of, failure, feed
from composer_prime.traces.ingest.reading import FileStart, at, object_at, objects, string, text_of
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.ingest.turns import Call
from composer_prime.traces.state import TraceState

NAME, VERSION = "gemini_cli", 1
"""Written for Gemini CLI 0.1 to 0.2x."""
_ASIDE = {"info", "error", "warning"}
_COPIED = "repeated by a new version of the history"
_THERE = "tool result that is there already"
_STREAM = {"init", "message", "tool_use", "tool_result", "error", "result"}


def matches(sample: FileStart) -> bool:
    value = sample.document
    if value is not None:
        return _is_session(value) or _history(value) is not None
    sessions = any(_is_session(record) for record in sample.objects("sessionId", "projectHash"))
    return sessions or _is_stream(sample)


def _is_session(value: Any) -> bool:
    return isinstance(value, dict) and "projectHash" in value and "sessionId" in value


def _history(value: Any) -> list[Any] | None:
    """Return the contents of a checkpoint; None for any other value."""
    listed = value.get("history") if isinstance(value, dict) else value
    first = objects(listed[:8]) if isinstance(listed, list) else []
    return listed if any("role" in item and isinstance(item.get("parts"), list) for item in first) else None


def _is_stream(sample: FileStart) -> bool:
    events = [event for event in sample.objects("type") if string(event["type"]) in _STREAM]
    return any(event["type"] == "init" and "session_id" in event and "model" in event for event in events) or any(
        event["type"] == "tool_use" and "tool_id" in event and "parameters" in event for event in events
    )


def read(file: TraceFile) -> Iterator[TraceState]:
    value = file.whole
    if value is None:
        yield from _lines(file)
    elif _is_session(value):
        document = file.document()
        session = _Session()
        builder = TraceBuilder(file, document["sessionId"])
        messages = document.get("messages")
        yield from feed(file, builder, messages if isinstance(messages, list) else [], session.message)
    elif _history(value) is not None:
        session = _Session()
        yield from feed(file, TraceBuilder(file, file.path.stem), _history(file.document()) or [], session.content)
    else:
        file.unknown()


def _lines(file: TraceFile) -> Iterator[TraceState]:
    """Yield the states of a file of lines. Each `init` with another session_id begins a trace."""
    session = _Session()
    builder: TraceBuilder | None = None
    session_id: object = None
    for record in file.records():
        named = record if isinstance(record, dict) else {}
        another = named.get("type") == "init" and named.get("session_id") not in (None, session_id)
        if builder is not None and another:
            session.flush(builder)
            builder.close()
            builder, session = None, _Session()
        if builder is None:
            session_id = named.get("sessionId") or named.get("session_id")
            builder = TraceBuilder(file, session_id, named.get("model"))
        for reason in session.line(builder, record):
            if reason is None:
                file.tally.take()
            else:
                file.tally.skip(reason)
        yield from file.drain()
        del record
    if builder is not None:
        session.flush(builder)
        builder.close()
    yield from file.drain()


class _Session:
    """What is known of the session so far."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        """The last message, which a later line may replace."""
        self._order: dict[str, None] = {}
        """Ids of the messages of the context, in order: what a rewind takes back."""
        self._answers = 0
        self._pieces: list[str] = []
        """Text of the model's whose other pieces may follow (stream-json)."""
        self._text_alone = False
        """Whether the message before was a text of the model's, whose calls may follow in a message of their own."""

    def line(self, builder: TraceBuilder, record: Any) -> list[str | None]:
        """Process one line. Return [why it is skipped; None when it is not]."""
        if not isinstance(record, dict):
            return ["not an object"]
        if string(record.get("type")) in _STREAM and "id" not in record:
            return [self._event(builder, record)]
        if isinstance(record.get("$rewindTo"), str):
            self.flush(builder)
            self._rewind(builder, record["$rewindTo"])
            return [None]
        if isinstance(record.get("$set"), dict):
            return [self._set(builder, record["$set"])]
        if isinstance(record.get("id"), str):
            return [self._held(builder, record)]
        if _is_session(record):
            for message in objects(record.get("messages")):
                self.flush(builder)
                self._last = message
            return [None]
        return ["unknown record type"]

    def _held(self, builder: TraceBuilder, record: dict[str, Any]) -> str | None:
        """Hold a message back until the next one comes. One that was taken already is not taken again."""
        reason = None if self._is_spoken(record) else _unspoken(record)
        if reason is not None:
            return reason
        if self._last is not None and self._last.get("id") == record["id"]:
            self._last = record
            return "earlier version of a message"
        if record["id"] in self._order:
            return "message that is there already"
        if self._last is not None and _answered(self._last, record):
            return _THERE
        self.flush(builder)
        self._last = record
        return None

    @staticmethod
    def _is_spoken(record: dict[str, Any]) -> bool:
        return record.get("type") in ("user", "gemini")

    def flush(self, builder: TraceBuilder) -> None:
        """Take the message that was held back."""
        last, self._last = self._last, None
        pieces, self._pieces = self._pieces, []
        if pieces:
            builder.assistant("".join(pieces), key=f"answer {self._answers}")
        if last is not None:
            self.message(builder, last)

    def _rewind(self, builder: TraceBuilder, message_id: str) -> None:
        ids = list(self._order)
        gone = ids[ids.index(message_id) if message_id in self._order else 0 :]
        builder.forget(gone, "")
        for each in gone:
            del self._order[each]
        self._answers += 1

    def _set(self, builder: TraceBuilder, changes: dict[str, Any]) -> str | None:
        messages = changes.get("messages")
        if not isinstance(messages, list):
            return "change of the session's description"
        self.flush(builder)
        builder.forget(list(self._order), "")
        self._order.clear()
        self._answers += 1
        for message in objects(messages):
            self.message(builder, message, _COPIED)
        builder.close()
        return None

    def message(self, builder: TraceBuilder, message: Any, aside: str | None = None) -> str | None:
        """Process one message of a session. Return why it is skipped; None when it is not."""
        if not isinstance(message, dict):
            return "not an object"
        kind, mark = message.get("type"), str(message.get("id") or f"message {len(self._order)}")
        parts = _parts(message.get("content"))
        if kind == "gemini":
            self._order[mark] = None
            self._gemini(builder, message, parts, mark, aside)
            return None
        if kind != "user":
            return _unspoken(message)
        results = [part["functionResponse"] for part in parts if isinstance(part.get("functionResponse"), dict)]
        text = _text(parts)
        taken = [self._result(builder, result, mark) for result in results]
        if results and not text.strip():
            return None if any(taken) else _THERE
        self._order[mark] = None
        self._answers += 1
        self._text_alone = False
        builder.context("user", text, mark=mark)
        return None

    def _gemini(
        self, builder: TraceBuilder, message: dict[str, Any], parts: list[dict[str, Any]], mark: str, aside: str | None
    ) -> None:
        listed = objects(message.get("toolCalls"))
        calls = [_call(call, f"{mark}_{index}") for index, call in enumerate(listed)]
        calls += [_call(part["functionCall"], f"{mark}_p{index}") for index, part in enumerate(parts) if _calls(part)]
        calls = list({call.call_id: call for call in reversed(calls)}.values())[::-1]
        text = _text([part for part in parts if part.get("thought") is not True])
        if not (self._text_alone and calls and not text.strip()):
            self._answers += 1
        thoughts = [_thought(thought) for thought in objects(message.get("thoughts"))]
        thoughts += [string(part.get("text")) or "" for part in parts if part.get("thought") is True]
        builder.assistant(
            text,
            calls,
            "\n\n".join(filter(None, thoughts)),
            key=f"answer {self._answers}",
            mark=mark,
            model=string(message.get("model")),
            aside=aside,
        )
        self._text_alone = not calls
        for index, call in enumerate(listed):
            if call.get("result") is not None or call.get("status") in ("error", "cancelled"):
                text, error = _outcome(call.get("result"))
                if call.get("status") in ("error", "cancelled"):
                    text = text or text_of(call.get("resultDisplay")) or str(call["status"])
                    error = error or text
                builder.tool_result(_call(call, f"{mark}_{index}").call_id, text, error=error, mark=mark)

    def _result(self, builder: TraceBuilder, response: dict[str, Any], mark: str) -> bool:
        text, error = _outcome([{"functionResponse": response}])
        named = response.get("id")
        return builder.tool_result(None if named is None else str(named), text, error=error, mark=mark)

    def content(self, builder: TraceBuilder, content: Any) -> str | None:
        """Process one content of a checkpoint. Return why it is skipped; None when it is not."""
        if not isinstance(content, dict) or content.get("role") not in ("user", "model"):
            return "content without a role"
        kind = "gemini" if content["role"] == "model" else "user"
        return self.message(builder, {"type": kind, "content": content.get("parts")})

    def _event(self, builder: TraceBuilder, event: dict[str, Any]) -> str | None:
        """Process one event of stream-json. A message may come in pieces (`delta`)."""
        kind = event["type"]
        if kind == "message" and event.get("role") == "assistant":
            self._pieces.append(text_of(event.get("content")))
            return None
        self.flush(builder)
        if kind == "message":
            self._answers += 1
            builder.context("user", text_of(event.get("content")))
        elif kind == "tool_use":
            call = {"id": event.get("tool_id"), "name": event.get("tool_name"), "args": event.get("parameters")}
            builder.assistant("", [_call(call, f"call_{self._answers}")], key=f"answer {self._answers}")
        elif kind == "tool_result":
            self._answers += 1
            told = at(event, "error", "message")
            text = text_of(event.get("output")) or str(told or "")
            error = (text or "error") if event.get("status") == "error" or told else failure(text)
            return None if builder.tool_result(str(event.get("tool_id")), text, error=error) else "result without call"
        else:
            return f"event {kind}"
        return None


def _unspoken(message: dict[str, Any]) -> str:
    kind = string(message.get("type"))
    return f"message of type {kind}" if kind in _ASIDE else "message of an unknown type"


def _answered(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Check whether a user message only repeats results that stand in the calls of the message before."""
    parts = _parts(message.get("content"))
    responses = [part["functionResponse"] for part in parts if isinstance(part.get("functionResponse"), dict)]
    with_result = {str(call.get("id")) for call in objects(last.get("toolCalls")) if call.get("result") is not None}
    return (
        bool(responses) and not _text(parts).strip() and all(str(item.get("id")) in with_result for item in responses)
    )


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the parts of a content, which may be a text, one part, or a list of both."""
    listed = content if isinstance(content, list) else [content]
    return [{"text": part} if isinstance(part, str) else part for part in listed if isinstance(part, str | dict)]


def _text(parts: list[dict[str, Any]]) -> str:
    """Return the texts of parts. Data becomes a short mark."""
    texts = [
        part["text"] if isinstance(part.get("text"), str) else "[image]"
        for part in parts
        if isinstance(part.get("text"), str) or "inlineData" in part or "fileData" in part
    ]
    return "".join(texts)


def _calls(part: dict[str, Any]) -> bool:
    return isinstance(part.get("functionCall"), dict)


def _call(call: dict[str, Any], unnamed: str) -> Call:
    name = string(call.get("name")) or "unnamed"
    return Call(call_id=str(call.get("id") or unnamed), name=name, arguments=arguments_of(call.get("args") or {}))


def _thought(thought: dict[str, Any]) -> str:
    return ": ".join(filter(None, (string(thought.get("subject")), string(thought.get("description")))))


def _outcome(result: Any) -> tuple[str, str | None]:
    """Return (text, error) of a call's result: a text, or parts with a function's response."""
    texts: list[str] = []
    failed = False
    for part in _parts(result):
        response = object_at(part, "functionResponse", "response")
        if "functionResponse" not in part:
            texts.append(_text([part]))
        elif isinstance(response.get("error"), str | dict) and response["error"]:
            failed = True
            error = response["error"]
            texts.append(error if isinstance(error, str) else json.dumps(error, ensure_ascii=False))
        elif isinstance(response.get("output"), str):
            texts.append(response["output"])
        else:
            texts.append(json.dumps(response, ensure_ascii=False))
    text = "\n".join(filter(None, texts))
    return text, (text or "error") if failed else failure(text)
