"""Read what `claude -p --output-format stream-json` prints: one message a line, in the order of the session. With
`--output-format json --verbose` the same messages are one list.

The lines name their `session_id` and no parent. Several lines with one `message.id` are one answer. The prompt is not
printed (but with --replay-user-messages), so contexts begin with a stand-in, and the first turn, which only the prompt
could explain, gives no state. Lines of subagents (`parent_tool_use_id`) and partial messages are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.formats.claude_code import SYNTHETIC, assistant_parts
from composer_prime.traces.ingest.messages import TraceBuilder, feed, take_message
from composer_prime.traces.ingest.reading import FileStart, at, object_at, objects, string
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.state import TraceState

NAME, VERSION = "claude_stream", 1
"""Written for the lines of Claude Code 1 and 2."""
NO_PROMPT = "[the prompt was not recorded]"
UNPROMPTED = "its prompt was not recorded"
_KINDS = {"system", "assistant", "user", "result", "stream_event"}
_ALL = "all"
"""The mark of every message of a context: a compaction drops them all."""


def matches(sample: FileStart) -> bool:
    listed = sample.records if sample.document is None else sample.document
    lines = [line for line in objects(listed) if string(line.get("type")) in _KINDS and "session_id" in line]
    own = [line for line in lines if "parentUuid" not in line and "sessionId" not in line]
    # Other programs print a session_id too, but none a message or a system line of such a form.
    return any(isinstance(line.get("message"), dict) or line["type"] == "stream_event" for line in own) or any(
        line["type"] == "system" and line.get("subtype") == "init" for line in own
    )


def read(file: TraceFile) -> Iterator[TraceState]:
    if file.whole is not None and not isinstance(file.whole, list):
        file.unknown()
        return
    yield from feed(file, _Stream(file), file.records() if file.whole is None else file.document(), _Stream.take)


class _Stream:
    """The session that is being read. A file may hold several, one after the other."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._builder: TraceBuilder | None = None
        self._session: object = None
        self._prompted = False
        """Whether the context has a message before the first turn."""

    def close(self) -> None:
        if self._builder is not None:
            self._builder.close()

    def take(self, record: Any) -> str | None:
        """Process one line. Return why it is skipped; None when it is not."""
        if not isinstance(record, dict):
            return "not an object"
        kind = string(record.get("type"))
        if kind not in _KINDS:
            return f"record type {kind}" if kind and len(kind) <= 40 else "unknown record type"
        if record.get("parent_tool_use_id") is not None:
            return "subagent"
        if kind == "stream_event":
            return "partial message"
        if kind == "result":
            self._prompted = False  # what follows answers another prompt
            return "result of the session"
        builder = self._of_session(record)
        if kind == "system":
            return self._system(builder, record)
        message = object_at(record, "message")
        if kind == "assistant":
            return self._assistant(builder, message)
        blocks = objects(message.get("content"))
        if not any(block.get("type") == "tool_result" for block in blocks):
            self._prompted = True
        return take_message(builder, {"role": "user", **message}, _ALL)

    def _of_session(self, record: dict[str, Any]) -> TraceBuilder:
        session = record.get("session_id")
        if self._builder is None or session not in (None, self._session):
            self.close()
            self._builder = TraceBuilder(self._file, session)
            self._session, self._prompted = session, False
        return self._builder

    def _system(self, builder: TraceBuilder, record: dict[str, Any]) -> str | None:
        subtype = string(record.get("subtype")) or ""
        if subtype == "init":
            listed = record.get("tools")
            names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
            builder.tools.use_listed([{"type": "function", "function": {"name": name}} for name in names])
            return None
        if subtype == "compact_boundary":
            builder.forget([_ALL], "")
            self._prompted = False
            return None
        return f"system record: {subtype if 0 < len(subtype) <= 40 else 'without subtype'}"

    def _assistant(self, builder: TraceBuilder, message: dict[str, Any]) -> str | None:
        if not isinstance(message.get("content"), str | list):
            return "message without content"
        model = string(at(message, "model"))
        if model == "<synthetic>":
            return SYNTHETIC
        aside = None
        if not self._prompted:
            builder.context("user", NO_PROMPT, mark=_ALL)
            aside, self._prompted = UNPROMPTED, True
        key = string(message.get("id"))
        builder.assistant(*assistant_parts(message), key=key, mark=_ALL, model=model, aside=aside)
        return None
