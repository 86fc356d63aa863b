"""A recorded decision of some agent: what it saw, what it did. One line of states.jsonl.

ingest (orchestrator/ingest) -> states.jsonl -> replay (orchestrator/teachers) -> pairs.jsonl -> channel 3
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from composer_prime.errors import ConfigError

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
    """What the agent saw: system, user, assistant and tool messages; thinking is taken out. Every call has a result."""
    student_action: Message
    """What it did: an assistant message with `content`, `tool_calls`, and `reasoning_content` where it thought."""
    source_model: str | None
    source_family: str
    """composer_prime.llm.families; `unknown` where the trace does not say."""
    tools: list[dict[str, Any]]
    """Function tools that the agent had, or where the format does not list them, all that its file calls."""
    error: str | None = None
    """The first error that followed the action, cut to 500 characters; None when it went well or nothing is known."""
    entropy: float | None = None
    """How uncertain the student was: mean surprisal (-log p) of the action's tokens in nats, which estimates the mean
    entropy of what they were sampled from. Own rollouts hold it; None for traces of other agents, which hold none."""
    format: str
    """The format that it was read from, with the version that the reader was written for: `claude_code/2`."""
    schema_version: int = SCHEMA_VERSION


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _Said(msgspec.Struct):
    """What is read of a message; one that lacks it makes the line no state."""

    role: str
    content: str | None = None
    tool_calls: list[_Call] | None = None


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE_BYTES = re.compile(_SURROGATE.pattern.encode())


def storable_arguments(written: str) -> str:
    """A call's arguments, JSON text in which a model may have escaped half a character (`"\\ud83d"`), with "?" for each
    such half: no file, endpoint or tokenizer takes it."""
    if not _SURROGATE.search(written):
        return written
    try:
        text = json.dumps(json.loads(written), ensure_ascii=False)
    except (ValueError, RecursionError):
        return written
    whole = text.encode("utf-8", "replace").decode()
    return written if whole == text else whole


def write_state(state: TraceState) -> bytes:
    """One line of states.jsonl."""
    return msgspec.json.encode(state) + b"\n"


def read_states(path: Path, on_bad: Callable[[ConfigError], None] | None = None) -> Iterator[TraceState]:
    """Every state of a states.jsonl. Raises ConfigError naming the line that is none, or of another schema.

    With `on_bad` such a line is given to it and left out; a file that cannot be read is an error all the same.
    """
    decoder = msgspec.json.Decoder(TraceState)
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    state = _decode(decoder, raw, f"{path}:{number}")
                except ConfigError as error:
                    if on_bad is None:
                        raise
                    on_bad(error)
                    continue
                yield state
    except OSError as error:
        raise ConfigError(f"the states file {path} cannot be read ({error}): make it with `composer ingest`") from None


def _decode(decoder: msgspec.json.Decoder[TraceState], raw: bytes, where: str) -> TraceState:
    try:
        state = decoder.decode(raw)
        msgspec.convert([*state.messages, state.student_action], list[_Said])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no state ({error}): make the file again with `composer ingest`") from None
    if state.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"{where} has schema_version {state.schema_version}, this release reads {SCHEMA_VERSION}: "
            "make the file again with `composer ingest`"
        )
    if _SURROGATE_BYTES.search(raw):
        for call in (call for said in (*state.messages, state.student_action) for call in said.get("tool_calls") or []):
            call["function"]["arguments"] = storable_arguments(call["function"]["arguments"])
    return state
