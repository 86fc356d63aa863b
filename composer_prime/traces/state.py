"""A recorded decision of some agent: what it saw and what it did. states_file.py has the form of a file of them.

composer ingest (traces/ingest) -> states.jsonl -> composer replay (traces/replay) -> pairs.jsonl -> replay-DPO

Before a command appends to such a file or replaces it, `check_own` looks whether it holds something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import ConfigError
from composer_prime.traces.states_file import MAGIC, StateLine, StateTable, state_file_lines

SCHEMA_VERSION = 1
Message = dict[str, Any]
"""A message in the form of OpenAI's chat completions."""


class TraceState(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn of a trace, with everything before it."""

    trace_id: str
    state_id: str
    """`<trace_id>/<turn number>`; unique within a file of states."""
    step: int
    """Number of the assistant turn within its trace, from 0."""
    messages: list[Message]
    """What the agent saw: system, user, assistant and tool messages, without thinking. Every call has a result."""
    student_action: Message
    """What it did: an assistant message with `content`, `tool_calls`, and its thinking as `reasoning_content`."""
    source_model: str | None
    source_family: str
    """As composer_prime/llm/families.py names it; `unknown` where the trace does not tell."""
    tools: list[dict[str, Any]]
    """Function tools that the agent had; where the format does not list them, all that its file calls."""
    error: str | None = None
    """The first error that followed the action, cut to 500 characters; None where there was none, or none is known."""
    entropy: float | None = None
    """How uncertain the student was: mean surprisal (-log p) of the action's tokens in nats, which estimates the mean
    entropy of what they were sampled from. Rollouts of this project hold it; None for traces of other agents."""
    format: str
    """The format of the trace, with the version that the reader was written for: `claude_code/2`."""
    schema_version: int = SCHEMA_VERSION


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _RequiredMessage(msgspec.Struct):
    """What every message must have; without it the line is not a state."""

    role: str
    content: str | None = None
    tool_calls: list[_Call] | None = None


_MOST_BYTES = 1 << 26
"""Of a first line that is read."""
_SHOWN_BYTES = 60
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE_BYTES = re.compile(_SURROGATE.pattern.encode())


def storable_arguments(arguments: str) -> str:
    """Return a call's arguments with "?" for each half character.

    A model may escape half a character in JSON text (`"\\ud83d"`), which no file, endpoint or tokenizer takes.
    """
    if not _SURROGATE.search(arguments):
        return arguments
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
    whole = text.encode("utf-8", "replace").decode()
    return arguments if whole == text else whole


def write_state(state: TraceState) -> bytes:
    """Return a whole state as one line."""
    return msgspec.json.encode(state) + b"\n"


def read_states(path: Path, on_bad: Callable[[ConfigError], None] | None = None) -> Iterator[TraceState]:
    """Yield every state of a file of states. They share the messages of their trace: nobody may change them.

    Raises ConfigError, which names the line, for a line that is not a state or of another schema. With `on_bad`, pass
    such a line to it and skip the line. A file that cannot be read is still an error.
    """
    decoder, table = _StateDecoder(), StateTable()
    try:
        for number, raw in enumerate(state_file_lines(path), 1):
            try:
                state = decoder.decode(raw, table, f"{path}:{number}")
            except ConfigError as error:
                if on_bad is None:
                    raise
                on_bad(error)
                continue
            if state is not None:
                yield state
    except OSError as error:
        raise ConfigError(f"the states file {path} cannot be read ({error}): make it with `composer ingest`") from None


class _StateDecoder:
    def __init__(self) -> None:
        self._whole = msgspec.json.Decoder(TraceState)
        self._compact = msgspec.json.Decoder(StateLine)

    def decode(self, raw: bytes, table: StateTable, where: str) -> TraceState | None:
        """Return the state of a line; None for a line of the table. Raises ConfigError."""
        try:
            taken = table.takes(raw)
            if isinstance(taken, dict):
                msgspec.convert(taken, _RequiredMessage)
                _make_storable([taken], raw)
            if taken is not False:
                return None
            state = self._with_table(raw, table) if raw.startswith(b'{"step":') else self._whole.decode(raw)
            known = [state.student_action] if raw.startswith(b'{"step":') else [*state.messages, state.student_action]
            msgspec.convert(known, list[_RequiredMessage])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError) as error:
            if not raw.startswith(b'{"step":'):  # it may be a line of the table
                table.forget()
            raise ConfigError(f"{where} is not a state ({error}): make the file again with `composer ingest`") from None
        if state.schema_version != SCHEMA_VERSION:
            raise ConfigError(
                f"{where} has schema_version {state.schema_version}, this release reads {SCHEMA_VERSION}: "
                "make the file again with `composer ingest`"
            )
        _make_storable(known, raw)
        return state

    def _with_table(self, raw: bytes, table: StateTable) -> TraceState:
        line = self._compact.decode(raw)
        if table.trace is None:
            raise LookupError("no trace begins before it, or a line between is damaged")
        return TraceState(
            trace_id=table.trace,
            state_id=f"{table.trace}/{line.step:04d}",
            step=line.step,
            messages=table.messages(line.context),
            student_action=line.student_action,
            source_model=line.source_model,
            source_family=line.source_family,
            tools=table.tools,
            error=line.error,
            entropy=line.entropy,
            format=line.format,
        )


def _make_storable(messages: list[Message], raw: bytes) -> None:
    """Replace the half characters in the arguments of calls. `raw`: the line that the messages are from."""
    if _SURROGATE_BYTES.search(raw):
        for message in messages:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = storable_arguments(call["function"]["arguments"])


def check_own(path: Path, is_own: Callable[[bytes], bool], what: str) -> None:
    """Raise ConfigError where the first line of `path` shows that it does not hold `what`, or cannot be read.

    A file that does not exist or is blank passes. A compressed file is looked into.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            line = b"\n"
            while line and not line.strip():
                line = file.readline(_MOST_BYTES)
        if line.startswith(MAGIC):
            line = next(state_file_lines(path), b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name another file") from None
    except ConfigError:
        raise ConfigError(
            f"{path} is compressed and damaged, so it is not known whether it holds {what}: remove it, or name another "
            "file"
        ) from None
    if line and not is_own(line):
        shown = line[:_SHOWN_BYTES].decode("utf-8", "replace").rstrip()
        raise ConfigError(
            f"{path} does not hold {what}, for it begins with {shown!r}. It was left as it is: name another file, or "
            "move this one elsewhere"
        )


def lines_of(kind: Any, *, beginning: bytes = b"") -> Callable[[bytes], bool]:
    """Return a check for `check_own`: whether a line is JSON of that `kind`.

    A line that a crash cut short passes by the `beginning` of whole lines.
    """
    decoder = msgspec.json.Decoder(kind)

    def is_own(line: bytes) -> bool:
        try:
            decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            torn = not line.endswith(b"\n") and bool(beginning)
            return torn and (line.startswith(beginning) or beginning.startswith(line))
        return True

    return is_own


def same_file(one: Path, other: Path) -> bool:
    """Return whether both paths name one file, by whatever spelling or link."""
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return one.resolve() == other.resolve()
