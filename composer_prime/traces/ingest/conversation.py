"""Turn a list of chat messages into states, for traces whose records are in the order in which the agent saw them.

    context() ──────────────┐
    assistant(), again ... ─┴─> open turn ──> tool_result() ... ──> next assistant/context/close ──> TraceFile.drain()
                                                                     (the error that followed is known by then)

Messages may have OpenAI's form, its older form, Anthropic's form, or a mixture:

    calls    `tool_calls`, `function_call`, or blocks of type tool_use
    results  messages of role tool or function, or blocks of type tool_result in a user message
    text     `content`, `value` or `text`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from composer_prime.traces.ingest.trace_file import (
    NO_RESULT,
    Call,
    StateMaker,
    TraceFile,
    Turn,
    digest_of,
    objects,
    parse_json,
    size_of,
    string,
    text_of,
    too_long,
)
from composer_prime.traces.records import Message, TraceState


class TraceBuilder:
    def __init__(self, file: TraceFile, trace_id: object, model: object = None) -> None:
        self._maker = StateMaker(file, trace_id, model)
        self.list_tools = self._maker.list_tools
        self._context: list[tuple[Message, Collection[str], bytes]] = []
        """Each message with its marks, and the digest of the messages up to it."""
        self._chars = 0
        self._overflow = False
        self._turn: Turn | None = None
        self._turn_marks: set[str] = set()

    def context(self, role: str, text: str, *, mark: str | None = None, error: str | None = None) -> None:
        """Add a system or user message. `error`: of the turn before, in formats without tool results."""
        if error is not None and self._turn is not None:
            self._turn.fail(error)
        self.close()
        self._append(self._maker.message(role, text), {mark} if mark else ())

    def assistant(
        self,
        text: str = "",
        calls: Collection[Call] = (),
        reasoning: str = "",
        *,
        key: str | None = None,
        mark: str | None = None,
        model: str | None = None,
        aside: str | None = None,
    ) -> None:
        """Start a turn, or extend the open one when `key` is its key (one turn written as several records).

        `model` made this turn and those that follow. `aside`: why the turn gives no state.
        """
        if self._turn is None or key is None or key != self._turn.key:
            self.close()
            self._turn = self._maker.turn(key, model)
        self._maker.model = model or self._maker.model
        self._turn.add(text, calls, reasoning)
        self._turn.aside = self._turn.aside or aside
        self._turn_marks |= {mark} if mark else set()

    def tool_result(self, call_id: str | None, text: str, *, error: str | None = None, mark: str | None = None) -> bool:
        """Store the result of a call of the open turn, as `Turn.answer` does."""
        if self._turn is None or not self._turn.answer(call_id, text, error):
            return False
        self._turn_marks |= {mark} if mark else set()
        return True

    def names_model(self, model: str) -> None:
        """Note the model that a record beside the turns names. A turn of two models has none."""
        turn, self._maker.model = self._turn, model
        if turn is not None:
            turn.several_models = turn.several_models or turn.model not in (None, model)
            turn.model = turn.model or model

    def forget(self, marks: Collection[str], summary: str, mark: str | None = None) -> None:
        """Replace the messages of the records `marks` by `summary`, the record `mark`, after the leading prompt."""
        self.close()
        gone = set(marks)
        kept = [(m, k) for m, k, _ in self._context if not k or not gone.issuperset(k)]
        first = 0
        while first < len(kept) and kept[first][0]["role"] in ("system", "user"):
            first += 1
        message = self._maker.message("user", summary)
        kept = kept[:first] + ([(message, {mark} if mark else ())] if summary else []) + kept[first:]
        self._context, self._chars, self._overflow = [], 0, False
        for message, message_marks in _paired_messages(kept):
            self._append(message, message_marks)

    def close(self) -> None:
        """Close the open turn: make its state, and make it context."""
        turn, self._turn = self._turn, None
        marks, self._turn_marks = self._turn_marks, set()
        if turn is not None:
            missing = too_long(self._maker.options) if self._overflow else None
            messages = [message for message, _, _ in self._context]
            action = self._maker.finish(turn, messages, self._digest(), missing)
            if action is not None:
                results = [(each.call_id, turn.results.get(each.call_id, NO_RESULT)) for each in turn.calls]
                for message in (action, *(self._maker.result(*each) for each in results)):
                    self._append(message, marks)

    def _append(self, message: Message, marks: Collection[str]) -> None:
        if self._maker.gathering:
            return
        self._chars += size_of(message)
        if self._chars > self._maker.options.context_chars:
            # Nothing later has its whole context until it is condensed.
            self._context, self._overflow = [], True
            return
        self._context.append((message, marks, digest_of(self._digest(), message)))

    def _digest(self) -> bytes:
        return self._context[-1][2] if self._context else b""


def _paired_messages(kept: list[tuple[Message, Collection[str]]]) -> list[tuple[Message, Collection[str]]]:
    """Drop results whose call is gone; a call whose result is gone gets a stand-in."""
    out: list[tuple[Message, Collection[str]]] = []
    results = {message["tool_call_id"]: message for message, _ in kept if message["role"] == "tool"}
    for message, marks in kept:
        if message["role"] == "tool":
            continue
        out.append((message, marks))
        for call in message.get("tool_calls") or []:
            stand_in = {"role": "tool", "tool_call_id": call["id"], "content": NO_RESULT}
            out.append((results.get(call["id"], stand_in), marks))
    return out


_FAILED = re.compile(
    r"<returncode>\s*(?!0\s*<)-?\d+\s*</returncode>|[Ee]xit code:? (?!0\b)-?\d+"
    r"|^(?:\[?ERROR|Error|Traceback \(most recent|The tool execution failed|The user denied this operation)",
    re.MULTILINE,
)
_FAILED_WORDS = ("<returncode>", "xit code", "ERROR", "Error", "Traceback", "The tool exec", "The user denied")
"""Every match of _FAILED holds one; looking for words is many times faster."""
_AS_CONTEXT = {"system": "system", "developer": "system", "user": "user", "human": "user"}
_AS_ASSISTANT = {"assistant", "gpt", "ai", "model"}
_AS_TOOL = {"tool", "function", "observation"}
_ROLES = {*_AS_CONTEXT, *_AS_ASSISTANT, *_AS_TOOL, "exit"}
"""The agent never saw an `exit`: it says how a run of mini-swe-agent ended."""
_UNREAD = re.compile(r"[_-](?:use|call|result|output)$")


def feed(
    file: TraceFile, builder: TraceBuilder, records: Iterable[Any], take: Callable[[TraceBuilder, Any], str | None]
) -> Iterator[TraceState]:
    """Yield the states of records. `take` returns why it skips one, if it does."""
    for record in records:
        reason = take(builder, record)
        if reason is None:
            file.tally.taken += 1
        else:
            file.tally.skip(reason)
        yield from file.drain()
        del record
    builder.close()
    yield from file.drain()


def take_message(builder: TraceBuilder, message: Any) -> str | None:
    """Process one message. Return why it is skipped, if it is."""
    if why_unreadable(message) is not None:
        return "unreadable message"
    role = _role(message)
    if role in _AS_CONTEXT:
        _context(builder, message, _AS_CONTEXT[role])
    elif role in _AS_ASSISTANT:
        calls = [_call(written, index) for index, written in enumerate(_listed_calls(message))]
        well_formed = [call for call in calls if call is not None]
        builder.assistant(text_of(_content(message)), well_formed, _reasoning(message))
    elif role in _AS_TOOL:
        _result(builder, message, text_of(_content(message)))
    return None


def failure(text: str) -> str | None:
    """Return `text` if it reports that a command or tool failed, else None."""
    start = text[:20_000]
    return text if any(word in start for word in _FAILED_WORDS) and _FAILED.search(start) else None


def arguments_of(written: Any) -> dict[str, Any] | str:
    """Return the arguments as an object, or the text that is none."""
    if isinstance(written, dict):
        return written
    if not isinstance(written, str):
        return ""
    value = parse_json(written.encode("utf-8", "replace")) if written.strip() else {}
    return value if isinstance(value, dict) else written


def _context(builder: TraceBuilder, message: dict[str, Any], role: str) -> None:
    """Add a message to the agent. Results in it go to their calls; the rest is context."""
    content, results = _content(message), _blocks(message, "tool_result")
    paired = [block for block in results if _paired(builder, block)]
    rest = content
    if isinstance(content, list):
        placed = {id(block) for block in paired}  # an equal block elsewhere is shown
        rest = [block for block in content if id(block) not in placed]
    text = text_of(rest)
    if text.strip() or not paired:
        builder.context(role, text, error=failure(text) if role == "user" and not paired else None)


def _paired(builder: TraceBuilder, block: dict[str, Any]) -> bool:
    text, call_id = text_of(block.get("content", block.get("text"))), block.get("tool_use_id")
    error = (text or "error") if block.get("is_error") is True else failure(text)
    return builder.tool_result(str(call_id) if call_id not in (None, "") else None, text, error=error)


def _result(builder: TraceBuilder, message: dict[str, Any], text: str) -> None:
    listed = message.get("tool_call_ids")
    call_id = message.get("tool_call_id") or (listed[0] if isinstance(listed, list) and listed else None)
    error = (text or "error") if message.get("is_error") is True or message.get("error") else failure(text)
    if not builder.tool_result(str(call_id) if call_id else None, text, error=error):
        # No call matches, but the agent saw this text.
        builder.context("user", text, error=error)


def why_unreadable(message: Any) -> str | None:
    """Return why a message cannot be read, if so."""
    if not isinstance(message, dict):
        return "a message is not an object"
    role = _role(message)
    if role not in _ROLES:
        return "a message has an unknown role"
    content = _content(message)
    if not (content is None or isinstance(content, str | list)):
        return "a message's content is neither text nor a list"
    if role in _AS_ASSISTANT and any(_call(written, 0) is None for written in _listed_calls(message)):
        return "a message holds a call without a name"
    expected = "tool_use" if role in _AS_ASSISTANT else "tool_result"
    if any(_UNREAD.search(str(block.get("type"))) for block in objects(content) if block.get("type") != expected):
        return "a message holds a call or a result in an unknown form"
    return None


def _listed_calls(message: dict[str, Any]) -> list[Any]:
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
    return next((message[name] for name in ("content", "value", "text") if message.get(name) is not None), None)


def _role(message: dict[str, Any]) -> str:
    role = message.get("role", message.get("from"))
    return role if isinstance(role, str) else ""
