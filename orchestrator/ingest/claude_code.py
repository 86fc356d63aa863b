"""Claude Code sessions: one JSON object a line, a tree by `uuid` and `parentUuid`.

What the lines mean, and what is made of them:

1. One answer of the model is spread over several lines with one `message.id`, with results between them: one turn.
2. A user prompt whose parent lies further back starts another branch (the user went back): the context goes back too.
3. `compact_boundary` starts the context anew; the summary that follows is its first message. A resumed session repeats
   its earlier lines: same `uuid`s in one file, equal states in two; both count once.
4. Sidechains (subagents) are another agent's conversation with another prompt: skipped.
5. Thinking is kept in the action and never shown to anyone else. Tools are not listed: see observed_tools.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer_prime.traces import TraceState
from orchestrator.ingest.blocks import objects, string, text_of
from orchestrator.ingest.builder import Call, TraceBuilder
from orchestrator.ingest.sample import Sample

if TYPE_CHECKING:
    from orchestrator.ingest.formats import TraceFile

NAME, VERSION = "claude_code", 2
"""Written for the lines of Claude Code 1 and 2."""
_KNOWN_ASIDE = {
    "summary",
    "file-history-snapshot",
    "queue-operation",
    "progress",
    "attachment",
    "custom-title",
    "ai-title",
    "agent-name",
    "last-prompt",
    "permission-mode",
    "pr-link",
    "tag",
}
"""Records that are no part of the conversation."""


def matches(sample: Sample) -> bool:
    spoken = [record for record in sample.objects("type", "uuid", "message") if record["type"] in ("user", "assistant")]
    aside = [record for record in sample.objects("type") if string(record["type"]) in _KNOWN_ASIDE]
    named = [record for record in aside if "sessionId" in record or "leafUuid" in record or "messageId" in record]
    return bool([record for record in spoken if "parentUuid" in record or "sessionId" in record] or named)


def read(file: TraceFile) -> Iterator[TraceState]:
    session = _Session(file)
    for record in file.records():
        yield from session.record(record)
        del record
    yield from session.end()


class _Session:
    """The conversation of the file being read; another one begins where a record belongs to none of what is there."""

    def __init__(self, file: TraceFile) -> None:
        self._file, self._tally = file, file.tally
        self._builder: TraceBuilder | None = None
        self._session: object = None

    def record(self, record: Any) -> Iterator[TraceState]:
        if not isinstance(record, dict):
            self._tally.skip("not an object")
            return
        kind = string(record.get("type"))
        if record.get("isSidechain") is True:
            self._tally.skip("subagent (sidechain)")
        elif kind in ("user", "assistant"):
            yield from self._spoken(kind, record)
        elif kind == "system":
            yield from self._system(record)
        else:
            self._aside(kind, record)

    def end(self) -> Iterator[TraceState]:
        state = self._builder.close() if self._builder else None
        if state is not None:
            yield state

    def _spoken(self, kind: str, record: dict[str, Any]) -> Iterator[TraceState]:
        reason, message = _unusable(kind, record), record.get("message")
        uuid = _mark(record)
        if reason is None and uuid is not None and self._builder is not None and self._builder.holds(uuid):
            reason = "repeated uuid"
        if reason is not None or not isinstance(message, dict):
            self._tally.skip(reason or "message is not an object")
            return
        yield from self._place(record)
        yield from self._assistant(record, message) if kind == "assistant" else self._user(record, message)

    def _place(self, record: dict[str, Any]) -> Iterator[TraceState]:
        """Make `self._builder` the conversation that the record belongs to, at the place where it belongs."""
        parent, session = record.get("parentUuid"), record.get("sessionId")
        builder = self._builder
        follows = builder is not None and isinstance(parent, str) and builder.holds(parent)
        if builder is None or (not follows and session != self._session):
            yield from self.end()
            self._builder = self._file.builder(session)
        elif follows and _starts_branch(record):
            state = builder.rewind(str(parent))
            if state is not None:
                yield state
        self._session = session

    def _assistant(self, record: dict[str, Any], message: dict[str, Any]) -> Iterator[TraceState]:
        assert self._builder is not None
        text, thinking, calls = [], [], []
        for block in objects(_blocks(message)):
            kind = block.get("type")
            if kind == "text":
                text.append(text_of(block))
            elif kind == "thinking":
                thinking.append(string(block.get("thinking")) or "")
            elif kind == "tool_use" and isinstance(block.get("name"), str) and isinstance(block.get("id"), str):
                arguments = block.get("input")
                calls.append(
                    Call(
                        call_id=block["id"],
                        name=block["name"],
                        arguments=arguments if isinstance(arguments, dict) else str(arguments or ""),
                    )
                )
        state = self._builder.assistant(
            "\n\n".join(text),
            calls,
            "\n\n".join(thinking),
            key=string(message.get("id")),
            mark=_mark(record),
            model=string(message.get("model")),
        )
        self._tally.take()
        if state is not None:
            yield state

    def _user(self, record: dict[str, Any], message: dict[str, Any]) -> Iterator[TraceState]:
        assert self._builder is not None
        builder, blocks = self._builder, _blocks(message)
        results = [block for block in objects(blocks) if block.get("type") == "tool_result"]
        paired = [self._result(builder, block, record) for block in results]
        said = [part for block in blocks if block not in results and (part := text_of(block)).strip()]
        if record.get("isCompactSummary") is True:
            state = builder.restart()
            if state is not None:
                yield state
        if said:
            state = builder.context("user", "\n\n".join(said), mark=_mark(record))
            if state is not None:
                yield state
        if said or any(paired):
            self._tally.take()
        else:
            self._tally.skip("tool result without its call" if results else "no text in the message")

    def _result(self, builder: TraceBuilder, block: dict[str, Any], record: dict[str, Any]) -> bool:
        text = text_of(block.get("content"))
        error = (text or "error") if block.get("is_error") is True else None
        return builder.tool_result(str(block.get("tool_use_id")), text, error=error, mark=_mark(record))

    def _system(self, record: dict[str, Any]) -> Iterator[TraceState]:
        subtype = string(record.get("subtype"))
        if subtype == "compact_boundary" and self._builder is not None:
            state = self._builder.restart()
            if state is not None:
                yield state
        self._note(record)
        known = subtype if subtype and len(subtype) <= 40 else "without subtype"
        self._tally.skip(f"system record: {known}")

    def _aside(self, kind: str | None, record: dict[str, Any]) -> None:
        self._note(record)
        self._tally.skip(f"record type {kind}" if kind in _KNOWN_ASIDE else "unknown record type")

    def _note(self, record: dict[str, Any]) -> None:
        """Later records may name this one as their parent."""
        mark = _mark(record)
        if mark is not None and self._builder is not None:
            self._builder.mark(mark)


def _unusable(kind: str, record: dict[str, Any]) -> str | None:
    message = record.get("message")
    if not isinstance(message, dict):
        return "message is not an object"
    if message.get("role", kind) != kind:
        return "role differs from the record's type"
    content = message.get("content")
    if not isinstance(content, str | list):
        return "message without content"
    if kind == "assistant" and (message.get("model") == "<synthetic>" or record.get("isApiErrorMessage") is True):
        return "not the model's own words (synthetic)"
    return None


def _starts_branch(record: dict[str, Any]) -> bool:
    """Whether the record may leave the branch that is being built: results always belong to the turn before them."""
    return not any(block.get("type") == "tool_result" for block in objects(_blocks(record["message"])))


def _mark(record: dict[str, Any]) -> str | None:
    return string(record.get("uuid"))


def _blocks(message: dict[str, Any]) -> list[Any]:
    """The content as a list of blocks."""
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
